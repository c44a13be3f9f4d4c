package projector_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

func isAcked(m *message.Message) bool {
	select {
	case <-m.Acked():
		return true
	default:
		return false
	}
}

func isNacked(m *message.Message) bool {
	select {
	case <-m.Nacked():
		return true
	default:
		return false
	}
}

func TestStopFinishesAndAcksWhatIsInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		let := make(chan struct{})
		var inHandler error
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			<-let
			inHandler = ctx.Err()
			return add(ctx, tx, e)
		}))
		m := msg("1", "posted", `{"Stars":5}`)
		ctx, cancel := context.WithCancel(t.Context())
		m.SetContext(ctx)
		f <- m
		synctest.Wait()
		cancel() // as Watermill's router does at once when it closes
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		close(let)
		require.NoError(t, <-done)
		require.NoError(t, inHandler, "a handler's context does not end with the subscription's")
		require.True(t, isAcked(m))
		require.Equal(t, 5, total(db, "totals"))
	})
}

func TestStopWhileAFailingMessageWaitsParksNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
			return errors.New("always")
		}))
		m := msg("1", "posted", `{}`)
		f <- m
		time.Sleep(time.Second) // four of five attempts are gone
		require.NoError(t, stop())
		require.False(t, isAcked(m))
		require.False(t, isNacked(m), "a Nack would come back at once on most brokers")
		require.Empty(t, parked(t, db))
	})
}

func TestDrainHasADeadlineAndBreaksOffWithoutCounting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		left := make(chan struct{})
		cfg := projector.RunnerConfig{Drain: time.Second, Retry: claim.Backoff{Attempts: 1}} // one error that counts would park
		stop := run(t, db, f, cfg, define(marked,
			func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				defer close(left)
				_ = add(ctx, tx, e)
				<-ctx.Done()
				return ctx.Err()
			}))
		m := msg("1", "posted", `{"Stars":5}`)
		f <- m
		synctest.Wait()
		begin := time.Now()
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		require.Equal(t, time.Second, time.Since(begin))
		<-left
		require.Equal(t, time.Second, time.Since(begin), "the handler is told at once")
		synctest.Wait()
		require.False(t, isAcked(m))
		require.Empty(t, parked(t, db))
		require.Zero(t, total(db, "totals"))
	})
}

func TestASubscriptionThatEndsIsAnError(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(feed)
	r, err := projector.NewRunner(db, projector.Subscribe(f, "review"), nil, define(marked, add))
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- r.Run(t.Context()) }()
	<-r.Running()
	close(f)
	require.ErrorContains(t, <-done, "subscription to review ended")
	require.Error(t, r.Run(t.Context()), "it runs once")
}

// refuser has one topic and no more.
type refuser struct{ feed }

func (r refuser) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if topic == "review" {
		return r.feed.Subscribe(ctx, topic)
	}
	return nil, errors.New("no such topic")
}

func TestARefusedSubscriptionEndsRun(t *testing.T) {
	t.Parallel()
	r, err := projector.NewRunner(newDB(t), projector.Subscribe(refuser{make(feed)}, "review", "other"), nil, define(marked, add))
	require.NoError(t, err)
	require.ErrorContains(t, r.Run(t.Context()), "subscribe to other: no such topic")
}

// slow is a broker that is away, and heeds the end of its context.
type slow struct{ feed }

func (slow) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestStopEndsASubscriptionThatIsUnderWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, err := projector.NewRunner(newDB(t), projector.Subscribe(slow{}, "review"), nil, define(marked, add))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		require.NoError(t, r.Run(ctx))
		require.Equal(t, time.Second, time.Since(begin))
	})
}

func TestARunnerWithoutASourceDoesNotRun(t *testing.T) {
	t.Parallel()
	r, err := projector.NewRunner(newDB(t), projector.Source{}, nil, define(marked, add))
	require.NoError(t, err)
	require.ErrorContains(t, r.Run(t.Context()), "no source")
}

// watched is a feed that knows its subscription's context.
type watched struct {
	feed
	ctx context.Context
}

func (w *watched) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	w.ctx = ctx
	return w.feed.Subscribe(ctx, topic)
}

func TestStopEndsSubscriptionsAfterWhatIsInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, w, let := newDB(t), &watched{feed: make(feed)}, make(chan struct{})
		r, err := projector.NewRunner(db, projector.Subscribe(w, "review"), nil, define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
			<-let
			return w.ctx.Err()
		}))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		m := msg("1", "posted", `{}`)
		w.feed <- m
		synctest.Wait() // it is in flight
		cancel()
		synctest.Wait()
		require.NoError(t, w.ctx.Err())
		close(let)
		require.NoError(t, <-done)
		require.True(t, isAcked(m))
		require.Error(t, w.ctx.Err())
	})
}

func TestAStoppedRunnerTakesNoMore(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 { // both the end and a message are there to be chosen
		f := make(feed, 1)
		m := msg("1", "posted", `{}`)
		f <- m
		r, err := projector.NewRunner(newDB(t), projector.Subscribe(f, "review"), nil, define(marked, add))
		require.NoError(t, err)
		require.NoError(t, r.Run(ctx))
		require.False(t, isAcked(m))
	}
}

// stuckPark waits for ctx instead of parking.
type stuckPark struct{ unit }

func (s stuckPark) Do(ctx context.Context, w projector.Work, apply func(context.Context, txn, []int) ([]outbox.Message, error)) error {
	if len(w.Park) == 0 {
		return s.unit.Do(ctx, w, apply)
	}
	<-ctx.Done()
	return ctx.Err()
}

func TestDrainBreaksOffParkingToo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := make(feed)
		stop := run(t, stuckPark{newDB(t)}, f, projector.RunnerConfig{Drain: time.Second, Timeout: time.Hour}, define(marked, add))
		m := msg("1", "who knows", `{}`)
		f <- m
		synctest.Wait()
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		synctest.Wait() // a park that goes on would leave its goroutine behind, which synctest reports
		require.False(t, isAcked(m))
	})
}

// unready is a provider whose schema is not there.
type unready struct{ unit }

func (unready) Ready(context.Context) error { return errors.New("not migrated") }

func TestARunnerSaysAtOnceWhatNoRetryCanHelp(t *testing.T) {
	t.Parallel()
	r, err := projector.NewRunner(unready{newDB(t)}, projector.Subscribe(make(feed), "review"), nil, define(marked, add))
	require.NoError(t, err)
	require.ErrorContains(t, r.Run(t.Context()), "not migrated")
}
