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

// asides records how often a message had failed each time that it was set aside, and for how long.
func asides(db unit) (store *faulty, list func() []string) {
	var seen []string
	store = &faulty{unit: db}
	store.do = func(ctx context.Context, u provider.Unit, run handle) error {
		return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
			c, err := run(ctx, tx, found)
			for _, a := range c.Park {
				if a.Parked.Class != projector.ClassHeld {
					seen = append(seen, fmt.Sprint(a.Parked.Attempts, " ", a.After))
				}
			}
			return c, err
		})
	}
	return store, func() []string { return seen }
}

// A message is tried again after 100 ms, doubling to 30 s, and is stuck after 5 attempts, the first failure included.
func TestAFailedMessageIsTriedAgainWithBackoffUntilItIsStuck(t *testing.T) {
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
				db, f := newDB(t), make(feed)
				store, list := asides(db)
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

func TestBackoffOfAFailedMessageHasACeiling(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		store, list := asides(db)
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

// The count is committed before the handler runs, so that an attempt that ends its process has been counted. And no
// other runner tries the message meanwhile, for longer than the handler may take.
func TestAnAttemptIsCountedBeforeItRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		var seen []string
		p := define(marked, func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			list, err := db.Parked(ctx, all)
			require.NoError(t, err)
			for _, row := range list {
				seen = append(seen, fmt.Sprint(row.Attempts, " for ", time.Until(row.DueAt)))
			}
			time.Sleep(500 * time.Millisecond) // the other runner lists due messages
			return errNo
		})
		stopOther := run(t, db, make(feed), projector.RunnerConfig{}, p)
		time.Sleep(300 * time.Millisecond)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, keyed("k", 1))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.NoError(t, stopOther())
		require.Equal(t, []string{"2 for 45s", "3 for 45s", "4 for 45s", "5 for 45s"}, seen)
	})
}

// A store that cannot count cannot try.
func TestAnAttemptThatIsNotCountedDoesNotRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
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
		bad.mend()
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}

// Whatever becomes of what follows an attempt, the message is tried as often as it may be, and a person's replay tries
// it as often again.
func TestAMessageIsNeverTriedMoreOftenThanItMayBe(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]int{"the store fails sometimes": 3, "the store fails always": 1_000_000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(feed)
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
						c, err := run(ctx, tx, found)
						if len(c.Park) > 0 && u.Messages[0].Parked != nil {
							if fails--; fails >= 0 { // it cannot say why the attempt failed
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
				require.NoError(t, stop()) // a stopped attempt keeps its count
				stop = run(t, db, make(feed), projector.RunnerConfig{Retry: retry}, p)
				time.Sleep(5 * time.Minute)
				require.NoError(t, stop())
				require.Equal(t, 3, bad.tried("k-1"))
				require.Equal(t, []string{"k-1 stuck unknown 3"}, rows(parked(t, db)))
				bad.mend()
				replayAll(t, db, all)
				drain(t, db, projector.RunnerConfig{Retry: retry}, p)
				require.Equal(t, upTo(1), noted(db, "a", "k"))
			})
		})
	}
}

// A lane whose message cannot be applied just now holds up no other, and no attempt counts.
func TestATransientErrorOfARetryIsNotCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		bad := newFaults(map[string]error{"x-1": errNo, "y-1": errNo})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, keyed("x", 1), keyed("x", 2), keyed("y", 1), keyed("y", 2))
		bad.mend()
		bad.set("x-1", errBusy)
		time.Sleep(5 * time.Minute)
		require.Equal(t, upTo(2), noted(db, "a", "y"))
		require.Equal(t, []string{"x-1 waiting transient 57P01 1", "x-2 waiting held 0"}, rows(parked(t, db)))
		require.Greater(t, bad.tried("x-1"), 10)
		require.Less(t, bad.tried("x-1"), 25, "less and less often")
		bad.mend()
		time.Sleep(35 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "x"))
	})
}

// A message that is skipped or replayed while a worker has it in hand as it was listed before is left alone.
func TestWhatAPersonDecidedMeanwhileIsNotRun(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]error{"a message that failed": errNo, "what waits behind it": errNever} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, skipped := newDB(t), make(feed), false
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
				bad.mend()
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, want, noted(db, "a", "k"))
			})
		})
	}
}

// Output of a message that is retried is in the outbox once.
func TestOutputOfARetryIsSentOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(feed), 0
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
