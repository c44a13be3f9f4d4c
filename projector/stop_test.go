package projector_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Promise: G9.2
func TestStopFinishesAndAcksTheUnitInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		open := make(chan struct{})
		var inHandler error
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			<-open
			inHandler = ctx.Err()
			return add(ctx, tx, e)
		}))
		m := msg("1", "posted", `{"Stars":5}`)
		ctx, cancel := context.WithCancel(t.Context())
		m.SetContext(ctx)
		f <- m
		synctest.Wait()
		cancel() // Watermill's router does this as soon as it closes
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		close(open)
		require.NoError(t, <-done)
		require.NoError(t, inHandler, "a handler's context does not end with the subscription's")
		require.True(t, isAcked(m))
		require.Equal(t, 5, total(db, "totals"))
	})
}

// Messages that wait for the next unit when the runner stops do not run, and are neither acked nor
// nacked.
func TestStopLeavesMessagesOfTheNextUnit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, g := newDB(t), make(subscription), newGate(note("a"))
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, g.run))
		sent := f.send(series("k", 1, 1)...)
		synctest.Wait()
		sent = append(sent, f.send(series("k", 2, 5)...)...)
		synctest.Wait()
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		close(g.open)
		require.NoError(t, <-done)
		require.True(t, isAcked(sent[0]))
		for _, m := range sent[1:] {
			require.False(t, isAcked(m) || isNacked(m), "most brokers redeliver a nacked message at once")
		}
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}

// The same for a unit that has failed: its parts are not retried.
// Promise: G6.3
func TestStopDuringARetryParksNothing(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{"a transient error": errBusy, "another error": errNo} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, g := newDB(t), make(subscription), newGate(func(context.Context, txn, eventstore.Event[posted]) error { return fault })
				stop := run(t, db, f, projector.RunnerConfig{}, define(marked, g.run))
				sent := f.send(keyed("k", 1))
				synctest.Wait()
				if errors.Is(fault, errBusy) {
					close(g.open)
					time.Sleep(5 * time.Second)
					require.NoError(t, stop())
				} else {
					done := make(chan error)
					go func() { done <- stop() }()
					synctest.Wait()
					close(g.open) // it fails after the runner was stopped
					require.NoError(t, <-done)
				}
				require.False(t, isAcked(sent[0]) || isNacked(sent[0]))
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// Promise: G9.2
func TestDrainDeadlineCancelsAUnitWithoutCounting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		left := make(chan struct{})
		// One counted failure would be the last.
		cfg := projector.RunnerConfig{Drain: time.Second, Retry: claim.Backoff{Attempts: 1}}
		stop := run(t, db, f, cfg, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			defer close(left)
			_ = add(ctx, tx, e)
			<-ctx.Done()
			return ctx.Err()
		}))
		m := f.send(msg("1", "posted", `{"Stars":5}`))[0]
		synctest.Wait()
		began := time.Now()
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		require.Equal(t, time.Second, time.Since(began))
		<-left
		require.Equal(t, time.Second, time.Since(began), "the handler's context ends at once")
		synctest.Wait()
		require.False(t, isAcked(m))
		require.Empty(t, parked(t, db))
		require.Zero(t, total(db, "totals"))
	})
}

// A cancelled attempt at a parked message keeps its count, and the message does not change.
func TestDrainDeadlineCancelsAnAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, slow := newDB(t), make(subscription), &atomic.Bool{}
		stop := run(t, db, f, projector.RunnerConfig{Drain: time.Second}, define(marked, func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			if slow.Load() {
				<-ctx.Done()
			}
			return errNo
		}))
		f.deliver(t, keyed("k", 1))
		slow.Store(true)
		time.Sleep(2 * time.Second)
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		synctest.Wait()
		require.Equal(t, []string{"k-1 waiting unknown 2"}, rows(parked(t, db)))
	})
}

func TestDrainDeadlineCancelsParking(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, store := make(subscription), &faulty{unit: newDB(t)}
		store.do = func(ctx context.Context, _ provider.Unit, _ handle) error {
			<-ctx.Done() // the database does not answer
			return ctx.Err()
		}
		stop := run(t, store, f, projector.RunnerConfig{Drain: time.Second, Timeout: time.Hour}, define(marked, add))
		m := f.send(msg("1", "who knows", `{}`))[0]
		synctest.Wait()
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		synctest.Wait() // synctest reports a goroutine that continues
		require.False(t, isAcked(m))
	})
}

// A worker that backs off, or waits before a retry, stops at once.
func TestStopDoesNotWaitForPauses(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{"every message fails": errNever, "the database is busy": errBusy} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := make(subscription, 100)
				bad := newFaults(nil)
				bad.errs = map[string]error{}
				for n := range 30 {
					bad.set(keyed("k", n).UUID, fault)
					m := keyed("k", n)
					m.Metadata[outbox.HeaderKey] = m.UUID
					f <- m
				}
				stop := run(t, newDB(t), f, projector.RunnerConfig{}, define(marked, bad.run))
				time.Sleep(10*time.Minute + time.Second)
				began := time.Now()
				require.NoError(t, stop())
				require.Zero(t, time.Since(began))
			})
		})
	}
}

func TestEndedSubscriptionIsAnError(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{"without messages": nil, "while a message is retried": errBusy} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := make(subscription)
				bad := newFaults(map[string]error{"k-1": fault})
				r := newRunner(t, newDB(t), projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(marked, bad.run))
				done := make(chan error, 1)
				go func() { done <- r.Run(t.Context()) }()
				f.send(keyed("k", 1))
				time.Sleep(time.Minute)
				close(f)
				err := <-done
				require.ErrorContains(t, err, "subscription to review ended")
				require.NotErrorIs(t, err, outbox.ErrDrain)
				require.ErrorContains(t, r.Run(t.Context()), "called twice")
			})
		})
	}
}

// refuser is a broker with one topic.
type refuser struct{ subscription }

func (r refuser) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if topic == "review" {
		return r.subscription.Subscribe(ctx, topic)
	}
	return nil, errors.New("no such topic")
}

func TestRefusedSubscriptionEndsRun(t *testing.T) {
	t.Parallel()
	r := newRunner(t, newDB(t), projector.Subscribe(refuser{make(subscription)}, "review", "other"), projector.RunnerConfig{}, define(marked, add))
	require.ErrorContains(t, r.Run(t.Context()), "subscribe to other: no such topic")
}

// away is a broker whose Subscribe does not return.
type away struct{ subscription }

func (away) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Promise: G9.2
func TestStopCancelsSubscribe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRunner(t, newDB(t), projector.Subscribe(away{}, "review"), projector.RunnerConfig{}, define(marked, add))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		require.NoError(t, r.Run(ctx))
		require.Equal(t, time.Second, time.Since(began))
	})
}

// The same for a store whose first Beat does not return.
func TestStopCancelsTheFirstBeat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &faulty{unit: newDB(t), beat: func(ctx context.Context, _ string, lease, _ time.Duration) (provider.Health, error) {
			if lease > 0 {
				<-ctx.Done()
			}
			return provider.Health{}, ctx.Err()
		}}
		r := newRunner(t, store, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, add))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		require.NoError(t, r.Run(ctx))
		require.Equal(t, time.Second, time.Since(began))
	})
}

// watched is a subscription that keeps the context of Subscribe.
type watched struct {
	subscription
	ctx context.Context
}

func (w *watched) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	w.ctx = ctx
	return w.subscription.Subscribe(ctx, topic)
}

func TestStopEndsSubscriptionsAfterTheUnitInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, w, open := newDB(t), &watched{subscription: make(subscription)}, make(chan struct{})
		r := newRunner(t, db, projector.Subscribe(w, "review"), projector.RunnerConfig{}, define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
			<-open
			return w.ctx.Err()
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		m := w.send(keyed("k", 1))[0]
		synctest.Wait()
		cancel()
		synctest.Wait()
		require.NoError(t, w.ctx.Err())
		close(open)
		require.NoError(t, <-done)
		require.True(t, isAcked(m))
		require.Error(t, w.ctx.Err())
	})
}

func TestStoppedRunnerTakesNoMessages(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 { // both the stop and a message are ready
		for _, opts := range []projector.Options{marked, {Parking: projector.Halt}} {
			f := make(subscription, 1)
			m := f.send(keyed("k", 1))[0]
			r := newRunner(t, newDB(t), projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(opts, add))
			require.NoError(t, r.Run(ctx))
			require.False(t, isAcked(m))
		}
	}
}

// unready is a provider whose schema does not exist.
type unready struct{ unit }

func (unready) ReadyFor(context.Context, provider.Service) error { return errors.New("not migrated") }

func TestRunReturnsTheErrorOfReadyAtOnce(t *testing.T) {
	t.Parallel()
	r := newRunner(t, unready{newDB(t)}, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, add))
	require.ErrorContains(t, r.Run(t.Context()), "not migrated")
}
