package projector_test

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

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
