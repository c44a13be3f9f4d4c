package projector_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// A handler's timeout begins with the handler: the time that its unit waited for others does not
// count.
// Promise: G6.3
func TestWaitForTransactionDoesNotCountAgainstHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		ctx, cancel := context.WithCancel(t.Context())
		hog := make(chan struct{})
		// Another writer that repeatedly locks the database for almost the handler's timeout.
		go func() {
			defer close(hog)
			for held := 10 * time.Second; ctx.Err() == nil; held = 900 * time.Millisecond {
				_ = db.Transact(ctx, func(_ context.Context, _ txn) error { time.Sleep(held); return nil })
			}
		}()
		synctest.Wait()
		stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(200 * time.Millisecond)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return add(ctx, tx, e)
		}))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		cancel()
		<-hog
		require.Equal(t, 5, total(db, "totals"))
		require.Empty(t, parked(t, db))
	})
}

// The same for a store that opens the transaction late and then runs the handlers.
func TestLateTransactionDoesNotCountAgainstHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, late := newDB(t), make(subscription), 0
		store := &faulty{unit: db}
		store.do = func(ctx context.Context, u provider.Unit, run handle) error {
			if late++; late > 3 {
				return db.Do(ctx, u, run)
			}
			time.Sleep(1100 * time.Millisecond)
			return db.Do(context.WithoutCancel(ctx), u, func(_ context.Context, tx txn, found provider.Found) (provider.Closing, error) {
				return run(ctx, tx, found)
			})
		}
		stop := run(t, store, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, add))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"))
		require.Empty(t, parked(t, db))
	})
}

// The handlers of a unit do not share a timeout.
func TestEachHandlerOfAUnitHasItsOwnTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		ran := together(t, record(db, nil), projector.RunnerConfig{Timeout: time.Second}, marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(900 * time.Millisecond)
			return errors.Join(ctx.Err(), note("a")(ctx, tx, e))
		}, series("k", 1, 4)...)
		require.Equal(t, []string{"k-1 k-2 k-3 k-4"}, ran)
		require.Equal(t, upTo(4), noted(db, "a", "k"))
	})
}

func TestTimeoutMayBeTheLongestDuration(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(subscription), 0
		var again []time.Duration
		store := &faulty{unit: db}
		store.try = func(ctx context.Context, p provider.Parked, limit int, d time.Duration) (bool, error) {
			again = append(again, d)
			return db.Try(ctx, p, limit, d)
		}
		stop := run(t, store, f, projector.RunnerConfig{Timeout: math.MaxInt64, Lease: math.MaxInt64}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(time.Hour)
			if tries++; tries == 1 {
				return errNo
			}
			return errors.Join(ctx.Err(), add(ctx, tx, e))
		}))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		time.Sleep(2 * time.Hour)
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"))
		require.Len(t, again, 1)
		require.Greater(t, again[0], 100*365*24*time.Hour, "no other runner tries the message meanwhile")
	})
}

// A handler's context ends with its timeout, and when the handler returns, whether or not somebody waits for
// that, and so do contexts that are derived from it.
func TestAHandlersContextEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		waits, late bool
		want        error
	}{
		"when it returns":               {want: context.Canceled},
		"when it returns, waited for":   {waits: true, want: context.Canceled},
		"after the timeout":             {late: true, want: context.DeadlineExceeded},
		"after the timeout, waited for": {waits: true, late: true, want: context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				var ctxs []context.Context
				stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					if len(ctxs) > 0 {
						return add(ctx, tx, e)
					}
					at, has := ctx.Deadline()
					require.True(t, has)
					require.Equal(t, time.Second, time.Until(at))
					require.NoError(t, ctx.Err())
					ctxs = append(ctxs, ctx)
					if c.waits {
						derived, cancel := context.WithCancel(ctx)
						t.Cleanup(cancel)
						ctxs = append(ctxs, derived)
						require.NoError(t, derived.Err())
					}
					if c.late {
						time.Sleep(1500 * time.Millisecond)
						for _, one := range ctxs {
							require.ErrorIs(t, one.Err(), c.want)
						}
						return ctx.Err()
					}
					return add(ctx, tx, e)
				}))
				f.deliver(t, msg("1", "posted", `{"Stars":5}`))
				time.Sleep(time.Hour)
				for _, one := range ctxs {
					<-one.Done()
					require.ErrorIs(t, one.Err(), c.want)
				}
				require.NoError(t, stop())
				require.Equal(t, 5, total(db, "totals"))
			})
		})
	}
}
