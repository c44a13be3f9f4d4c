package projector_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// crash leaves the records of a runner that died while these messages were in flight.
func crash(t *testing.T, db *memory.DB, runner string, lease time.Duration, ids ...string) {
	t.Helper()
	_, err := db.Beat(t.Context(), runner, lease, time.Hour)
	require.NoError(t, err)
	require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, provider.Worker{Runner: runner}, ids))
}

// inFlightStore records the messages that a runner records as in flight before it runs them.
type inFlightStore struct {
	faulty
	mu    sync.Mutex
	calls int
	ids   []string
}

func newInFlightStore(db unit) *inFlightStore {
	n := &inFlightStore{faulty: faulty{unit: db}}
	n.name = func(ctx context.Context, projector provider.Build, w provider.Worker, ids []string) error {
		n.mu.Lock()
		n.calls++
		n.ids = append(n.ids, ids...)
		n.mu.Unlock()
		return db.InFlight(ctx, projector, w, ids)
	}
	return n
}

// recordsFirst delivers m, which must be new, and reports whether the runner recorded it as in
// flight before it ran it.
func (n *inFlightStore) recordsFirst(t *testing.T, f subscription, m *message.Message) bool {
	t.Helper()
	n.mu.Lock()
	n.calls, n.ids = 0, nil
	n.mu.Unlock()
	f.deliver(t, m)
	n.mu.Lock()
	defer n.mu.Unlock()
	require.Equal(t, slices.Contains(n.ids, m.UUID), n.calls > 0)
	return n.calls > 0
}

// A message that a dead process was running was recorded as an event before that process died. Only
// such messages are recorded as in flight before they run; all others cost nothing.
// Promise: G6.11
func TestOnlyMessagesLeftByACrashAreRecordedInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		n, began := newInFlightStore(db), time.Now()
		stop := run(t, n, f, projector.RunnerConfig{}, define(marked, note("a")))
		number := 0
		next := func() *message.Message { number++; return keyed("k", number) }
		at := func(d time.Duration) *message.Message { return recorded(next(), began.Add(d)) }

		time.Sleep(10 * time.Second) // during its first lease
		require.True(t, n.recordsFirst(t, f, at(-time.Second)), "an earlier process may have died just before the start")
		require.True(t, n.recordsFirst(t, f, next()), "the message has no time")
		require.False(t, n.recordsFirst(t, f, at(5*time.Second)))
		newer := keyed("z", 1)
		newer.Metadata[provider.HeaderSchema] = "9"
		require.False(t, n.recordsFirst(t, f, newer), "no handler runs: it is parked")

		time.Sleep(10 * time.Second) // now the runner would know of that process
		require.False(t, n.recordsFirst(t, f, at(-time.Second)))
		require.False(t, n.recordsFirst(t, f, next()))

		crash(t, db, "dead", 15*time.Second)
		ended := time.Since(began) + 15*time.Second
		require.False(t, n.recordsFirst(t, f, at(5*time.Second)), "the dead runner's lease has not ended")
		time.Sleep(25 * time.Second)
		require.True(t, n.recordsFirst(t, f, at(ended)), "the message is older than the end of the dead runner's lease")
		require.False(t, n.recordsFirst(t, f, at(ended+time.Millisecond)), "the message is newer than that end")
		require.True(t, n.recordsFirst(t, f, next()), "the message has no time")
		require.True(t, n.recordsFirst(t, f, at(24*time.Hour)), "a time in the future is not trusted")
		require.False(t, n.recordsFirst(t, f, at(time.Since(began)+30*time.Second)), "clocks may differ a little")

		time.Sleep(time.Hour + 10*time.Second) // the crash is no longer on record
		require.False(t, n.recordsFirst(t, f, at(ended-time.Second)))
		require.False(t, n.recordsFirst(t, f, next()))
		require.NoError(t, stop())
		require.Equal(t, upTo(number), noted(db, "a", "k"))
	})
}

func TestCarefulRunnerRecordsEveryMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		n := newInFlightStore(db)
		stop := run(t, n, f, projector.RunnerConfig{Careful: true}, define(marked, note("a")))
		time.Sleep(time.Minute)
		require.True(t, n.recordsFirst(t, f, recorded(keyed("k", 1), time.Now())))
		require.NoError(t, stop())
	})
}

// A runner that does not know which runners have died records every message.
func TestRunnerWithoutHealthReportRecordsEveryMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		n, away := newInFlightStore(db), time.Now().Add(time.Minute)
		n.beat = func(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
			if time.Now().Before(away) {
				return provider.Health{}, errBusy
			}
			return db.Beat(ctx, runner, lease, record)
		}
		stop := run(t, n, f, projector.RunnerConfig{}, define(marked, note("a")))
		time.Sleep(50 * time.Second)
		require.True(t, n.recordsFirst(t, f, recorded(keyed("k", 1), time.Now())))
		time.Sleep(20 * time.Second)
		require.False(t, n.recordsFirst(t, f, recorded(keyed("k", 2), time.Now())))
		require.NoError(t, stop())
	})
}

// If the store cannot record messages for a while, no message counts an attempt, whatever class the
// error has.
func TestMessageThatCannotBeRecordedDoesNotRun(t *testing.T) {
	t.Parallel()
	for _, class := range []projector.Class{projector.ClassUnknown, projector.ClassTransient, projector.ClassPermanent, provider.ClassShutdown} {
		t.Run(class.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, fails := newDB(t), make(subscription), 10
				bad := newFaults(nil)
				store := &faulty{unit: db}
				store.name = func(ctx context.Context, p provider.Build, w provider.Worker, ids []string) error {
					if fails--; fails >= 0 {
						require.Zero(t, bad.tried("k-1"))
						return &projector.Error{Class: class, Err: errors.New("away")}
					}
					return db.InFlight(ctx, p, w, ids)
				}
				stop := run(t, store, f, projector.RunnerConfig{Careful: true}, define(marked, bad.run))
				f.deliver(t, keyed("k", 1))
				require.NoError(t, stop())
				require.Equal(t, upTo(1), noted(db, "a", "k"))
			})
		})
	}
}

// A message that another runner had in flight is parked with one attempt, and later messages of its
// key wait behind it. Then it runs alone. Messages that were in flight with it are not affected
// otherwise.
// Promise: G6.11
func TestSuspectIsParkedAndRetriedFromItsRow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		crash(t, db, "dead", time.Second, "k-1", "other-1")
		time.Sleep(2 * time.Second)
		f, g := make(subscription), newGate(note("a"))
		store := record(db, nil)
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, g.run))
		f.send(keyed("gate", 1))
		synctest.Wait()
		sent := f.send(keyed("k", 1), keyed("k", 2), keyed("new", 1), keyed("other", 1))
		synctest.Wait()
		close(g.open)
		acked(t, sent...)
		require.Equal(t, []string{"k-1 waiting unknown crashed 1", "k-2 waiting held 0", "other-1 waiting unknown crashed 1"}, rows(parked(t, db)))
		require.Equal(t, upTo(1), noted(db, "a", "new"))
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k"))
		require.Equal(t, upTo(1), noted(db, "a", "other"))
		require.Empty(t, parked(t, db))
		ran := store.list()
		require.Equal(t, []string{"gate-1", "k-1 k-2 new-1 other-1 parked 3"}, ran[:2])
		require.ElementsMatch(t, []string{"k-1", "other-1", "k-2"}, ran[2:])
	})
}

// A careful runner's in-flight records are deleted when its unit commits, or when the runner stops
// cleanly.
func TestInFlightRecordsAreDeleted(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"with the commit", "when the runner stops"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, other := newDB(t), make(subscription), make(subscription)
				bad := newFaults(map[string]error{})
				// Without markers, so that a redelivery runs again.
				p := define(projector.Options{}, bad.run)
				stop := run(t, db, f, projector.RunnerConfig{Careful: true}, p)
				if end == "with the commit" {
					f.deliver(t, keyed("k", 1))
				} else {
					bad.set("k-1", errBusy)
					f.send(keyed("k", 1))
					time.Sleep(time.Second)
					bad.fix()
					require.NoError(t, stop())
				}
				stopOther := run(t, db, other, projector.RunnerConfig{Careful: true}, p)
				other.deliver(t, keyed("k", 1))
				require.Empty(t, parked(t, db), "the message is not a suspect")
				require.NoError(t, stopOther())
				_ = stop
				if end == "with the commit" {
					require.NoError(t, stop())
				}
			})
		})
	}
}

// While a suspect runs, no handler of any runner runs in its process. The suspect waits until the
// running handlers have returned, and waiting is not an attempt.
// Promise: G6.11
func TestSuspectWaitsForItsProcessBeforeItIsCounted(t *testing.T) {
	t.Parallel()
	for name, skipped := range map[string]bool{"then it runs": false, "it is skipped meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				crash(t, db, "dead", time.Second, "k-1")
				time.Sleep(2 * time.Second)
				release, listed := make(chan struct{}), make(chan struct{})
				free := sync.OnceFunc(func() { close(release) })
				defer free()
				var once sync.Once
				store := &faulty{unit: db}
				store.due = func(ctx context.Context, d provider.DueFilter) ([]provider.Parked, error) {
					list, err := db.Due(ctx, d)
					if len(list) > 0 {
						once.Do(func() { close(listed) })
					}
					return list, err
				}
				// The other runner has its own store, so that it does not block this one's.
				elsewhere := &faulty{unit: newDB(t)}
				f, g := make(subscription), make(subscription)
				bad := newFaults(nil)
				one := newRunner(t, store, projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(marked, bad.run))
				other := newRunner(t, elsewhere, projector.Subscribe(g, "review"), projector.RunnerConfig{Timeout: time.Hour}, define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
					<-release
					return nil
				}))
				projector.ShareProcess(one, other)
				stopOne, stopOther := start(t, one), start(t, other)
				busy := g.send(keyed("busy", 1))[0]
				synctest.Wait()
				f.deliver(t, keyed("k", 1))
				<-listed
				for range 10_000 { // a goroutine that waits for a lock stops the bubble's clock
					runtime.Gosched()
				}
				waiting := rows(parked(t, db))
				if skipped {
					skip(t, db, all)
				}
				free()
				acked(t, busy)
				time.Sleep(2 * time.Second)
				require.NoError(t, stopOne())
				require.NoError(t, stopOther())
				want := 1
				if skipped {
					want = 0
				}
				require.Equal(t, []string{"k-1 waiting unknown crashed 1"}, waiting, "waiting is not counted as an attempt")
				require.Equal(t, want, bad.tried("k-1"))
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// The attempt during which a process ended is already counted, so that becoming a suspect counts no
// other.
func TestBeingASuspectCostsNoAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNo})
		cfg := projector.RunnerConfig{Retry: claim.Backoff{Attempts: 2}}
		p := define(marked, bad.run)
		stop := run(t, db, f, cfg, p)
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 waiting unknown 1"}, rows(parked(t, db)))
		crash(t, db, "dead", time.Second, "k-1")
		time.Sleep(5 * time.Second)
		bad.fix()
		stop = run(t, db, make(subscription), cfg, p)
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k"), "its second attempt remained")
		require.Empty(t, parked(t, db))
	})
}

// A suspect whose attempt ends with a transient error is still a suspect: it still runs alone.
func TestSuspectStaysSuspectAfterTransientError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		crash(t, db, "dead", time.Second, "k-1")
		time.Sleep(2 * time.Second)
		f := make(subscription)
		bad := newFaults(map[string]error{"k-1": errBusy})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, keyed("k", 1))
		time.Sleep(5 * time.Second)
		require.Greater(t, bad.tried("k-1"), 1)
		require.Equal(t, []string{"k-1 waiting transient crashed 1"}, rows(parked(t, db)))
		bad.fix()
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}

// A runner that stops cleanly leaves no crash on record. One that gives up on a running handler
// does.
func TestOnlyUncleanEndsAreCrashes(t *testing.T) {
	t.Parallel()
	for name, crashed := range map[string]bool{"a stop": false, "a handler that does not return": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, release := newDB(t), make(subscription), make(chan struct{})
				stop := run(t, db, f, projector.RunnerConfig{Drain: time.Second}, define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
					<-release
					return nil
				}))
				f.send(keyed("k", 1))
				synctest.Wait()
				if crashed {
					require.ErrorIs(t, stop(), outbox.ErrDrain)
				} else {
					close(release)
					require.NoError(t, stop())
				}
				time.Sleep(time.Minute)
				health, err := db.Beat(t.Context(), "other", time.Minute, time.Hour)
				require.NoError(t, err)
				require.Equal(t, crashed, !health.Crashed.IsZero())
				if crashed {
					close(release)
				}
			})
		})
	}
}
