package postgres_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/providertest"
	"github.com/stretchr/testify/require"
)

var decided = projector.Decision{By: "ann", Reason: "a test"}

// parks sets a message of p/a aside, with the key k, and returns it.
func parks(t *testing.T, db *postgres.DB, id string, class projector.Class) projector.Parked {
	t.Helper()
	require.NoError(t, db.Do(t.Context(), projector.Work{Projector: "p", Park: []projector.Parked{setAside(id, class)}}, nil))
	list, err := db.ParkedMessages(t.Context(), projector.ParkedFilter{Projector: "p"})
	require.NoError(t, err)
	for _, p := range list {
		if p.MessageID == id {
			return p
		}
	}
	t.Fatalf("%s is not parked", id)
	return projector.Parked{}
}

func setAside(id string, class projector.Class) projector.Parked {
	return projector.Parked{Projector: "p", Handler: "p/a", MessageID: id, Key: "k", Type: "t", Holds: true, Class: class}
}

func at(id string, seq int64) projector.Attempt {
	return projector.Attempt{Projector: "p", Handler: "p/a", MessageID: id, Key: "k", Takes: []string{"t"}, Seq: seq}
}

// replaying is the work of a replay.
func replaying(p projector.Parked) projector.Work {
	return projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: p.MessageID}},
		Replay: []projector.Replay{{Attempt: at(p.MessageID, p.Seq), Decision: decided}}}
}

// behindOf is the work that parks id behind what is in its way.
func behindOf(id string) projector.Work {
	a := at(id, 0)
	return projector.Work{Projector: "p", Park: []projector.Parked{setAside(id, projector.HeldClass)}, Behind: &a}
}

// paused runs a unit that waits for the function that it returns, which returns the unit's error.
func paused(t *testing.T, db *postgres.DB, w projector.Work) (finish func() error) {
	t.Helper()
	began, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- db.Do(t.Context(), w, func(context.Context, pgx.Tx, []int) ([]outbox.Message, error) {
			close(began)
			<-release
			return nil, nil
		})
	}()
	<-began
	return sync.OnceValue(func() error { close(release); return <-done })
}

// blocked waits until somebody waits for a lock, and tells whether somebody does.
func blocked(t *testing.T, db *postgres.DB) {
	t.Helper()
	require.Eventually(t, func() bool {
		return count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) > 0
	}, 5*time.Second, time.Millisecond)
}

func dueOf(t *testing.T, db *postgres.DB) (ids []string) {
	t.Helper()
	list, err := db.DueParked(t.Context(), "p", nil, 0, 10)
	require.NoError(t, err)
	for _, p := range list {
		ids = append(ids, p.MessageID)
	}
	return ids
}

// Nothing is ever parked behind what is gone: whoever comes second sees what the first one did.
func TestNobodyIsParkedBehindNothing(t *testing.T) {
	t.Parallel()
	skip := func(db *postgres.DB, t *testing.T) error {
		n, err := db.SkipParked(t.Context(), projector.ParkedFilter{Handler: "p/a", Class: new(projector.Class)}, decided)
		require.Equal(t, 1, n)
		return err
	}
	t.Run("it is being replayed", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, nil)
		finish := paused(t, db, replaying(parks(t, db, "1", projector.UnknownClass)))
		behind := make(chan error, 1)
		go func() { behind <- db.Do(t.Context(), behindOf("2"), nil) }()
		blocked(t, db)
		require.NoError(t, finish())
		require.ErrorIs(t, <-behind, projector.ErrNotHeld)
		require.Zero(t, count(t, db, `select count(*) from kinora.parked where state = 'parked'`))
	})
	t.Run("it is being skipped", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, nil)
		parks(t, db, "1", projector.UnknownClass)
		tx, err := db.Pool().Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), `update kinora.parked set state = 'skipped'`)
		require.NoError(t, err)
		behind := make(chan error, 1)
		go func() { behind <- db.Do(t.Context(), behindOf("2"), nil) }()
		blocked(t, db)
		require.NoError(t, tx.Commit(t.Context()))
		require.ErrorIs(t, <-behind, projector.ErrNotHeld)
	})
	t.Run("it is skipped after, and what waits is due", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, nil)
		parks(t, db, "1", projector.UnknownClass)
		finish := paused(t, db, behindOf("2"))
		skipped := make(chan error, 1)
		go func() { skipped <- skip(db, t) }()
		blocked(t, db)
		require.NoError(t, finish())
		require.NoError(t, <-skipped)
		require.Equal(t, []string{"2"}, dueOf(t, db))
	})
	t.Run("it is replayed after, and what waits is due", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, nil)
		p := parks(t, db, "1", projector.UnknownClass)
		finish := paused(t, db, behindOf("2"))
		replayed := make(chan error, 1)
		go func() { replayed <- db.Do(t.Context(), replaying(p), nil) }()
		blocked(t, db)
		require.NoError(t, finish())
		require.NoError(t, <-replayed)
		require.Equal(t, []string{"2"}, dueOf(t, db))
	})
	t.Run("what waits is said not to be due while it is being skipped", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, nil)
		parks(t, db, "1", projector.UnknownClass)
		second := parks(t, db, "2", projector.HeldClass)
		_, err := db.Pool().Exec(t.Context(), `update kinora.parked set due = true where message_id = '2'`)
		require.NoError(t, err)
		tx, err := db.Pool().Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), `update kinora.parked set state = 'skipped' where message_id = '1'`)
		require.NoError(t, err)
		failed := make(chan error, 1)
		go func() { failed <- db.FailParked(t.Context(), "", second, at("2", second.Seq)) }()
		blocked(t, db)
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-failed)
		require.Equal(t, []string{"2"}, dueOf(t, db))
	})
}

// Also where they are of two processes, which do not share turns.
func TestTwoReplaysOfOneMessage(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	other := reopen(t, db, providertest.Options{})
	for i, second := range []*postgres.DB{db, other} {
		p := parks(t, db, string(rune('a'+i)), projector.UnknownClass)
		finish := paused(t, db, replaying(p))
		done := make(chan error, 1)
		go func() {
			done <- second.Do(t.Context(), replaying(p), func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
				return nil, add(ctx, tx, "k", 1)
			})
		}()
		if second == other {
			blocked(t, db)
		}
		require.NoError(t, finish())
		err := <-done
		require.ErrorIs(t, err, projector.ErrNotParked)
		var which *projector.ReplayError
		require.ErrorAs(t, err, &which)
		require.Equal(t, p.Seq, which.Seq)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
	require.Equal(t, 2, count(t, db, `select count(*) from kinora.parked where state = 'replayed' and resolved_by = 'ann'`))
}

// A marker that is being pruned is waited for, and then the floor says that it was there.
func TestAReplayBesidePruning(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	p := parks(t, db, "1", projector.UnknownClass)
	require.NoError(t, db.Do(t.Context(), projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "1"}}}, nil))
	_, err := db.Pool().Exec(t.Context(), `update kinora.parked set parked_at = parked_at - interval '10 days';
		update kinora.markers set processed_at = processed_at - interval '9 days'`)
	require.NoError(t, err)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), constants(t)["pruneMarkersSQL"], "p/a", (8 * 24 * time.Hour).Microseconds(), 1)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- db.Do(t.Context(), replaying(p), nil) }()
	blocked(t, db)
	require.NoError(t, tx.Commit(t.Context()))
	require.ErrorIs(t, <-done, projector.ErrPruned)
	forced := replaying(p)
	forced.Replay[0].Force = true
	require.NoError(t, db.Do(t.Context(), forced, nil))
}

// Crossing skips, replays and parking: whatever the order of locks, all end, and nothing waits behind nothing.
func TestACrowdInOneLane(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	var all sync.WaitGroup
	for w := range 6 {
		all.Go(func() {
			for i := range 15 {
				id := string(rune('a'+w)) + string(rune('a'+i))
				class := projector.ClassOf
				if err := db.Do(t.Context(), behindOf(id), nil); err != nil && class(err) != projector.Transient {
					if err = db.Do(t.Context(), projector.Work{Projector: "p", Park: []projector.Parked{setAside(id, projector.UnknownClass)}}, nil); err != nil {
						t.Error(err)
					}
				}
				list, err := db.ParkedMessages(t.Context(), projector.ParkedFilter{Limit: 2})
				if err != nil {
					t.Error(err)
				}
				for _, p := range list {
					if i%3 == 0 {
						_, err = db.SkipParked(t.Context(), projector.ParkedFilter{Seqs: []int64{p.Seq}}, decided)
					} else if err = db.Do(t.Context(), replaying(p), nil); class(err) == projector.PermanentClass || class(err) == projector.Transient {
						err = nil
					}
					if err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	all.Wait()
	var first int
	err := db.Pool().QueryRow(t.Context(), `select case when due or class <> 'held' then 1 else 0 end from kinora.parked where state = 'parked' order by id limit 1`).Scan(&first)
	if err != nil {
		require.ErrorIs(t, err, pgx.ErrNoRows)
		return
	}
	require.Equal(t, 1, first, "the first of the lane waits for nobody")
}

func TestSkippingALongLaneTakesNoLongerThanItIsLong(t *testing.T) {
	t.Parallel()
	const n = 20_000
	db := postgrestest.Open(t, nil)
	first := parks(t, db, "first", projector.UnknownClass)
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.parked (projector, handler, message_id, message_hash, topic, key, key_hash, type, holds, payload, headers, class, code, attempts, version)
		select projector, handler, 'm' || g, sha256(('m' || g)::bytea), topic, key, key_hash, type, holds, payload, headers, 'held', '', 0, ''
		from kinora.parked, generate_series(1, $1::int) g where id = $2`, n, first.Seq)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second) // a walk from each takes minutes
	defer cancel()
	skipped, err := db.SkipParked(ctx, projector.ParkedFilter{Key: "k", Limit: n}, decided)
	require.NoError(t, err)
	require.Equal(t, n, skipped)
	require.Equal(t, []string{"m20000"}, dueOf(t, db), "the one that is left")
}

// A unit that forgets a message's attempts has their row for as long as its handler runs: whoever counts another attempt at the
// message meanwhile, with the turn of its runner, is told to come again.
func TestACountDoesNotWaitForAHandler(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "m"}
	n, err := db.CountAttempt(t.Context(), "", a, -1)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	finish := paused(t, db, projector.Work{Projector: "p", Forget: []projector.Attempt{a}})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = db.CountAttempt(ctx, "", a, -1)
	var e *projector.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, projector.Transient, e.Class)
	require.Equal(t, "55P03", e.Code)
	require.NoError(t, finish())
	n, err = db.CountAttempt(t.Context(), "", a, -1)
	require.NoError(t, err)
	require.Equal(t, 1, n, "they were forgotten")
}
