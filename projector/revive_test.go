package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// older is a program that does not know the type "posted" yet.
func older() *projector.Projector[txn] {
	return projector.Define("p", eventstore.NewTypes(eventstore.Type[unhandled]("unhandled")), marked,
		projector.On("edited", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil }))
}

// A producer may be deployed first. A message that was parked for its unknown type is applied once a runner knows it.
func TestUnregisteredTypesComeBackOnceTheyAreKnown(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"to a runner that starts": false, "to a runner that runs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(feed)
				newer := newRunner(t, db, projector.Subscribe(make(feed), "review"), projector.RunnerConfig{}, define(marked, note("a"), note("b")))
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

// So is one that was parked for a handler that no program has now, once one has it. No other program touches it.
func TestAParkedMessageWaitsForAProgramWithItsHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 3)...)
		require.NoError(t, stop())
		bad.mend()
		skip(t, db, projector.ParkedFilter{Seqs: []int64{1}})
		other := projector.Define("p", types, marked, projector.On("other", note("other")))
		stop = run(t, db, make(feed), projector.RunnerConfig{}, other)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-2 stuck permanent no_handler 1", "k-3 waiting held 0"}, rows(parked(t, db)))
		stop = run(t, db, make(feed), projector.RunnerConfig{}, define(marked, bad.run))
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{2, 3}, noted(db, "a", "k"))
		require.Empty(t, noted(db, "other", "k"))
		require.Empty(t, parked(t, db))
	})
}

// The handler may have got another name since.
func TestAParkedMessageRunsARenamedHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 2)...)
		require.NoError(t, stop())
		bad.mend()
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, projector.Define("p", types, marked, projector.On("renamed", bad.run).Was("a")))
		require.Equal(t, upTo(2), noted(db, "a", "k"))
	})
}

// While a new version is rolled out, runners of the old one still run, and may try the message first.
func TestWhatAnOlderProgramTriesFirstComesBackAgain(t *testing.T) {
	t.Parallel()
	for name, old := range map[string]*projector.Projector[txn]{
		"without the type":    older(),
		"without the handler": projector.Define("p", types, marked, projector.On("other", note("other"))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(feed)
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
				bad.mend()
				began := time.Now()
				slow := &faulty{unit: db}
				slow.due = func(ctx context.Context, d provider.DueFilter) ([]provider.Parked, error) {
					if time.Since(began) < time.Minute { // as long, the old runner is quicker
						return nil, nil
					}
					return db.Due(ctx, d)
				}
				stopOld := run(t, db, make(feed), projector.RunnerConfig{}, old)
				stopNew := run(t, slow, make(feed), projector.RunnerConfig{}, define(marked, bad.run))
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

// A program that knows the type may not know that version of it. It tries less and less often.
func TestAVersionOfATypeThatStaysUnknownIsTriedLessAndLess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(feed), 0
		store := &faulty{unit: db}
		store.try = func(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
			tries++
			return db.Try(ctx, p, limit, again)
		}
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, note("a")))
		m := keyed("k", 1)
		m.Metadata[outbox.HeaderSchema] = "9"
		f.deliver(t, m)
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 stuck permanent unregistered 1"}, rows(parked(t, db)))
		require.LessOrEqual(t, tries, 10)
		require.GreaterOrEqual(t, tries, 5)
	})
}
