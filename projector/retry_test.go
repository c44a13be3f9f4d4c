package projector_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// parks records each parking: the attempts so far and the delay.
func parks(db unit) (store *faulty, list func() []string) {
	var seen []string
	store = &faulty{unit: db}
	store.do = func(ctx context.Context, u provider.Unit, run handle) error {
		return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
			c, err := run(ctx, tx, found)
			for _, a := range c.Park {
				if a.Parked.Class != provider.ClassHeld {
					seen = append(seen, fmt.Sprint(a.Parked.Attempts, " ", a.After))
				}
			}
			return c, err
		})
	}
	return store, func() []string { return seen }
}

// A message is retried after 100 ms, doubling to 30 s. It is stuck after 5 attempts, including the
// first failure.
// Promise: G6.2
func TestFailedMessageIsRetriedWithBackoffUntilStuck(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		retry claim.Backoff
		want  []string
	}{
		"by default": {claim.Backoff{}, []string{"1 100ms", "2 200ms", "3 400ms", "4 800ms", "5 -1ns"}},
		"as configured": {claim.Backoff{Base: time.Minute, Max: 3 * time.Minute, Attempts: 4},
			[]string{"1 1m0s", "2 2m0s", "3 3m0s", "4 -1ns"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				store, list := parks(db)
				bad := newFaults(map[string]error{"k-1": errNo})
				stop := run(t, store, f, projector.RunnerConfig{Retry: c.retry}, define(marked, bad.run))
				f.deliver(t, keyed("k", 1))
				time.Sleep(10 * time.Minute)
				require.NoError(t, stop())
				require.Equal(t, c.want, list())
				require.Equal(t, len(c.want), bad.tried("k-1"))
				require.Equal(t, fmt.Sprintf("k-1 stuck unknown %d", len(c.want)), rows(parked(t, db))[0])
				for n, at := range bad.at["k-1"][1:] {
					delay, err := cfgDelay(c.retry, n+1)
					require.NoError(t, err)
					took := at - bad.at["k-1"][n]
					require.GreaterOrEqual(t, took, delay)
					require.LessOrEqual(t, took, delay+10*time.Millisecond)
				}
			})
		})
	}
}

func cfgDelay(b claim.Backoff, n int) (time.Duration, error) {
	if b.Base == 0 {
		b.Base = 100 * time.Millisecond
	}
	return b.Delay(n)
}

// Messages that fail together are tried again at different times with a jitter, and at the same time
// without.
// Promise: G3.6
func TestRunnerAppliesItsJitter(t *testing.T) {
	t.Parallel()
	for _, jitter := range []float64{0, 0.5} {
		t.Run(fmt.Sprint(jitter), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				cfg := projector.RunnerConfig{Retry: claim.Backoff{Base: time.Hour, Jitter: jitter}}
				stop := run(t, db, f, cfg, define(marked, func(context.Context, txn, eventstore.Event[posted]) error { return errNo }))
				for n := range 10 {
					f.deliver(t, keyed(fmt.Sprint("k", n), 1))
				}
				require.NoError(t, stop())
				delays := map[time.Duration]bool{}
				for _, row := range parked(t, db) {
					delay := row.DueAt.Sub(row.At)
					require.LessOrEqual(t, delay, time.Hour, row.MessageID)
					require.GreaterOrEqual(t, delay, time.Hour-time.Duration(jitter*float64(time.Hour)), row.MessageID)
					delays[delay] = true
				}
				if jitter == 0 {
					require.Equal(t, map[time.Duration]bool{time.Hour: true}, delays)
				} else {
					require.Len(t, delays, 10)
				}
			})
		})
	}
}

func TestBackoffHasAnUpperLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		store, list := parks(db)
		bad := newFaults(map[string]error{"k-1": errNo})
		stop := run(t, store, f, projector.RunnerConfig{Retry: claim.Backoff{Attempts: -1}}, define(marked, bad.run))
		f.deliver(t, keyed("k", 1))
		time.Sleep(5 * time.Minute)
		require.NoError(t, stop())
		require.Contains(t, list(), "9 25.6s")
		require.Contains(t, list(), "10 30s")
		require.Contains(t, list(), "11 30s")
	})
}

// The attempt count is committed before the handler runs, so an attempt that ends its process is
// counted. No other runner tries the message for longer than the handler may take.
// Promise: G6.10
func TestAttemptIsCountedBeforeItRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var seen []string
		p := define(marked, func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			list, err := db.Parked(ctx, all)
			require.NoError(t, err)
			for _, row := range list {
				seen = append(seen, fmt.Sprint(row.Attempts, " for ", time.Until(row.DueAt)))
			}
			time.Sleep(500 * time.Millisecond) // meanwhile the other runner lists due messages
			return errNo
		})
		stopOther := run(t, db, make(subscription), projector.RunnerConfig{}, p)
		time.Sleep(300 * time.Millisecond)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, keyed("k", 1))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.NoError(t, stopOther())
		require.Equal(t, []string{"2 for 45s", "3 for 45s", "4 for 45s", "5 for 45s"}, seen)
	})
}

// If the store cannot count an attempt, the handler does not run.
func TestAttemptThatIsNotCountedDoesNotRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var away atomic.Bool
		store := &faulty{unit: db}
		store.try = func(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
			if away.Load() {
				return false, errBusy
			}
			return db.Try(ctx, p, limit, again)
		}
		bad := newFaults(map[string]error{"k-1": errNo})
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, bad.run))
		away.Store(true)
		f.deliver(t, keyed("k", 1))
		time.Sleep(time.Minute)
		require.Equal(t, 1, bad.tried("k-1"))
		away.Store(false)
		bad.fix()
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}

// Even if the store fails after an attempt, the message is tried only as often as its limit allows.
// A person's replay allows as many attempts again.
func TestMessageIsNeverTriedBeyondItsLimit(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]int{"the store fails sometimes": 3, "the store fails always": 1_000_000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
						c, err := run(ctx, tx, found)
						if len(c.Park) > 0 && u.Messages[0].Parked != nil {
							if fails--; fails >= 0 { // it cannot record why the attempt failed
								return c, errBusy
							}
						}
						return c, err
					})
				}
				bad := newFaults(map[string]error{"k-1": errNo})
				retry := claim.Backoff{Attempts: 3}
				p := define(marked, bad.run)
				stop := run(t, store, f, projector.RunnerConfig{Retry: retry}, p)
				f.deliver(t, keyed("k", 1))
				time.Sleep(time.Minute)
				require.NoError(t, stop()) // a cancelled attempt keeps its count
				stop = run(t, db, make(subscription), projector.RunnerConfig{Retry: retry}, p)
				time.Sleep(5 * time.Minute)
				require.NoError(t, stop())
				require.Equal(t, 3, bad.tried("k-1"))
				require.Equal(t, []string{"k-1 stuck unknown 3"}, rows(parked(t, db)))
				bad.fix()
				replayAll(t, db, all)
				drain(t, db, projector.RunnerConfig{Retry: retry}, p)
				require.Equal(t, upTo(1), noted(db, "a", "k"))
			})
		})
	}
}

// A lane whose message gets a transient error delays no other lane, and no attempt counts.
func TestTransientErrorOfARetryIsNotCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"x-1": errNo, "y-1": errNo})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, keyed("x", 1), keyed("x", 2), keyed("y", 1), keyed("y", 2))
		bad.fix()
		bad.set("x-1", errBusy)
		time.Sleep(5 * time.Minute)
		require.Equal(t, upTo(2), noted(db, "a", "y"))
		require.Equal(t, []string{"x-1 waiting transient 57P01 1", "x-2 waiting held 0"}, rows(parked(t, db)))
		require.Greater(t, bad.tried("x-1"), 10)
		require.Less(t, bad.tried("x-1"), 25, "at growing intervals")
		bad.fix()
		time.Sleep(35 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "x"))
	})
}

// A message that a person skips or replays after a worker has listed it does not run again.
func TestMessageDecidedMeanwhileDoesNotRun(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]error{"a message that failed": errNo, "the messages behind it": errNever} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, skipped := newDB(t), make(subscription), false
				store := &faulty{unit: db}
				bad := newFaults(map[string]error{"k-1": kind})
				store.due = func(ctx context.Context, d provider.DueFilter) ([]provider.Parked, error) {
					list, err := db.Due(ctx, d)
					if len(list) > 0 && !skipped {
						skipped = true
						skip(t, db, projector.ParkedFilter{Seqs: []int64{list[0].Seq}})
					}
					return list, err
				}
				stop := run(t, store, f, projector.RunnerConfig{}, define(marked, bad.run))
				f.deliver(t, series("k", 1, 3)...)
				want := []int{2, 3}
				if errors.Is(kind, errNever) {
					skip(t, db, projector.ParkedFilter{Seqs: []int64{1}})
					want = []int{3}
				}
				bad.fix()
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, want, noted(db, "a", "k"))
			})
		})
	}
}

// The output of a retried message is in the outbox once.
func TestOutputOfARetryIsSentOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(subscription), 0
		p := projector.Define("p", types, projector.Options{}, projector.OnEmit("a",
			func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) {
				if tries++; tries < 3 {
					return []outbox.Message{{Topic: "flags"}}, errNo
				}
				return []outbox.Message{{Topic: "flags"}}, nil
			}))
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, keyed("k", 1))
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		list, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Len(t, list, 1)
	})
}
