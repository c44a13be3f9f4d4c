package projector_test

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// requestOf adds a request about projector "p".
func requestOf(t *testing.T, db *memory.DB, verb string, detail any) int64 {
	t.Helper()
	text, err := json.Marshal(detail)
	require.NoError(t, err)
	id, err := db.AddAct(t.Context(), provider.Act{
		Verb: verb, Kind: provider.PauseProjector, Name: "p", Detail: text, State: provider.ActRequested, Decision: person,
	})
	require.NoError(t, err)
	return id
}

func requested(t *testing.T, db *memory.DB, id int64) provider.Act {
	t.Helper()
	acts, err := db.Acts(t.Context(), provider.ActFilter{IDs: []int64{id}})
	require.NoError(t, err)
	require.Len(t, acts, 1)
	return acts[0]
}

// During a deployment a program of another version of the read model runs too. It must not take a request, which it could
// only fail.
// Promise: O2.2
func TestARequestWaitsForAProgramOfTheLiveVersion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(3)...)
		of := func(version int) *projector.Runner {
			return newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, built(projector.Options{Version: version, RebuildOnChange: projector.BlueGreen}, 1))
		}
		stopNew := start(t, of(2))
		time.Sleep(time.Second)
		stopOld := start(t, of(1))
		for range 5 {
			id := requestOf(t, db, provider.VerbVerify, provider.VerifyRequest{})
			time.Sleep(time.Minute)
			require.Equal(t, provider.ActDone, requested(t, db, id).State)
		}
		require.NoError(t, stopNew())
		id := requestOf(t, db, provider.VerbVerify, provider.VerifyRequest{})
		time.Sleep(time.Minute)
		require.Equal(t, provider.ActRequested, requested(t, db, id).State)
		stopNew = start(t, of(2))
		time.Sleep(time.Minute)
		require.Equal(t, provider.ActDone, requested(t, db, id).State)
		require.NoError(t, stopNew())
		require.NoError(t, stopOld())
	})
}

// noting returns a program that knows "rated" up to a schema version, and may have more handlers.
func noting(schema int, more ...projector.Handler[txn]) *projector.Projector[txn] {
	ups := []func(json.RawMessage) (json.RawMessage, error){unchanged, unchanged}
	create := projector.OnCreate(func(context.Context, txn) error { return nil })
	apply := projector.On("rated", func(ctx context.Context, tx txn, e eventstore.Event[rated]) error {
		return noteIn(tx, projector.Table(ctx, "notes"), e.Stream, e.Data.Stars)
	})
	return projector.Define("p", eventstore.NewTypes(eventstore.Type[rated]("rated", ups[:schema-1]...)), projector.Options{Tables: []string{"notes"}},
		append(more, create, apply)...)
}

var again = projector.On("again", func(ctx context.Context, tx txn, e eventstore.Event[rated]) error {
	return noteIn(tx, projector.Table(ctx, "notes"), "again "+e.Stream, e.Data.Stars)
})

// A verification that has begun before a program with more has started does not repair what that has applied.
// Promise: O2.2
func TestAVerificationBesideANewProgramRepairsNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		newer  *projector.Projector[txn]
		schema int
	}{
		"a handler":        {noting(1, again), 1},
		"a schema version": {noting(2), 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, older := newDB(t), noting(1)
				stopOld := fromLog(t, db, projector.RunnerConfig{}, older)
				rate(t, db, "rated", 1, "k-1", upTo(50)...)
				time.Sleep(time.Minute)
				var stopNew func() error
				begin := func(int64, int64) {
					if stopNew == nil {
						stopNew = fromLog(t, db, projector.RunnerConfig{}, c.newer)
						time.Sleep(5 * time.Second)
						rate(t, db, "rated", c.schema, "k-1", 51)
						time.Sleep(5 * time.Second)
					}
				}
				want := func() (all [][]int) { return append(all, noted(db, "notes", "k-1"), noted(db, "notes", "again k-1")) }
				_, err := older.Verify(t.Context(), db, projector.Verification{Repair: person, Rate: 10, Progress: begin}, &projector.RunnerConfig{Log: db})
				require.ErrorIs(t, err, projector.ErrGeneration)
				applied := want()
				require.Equal(t, upTo(51), applied[0])
				time.Sleep(time.Minute)
				require.Equal(t, applied, want())
				require.NoError(t, stopNew())
				require.NoError(t, stopOld())
			})
		})
	}
}

// A program that lacks a handler of the live read model, or the schema version of one of its events, neither verifies it nor
// rebuilds it: the effects would be missing.
// Promise: O2.2
func TestVerificationsAndRebuildsAreLeftToAProgramThatHasAll(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		older, newer *projector.Projector[txn]
		schema       int
		again        []int
	}{
		"a handler":        {noting(1), noting(1, again), 1, upTo(3)},
		"a schema version": {noting(1), noting(2), 2, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				begin := func(p *projector.Projector[txn]) func() error {
					return start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
				}
				stopNew := begin(c.newer)
				time.Sleep(time.Second)
				for n := range 3 {
					rate(t, db, "rated", c.schema, "k-1", n+1)
				}
				time.Sleep(time.Minute)
				require.NoError(t, stopNew())
				stopOld := begin(c.older)
				time.Sleep(time.Minute)
				_, err := c.older.Verify(t.Context(), db, projector.Verification{}, nil)
				require.ErrorIs(t, err, projector.ErrGeneration)
				verified := requestOf(t, db, provider.VerbVerify, provider.VerifyRequest{})
				time.Sleep(time.Hour)
				require.Equal(t, provider.ActRequested, requested(t, db, verified).State)
				stopNew = begin(c.newer)
				time.Sleep(time.Minute)
				require.Equal(t, provider.ActDone, requested(t, db, verified).State)
				require.NoError(t, stopNew())
				g, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
				require.NoError(t, err)
				time.Sleep(time.Hour)
				state(t, db, c.older, g, "requested")
				stopNew = begin(c.newer)
				state(t, db, c.newer, g, "live")
				require.Equal(t, upTo(3), noted(db, "notes", "k-1"))
				require.Equal(t, c.again, noted(db, "notes", "again k-1"))
				require.NoError(t, stopNew())
				require.NoError(t, stopOld())
			})
		})
	}
}

// A dry run of a message that a program is unable to apply waits for one that is able.
// Promise: G6.9
func TestADryRunWaitsForAProgramThatCan(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		stopOld := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, knowing(1, 0, projector.Options{})))
		rate(t, db, "rated", 2, "review-0", 1)
		time.Sleep(time.Second)
		require.Len(t, parked(t, db), 1)
		setPaused(t, db, true) // so that it stays parked
		time.Sleep(2 * time.Second)
		id := requestOf(t, db, provider.VerbDryRun, provider.DryRunRequest{})
		time.Sleep(time.Minute)
		require.Equal(t, provider.ActRequested, requested(t, db, id).State)
		stopNew := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, knowing(2, 0, projector.Options{})))
		time.Sleep(5 * time.Second)
		act := requested(t, db, id)
		require.Equal(t, provider.ActDone, act.State)
		var report provider.DryRunReport
		require.NoError(t, json.Unmarshal(act.Outcome, &report))
		require.Equal(t, 1, report.Messages)
		require.Empty(t, report.Failures)
		setPaused(t, db, false)
		time.Sleep(5 * time.Second)
		require.Equal(t, []int{1}, noted(db, "a", "review-0"))
		require.NoError(t, stopNew())
		require.NoError(t, stopOld())
	})
}

func setPaused(t *testing.T, db *memory.DB, paused bool) {
	t.Helper()
	_, err := db.SetPause(t.Context(), provider.Pause{Kind: provider.PauseProjector, Name: "p", Decision: person}, paused)
	require.NoError(t, err)
}
