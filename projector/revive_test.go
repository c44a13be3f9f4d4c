package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// older is a program that does not know the type "posted" yet.
func older() *projector.Projector[txn] {
	return projector.Define("p", eventstore.NewTypes(eventstore.Type[unhandled]("unhandled")), marked,
		projector.On("edited", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil }))
}

// A producer may be deployed first. A message parked for its unknown type is applied once a runner
// knows the type.
// Promise: G6.9
func TestUnregisteredTypesAreReplayedOnceKnown(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"to a runner that starts": false, "to a runner that runs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				newer := newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, note("a"), note("b")))
				var stopNewer func() error
				if before {
					stopNewer = start(t, newer)
				}
				stop := run(t, db, f, projector.RunnerConfig{}, older())
				f.deliver(t, keyed("k", 1), keyed("l", 1), keyed("k", 2))
				require.Equal(t, []string{"k-1 stuck permanent unregistered 1", "l-1 stuck permanent unregistered 1", "k-2 waiting held 0"}, rows(parked(t, db)))
				require.NoError(t, stop())
				wait := 12 * time.Second
				if !before {
					time.Sleep(time.Minute)
					require.Len(t, parked(t, db), 3)
					stopNewer, wait = start(t, newer), 2*time.Second
				}
				time.Sleep(wait)
				require.NoError(t, stopNewer())
				require.Empty(t, parked(t, db))
				for _, table := range []string{"a", "b"} {
					require.Equal(t, upTo(2), noted(db, table, "k"))
					require.Equal(t, upTo(1), noted(db, table, "l"))
				}
			})
		})
	}
}

// The same for a message whose handler no program has: it waits for a program with that handler.
func TestParkedMessageWaitsForAProgramWithItsHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 3)...)
		require.NoError(t, stop())
		bad.fix()
		skip(t, db, projector.ParkedFilter{Seqs: []int64{1}})
		other := projector.Define("p", types, marked, projector.On("other", note("other")))
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, other)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-2 stuck permanent no_handler 1", "k-3 waiting held 0"}, rows(parked(t, db)))
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, define(marked, bad.run))
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{2, 3}, noted(db, "a", "k"))
		require.Empty(t, noted(db, "other", "k"))
		require.Empty(t, parked(t, db))
	})
}

// The handler may have been renamed meanwhile.
func TestParkedMessageRunsARenamedHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 2)...)
		require.NoError(t, stop())
		bad.fix()
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, projector.Define("p", types, marked, projector.On("renamed", bad.run).Was("a")))
		require.Equal(t, upTo(2), noted(db, "a", "k"))
	})
}

// During a rollout, runners of the old version still run and may try the message first.
func TestMessageTriedByAnOlderProgramIsReplayed(t *testing.T) {
	t.Parallel()
	for name, old := range map[string]*projector.Projector[txn]{
		"without the type":    older(),
		"without the handler": projector.Define("p", types, marked, projector.On("other", note("other"))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNever})
				if name == "without the type" {
					stop := run(t, db, f, projector.RunnerConfig{}, old)
					f.deliver(t, series("k", 1, 3)...)
					require.NoError(t, stop())
				} else {
					stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
					f.deliver(t, series("k", 1, 3)...)
					require.NoError(t, stop())
					replayAll(t, db, all)
				}
				bad.fix()
				began := time.Now()
				slow := &faulty{unit: db}
				slow.due = func(ctx context.Context, d provider.DueFilter) ([]provider.Parked, error) {
					// For the first minute the old runner is faster.
					if time.Since(began) < time.Minute {
						return nil, nil
					}
					return db.Due(ctx, d)
				}
				stopOld := run(t, db, make(subscription), projector.RunnerConfig{}, old)
				stopNew := run(t, slow, make(subscription), projector.RunnerConfig{}, define(marked, bad.run))
				time.Sleep(time.Minute)
				require.NoError(t, stopOld())
				require.Len(t, parked(t, db), 3)
				time.Sleep(2 * time.Minute)
				require.NoError(t, stopNew())
				require.Equal(t, upTo(3), noted(db, "a", "k"))
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// A program may know the type but not this schema version. It retries at growing intervals.
func TestUnknownSchemaVersionIsRetriedAtGrowingIntervals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(subscription), 0
		store := &faulty{unit: db}
		store.try = func(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
			tries++
			return db.Try(ctx, p, limit, again)
		}
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, note("a")))
		m := keyed("k", 1)
		m.Metadata[provider.HeaderSchema] = "9"
		f.deliver(t, m)
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 stuck permanent unregistered 1"}, rows(parked(t, db)))
		require.LessOrEqual(t, tries, 10)
		require.GreaterOrEqual(t, tries, 5)
	})
}
