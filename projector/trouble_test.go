package projector_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// If the database is busy or away, no message is at fault: the unit is halved and retried, with
// pauses.
// Promise: G6.1
func TestTransientErrorHalvesTheUnitAndIsNeverCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tries := newDB(t), 0
		var delays []time.Duration
		inner := func(ctx context.Context, u provider.Unit, run handle) error {
			if tries++; tries > 1 && tries < 20 {
				return errBusy
			}
			return db.Do(ctx, u, run)
		}
		cfg := projector.RunnerConfig{Observer: projector.RunnerObserver{Retried: func(name string, class projector.Class, after time.Duration) {
			require.Equal(t, []any{"p", projector.ClassTransient}, []any{name, class})
			delays = append(delays, after)
		}}}
		began := time.Now()
		ran := together(t, record(db, inner), cfg, marked, note("a"), series("k", 1, 8)...)
		require.Equal(t, []string{"k-1 k-2 k-3 k-4 k-5 k-6 k-7 k-8 !", "k-1 k-2 k-3 k-4 !", "k-1 k-2 !", "k-1 !"}, ran[:4])
		require.Equal(t, []string{"k-1", "k-2 k-3", "k-4 k-5 k-6 k-7", "k-8"}, ran[18:])
		ms := time.Millisecond
		require.Equal(t, []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms}, delays[:4])
		require.Equal(t, 30*time.Second, delays[17], "the pauses have an upper limit")
		var sum time.Duration
		for _, d := range delays {
			sum += d
		}
		require.Equal(t, sum, time.Since(began))
		require.Empty(t, parked(t, db))
		require.Equal(t, upTo(8), noted(db, "a", "k"))
	})
}

// A handler may also return a transient error.
// Promise: G6.1
func TestTransientErrorOfAHandlerIsNeverCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errBusy})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		m := f.send(keyed("k", 1))[0]
		time.Sleep(20 * time.Minute)
		require.False(t, isAcked(m))
		require.Empty(t, parked(t, db))
		bad.fix()
		<-m.Acked()
		require.NoError(t, stop())
		require.Greater(t, bad.tried("k-1"), 40)
		require.Equal(t, []int{1}, noted(db, "a", "k"))
	})
}

// If workers of several processes write the same rows, each deadlock costs a second. So units of
// several messages run one at a time for a minute.
// Promise: G6.1
func TestDeadlockMakesUnitsSerialForAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, deadlocks := newDB(t), make(subscription), 1
		var mu sync.Mutex
		pause := make(chan struct{}, 100)
		store := record(db, func(ctx context.Context, u provider.Unit, run handle) error {
			<-pause // so that messages sent meanwhile share the next unit
			mu.Lock()
			defer mu.Unlock()
			if deadlocks--; deadlocks >= 0 {
				return &projector.Error{Class: projector.ClassTransient, Code: provider.CodeDeadlock, Err: errors.New("deadlock detected")}
			}
			return db.Do(ctx, u, run)
		})
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, note("a")))
		several := func(from int) []string { // a unit of one message and a unit of three
			sent := f.send(series("k", from, from)...)
			synctest.Wait()
			sent = append(sent, f.send(series("k", from+1, from+3)...)...)
			synctest.Wait()
			for range 4 {
				pause <- struct{}{}
			}
			acked(t, sent...)
			for len(pause) > 0 {
				<-pause
			}
			return store.list()
		}
		require.Equal(t, []string{"k-1 !", "k-1", "k-2 k-3 *", "k-4"}, several(1))
		time.Sleep(30 * time.Second)
		require.Equal(t, []string{"k-5", "k-6 k-7 k-8 *"}, several(5))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"k-9", "k-10 k-11 k-12"}, several(9))
		require.NoError(t, stop())
		require.Empty(t, parked(t, db))
	})
}

func TestSlowUnitsShrinkAndQuickOnesGrow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		handler := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Stream == "k" && e.Data.Stars <= 16 {
				time.Sleep(300 * time.Millisecond)
			}
			return note("a")(ctx, tx, e)
		}
		store, f, g := record(db, nil), make(subscription), newGate(handler)
		stop := run(t, store, f, projector.RunnerConfig{Batch: 8}, define(marked, g.run))
		f.send(keyed("gate", 1))
		synctest.Wait()
		go func() {
			for _, m := range series("k", 1, 32) {
				f <- m
			}
		}()
		synctest.Wait()
		close(g.open)
		require.Eventually(t, func() bool { return len(noted(db, "a", "k")) == 32 }, time.Minute, time.Second)
		require.NoError(t, stop())
		var sizes []int
		for _, ids := range store.list()[1:] {
			sizes = append(sizes, len(strings.Fields(ids)))
		}
		// 8 take 2.4 s, 4 take 1.2 s, and 2 take 0.6 s, which is between the bounds.
		require.Equal(t, []int{8, 4, 2, 2, 2, 4, 2}, sizes[:7])
		require.Equal(t, upTo(32), noted(db, "a", "k"))
	})
}
