package projector_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Promise: G4.1
func TestRedeliveryTakesEffectOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		opts projector.Options
		want int
	}{
		"with markers":            {marked, 5 + 3},
		"control without markers": {projector.Options{}, 3*5 + 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, f := newDB(t), make(subscription)
			stop := run(t, db, f, projector.RunnerConfig{}, define(c.opts, add))
			for range 3 {
				f.deliver(t, msg("1", "posted", `{"Stars":5}`))
			}
			f.deliver(t, msg("2", "posted", `{"Stars":3}`))
			require.NoError(t, stop())
			require.Equal(t, c.want, total(db, "totals"))
		})
	}
}

// Many runners get the same message at the same time, as the processes of one consumer group may.
// Promise: G4.1
func TestConcurrentDuplicatesTakeEffectOnce(t *testing.T) {
	t.Parallel()
	const runners, messages = 16, 50
	for name, stamp := range map[string]func(*message.Message) *message.Message{
		"recorded just now": func(m *message.Message) *message.Message { return recorded(m, time.Now()) },
		// A crashed process may have had such a message in flight. So it is recorded before it
		// runs, and a runner that finds another runner's record parks it.
		"recorded before the runners began": func(m *message.Message) *message.Message { return recorded(m, time.Now().Add(-time.Minute)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				var log bytes.Buffer
				cfg := projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}
				subscriptions := make([]subscription, runners)
				for i := range subscriptions {
					subscriptions[i] = make(subscription)
					stop := run(t, db, subscriptions[i], cfg, define(marked, add))
					defer func() { require.NoError(t, stop()) }()
				}
				for i := range messages {
					time.Sleep(time.Millisecond)
					m := stamp(msg(fmt.Sprint("m", i), "posted", `{"Stars":1}`))
					var all sync.WaitGroup
					for _, f := range subscriptions {
						all.Go(func() { f.deliver(t, m) })
					}
					all.Wait()
				}
				time.Sleep(5 * time.Second) // for those that were parked
				require.Equal(t, messages, total(db, "totals"))
				require.Empty(t, parked(t, db))
				require.Empty(t, log.String(), "the loser of a race logs nothing")
			})
		})
	}
}

// The handlers of a projector share a transaction: if one fails, none has an effect.
// Promise: G4.8
func TestMessageIsAppliedByAllItsHandlersOrNone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		flaky := newFaults(map[string]error{"k-1": errNo})
		flaky.handle = note("b")
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a"), flaky.run))
		f.deliver(t, keyed("k", 1))
		require.Empty(t, noted(db, "a", "k"), "the other handler failed")
		require.Equal(t, []string{"k-1 waiting unknown 1"}, rows(parked(t, db)))
		require.Equal(t, "p/b", parked(t, db)[0].Handler)
		flaky.fix()
		time.Sleep(5 * time.Second)
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		require.Equal(t, []int{1}, noted(db, "a", "k"))
		require.Equal(t, []int{1}, noted(db, "b", "k"))
		require.Empty(t, parked(t, db))
	})
}

// A handler that is added later has no markers, so a redelivery runs only that handler.
// Promise: G4.9
func TestRedeliveryRunsOnlyNewHandlers(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
	f.deliver(t, series("k", 1, 2)...)
	require.NoError(t, stop())
	stop = run(t, db, f, projector.RunnerConfig{}, define(marked, note("a"), note("b")))
	f.deliver(t, series("k", 1, 3)...)
	require.NoError(t, stop())
	require.Equal(t, upTo(3), noted(db, "a", "k"))
	require.Equal(t, upTo(3), noted(db, "b", "k"))
}

// A parked message keeps the handlers that had not run when it was parked. It runs only these, even
// in a program with another new handler.
// Promise: G4.9
func TestParkedMessageRunsHandlersThatHadNotRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		bad.handle = note("b")
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		stop = run(t, db, f, projector.RunnerConfig{}, define(marked, note("a"), bad.run))
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		require.Equal(t, []string{"p/b"}, parked(t, db)[0].Handlers, "p/a has applied it")
		bad.fix()
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, define(marked, note("a"), bad.run, note("c")))
		require.Equal(t, []int{1}, noted(db, "a", "k"))
		require.Equal(t, []int{1}, noted(db, "b", "k"))
		require.Empty(t, noted(db, "c", "k"), "p/c did not exist when the message was parked")
	})
}

// The reply to COMMIT may be lost before or after the commit. The unit runs again, and its markers
// decide.
// Promise: G4.3
func TestMarkersDecideAfterALostReply(t *testing.T) {
	t.Parallel()
	for name, committed := range map[string]bool{"after the commit": true, "before it": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				lost := 0
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					if lost++; lost > 3 {
						return db.Do(ctx, u, run)
					}
					if committed {
						require.NoError(t, db.Do(ctx, u, run))
					}
					return &projector.Error{Class: provider.ClassAmbiguous, Err: errors.New("reply lost")}
				}
				stop := run(t, store, f, projector.RunnerConfig{}, define(marked, add))
				f.deliver(t, msg("1", "posted", `{"Stars":5}`))
				require.NoError(t, stop())
				require.Equal(t, 4, lost)
				require.Equal(t, 5, total(db, "totals"))
				require.Empty(t, parked(t, db), "a lost reply is never counted")
			})
		})
	}
}

// The same for the unit of a parked message: if it was committed, the row no longer exists.
// Promise: G4.3
func TestParkedRowDecidesAfterALostReply(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{marked, {}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNo})
				lost := map[string]bool{}
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					err := db.Do(ctx, u, run)
					if id := u.Messages[0].ID; err == nil && u.Messages[0].Parked != nil && !lost[id] {
						lost[id] = true
						return &projector.Error{Class: provider.ClassAmbiguous, Err: errors.New("reply lost")}
					}
					return err
				}
				stop := run(t, store, f, projector.RunnerConfig{}, define(opts, bad.run))
				f.deliver(t, series("k", 1, 3)...)
				bad.fix()
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, upTo(3), noted(db, "a", "k"))
				require.Equal(t, map[string]bool{"k-1": true, "k-2": true}, lost)
				require.Empty(t, parked(t, db))
			})
		})
	}
}
