package projector_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// free is a unit of work that only runs apply, any number at once.
type free struct{}

func (free) Do(ctx context.Context, _ projector.Work, apply func(context.Context, struct{}, []int) ([]outbox.Message, error)) error {
	if apply == nil {
		return nil
	}
	_, err := apply(ctx, struct{}{}, nil)
	return err
}

func (free) Records() projector.Records { return projector.Records{Park: true} }

func (free) Apart() *sync.RWMutex { return &sync.RWMutex{} }

func (free) Begin(_ context.Context, _ string, attempts, _ []projector.Attempt) ([]projector.Verdict, error) {
	return make([]projector.Verdict, len(attempts)), nil
}

func (free) BeginAlone(context.Context, string, projector.Attempt, int) (int, int, error) {
	return 0, 0, nil
}
func (free) CountAttempt(context.Context, string, projector.Attempt, int) (int, error) { return 1, nil }
func (free) Alive(context.Context, string, time.Duration) error                        { return nil }
func (free) FailParked(context.Context, string, projector.Parked, projector.Attempt) error {
	return nil
}
func (free) PruneJournal(context.Context, string, time.Duration, int) (int, error) { return 0, nil }
func (free) DueParked(context.Context, string, []string, int64, int) ([]projector.Parked, error) {
	return nil, nil
}

// running is what a runner under test has been doing.
type running struct {
	mu    sync.Mutex
	now   int // handlers
	most  int
	order map[string][]int // by key
}

func (r *running) enter() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now++
	r.most = max(r.most, r.now)
}

func (r *running) leave(e eventstore.Event[posted]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now--
	r.order[e.Stream] = append(r.order[e.Stream], e.Data.Stars)
}

func keyed(key string, n int) *message.Message {
	m := msg(fmt.Sprint(key, "-", n), "posted", fmt.Sprintf(`{"Stars":%d}`, n))
	m.Metadata[outbox.HeaderKey], m.Metadata[outbox.HeaderStream] = key, key
	return m
}

func runFree(t *testing.T, src projector.Source, cfg projector.RunnerConfig, ps ...*projector.Projector[struct{}]) (stop func() error) {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := projector.NewRunner(free{}, src, &cfg, ps...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	return func() error {
		cancel()
		return <-done
	}
}

// Messages of one key run in order, also where one is retried; those of different keys at once, as many as the
// bound says; and no more are read than that.
func TestLanes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		seen := &running{order: map[string][]int{}}
		failed := map[string]bool{}
		p := projector.Define("p", types, projector.Options{}, projector.On("a", func(_ context.Context, _ struct{}, e eventstore.Event[posted]) error {
			seen.enter()
			time.Sleep(10 * time.Millisecond)
			seen.leave(e)
			seen.mu.Lock()
			defer seen.mu.Unlock()
			if id := fmt.Sprint(e.Stream, e.Data.Stars); e.Data.Stars%5 == 0 && !failed[id] {
				failed[id] = true
				seen.order[e.Stream] = seen.order[e.Stream][:len(seen.order[e.Stream])-1]
				return errors.New("once")
			}
			return nil
		}))
		f := make(feed)
		stop := runFree(t, projector.Subscribe(f, "review"), projector.RunnerConfig{Concurrency: 8}, p)
		var read atomic.Int64
		acks := make(chan (<-chan struct{}), 320)
		go func() {
			for n := range 20 {
				for k := range 16 {
					m := keyed(fmt.Sprint("k", k), n+1)
					acks <- m.Acked()
					f <- m
					read.Add(1)
				}
			}
		}()
		synctest.Wait()
		require.EqualValues(t, 8, read.Load(), "as many as may be in flight")
		for range 320 {
			<-<-acks
		}
		require.NoError(t, stop())
		require.Equal(t, 8, seen.most)
		for key, order := range seen.order {
			require.True(t, slices.IsSorted(order), "%s: %v", key, order)
			require.Len(t, order, 20, key)
		}
		require.Len(t, seen.order, 16)
	})
}

// topics is a subscriber with a feed for each topic.
type topics map[string]feed

func (s topics) Subscribe(_ context.Context, topic string) (<-chan *message.Message, error) {
	return s[topic], nil
}
func (topics) Close() error { return nil }

// A topic of which nothing comes takes no place from the others.
func TestIdleTopicsTakeNoPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		done := 0
		p := projector.Define("p", types, projector.Options{}, projector.On("a", func(context.Context, struct{}, eventstore.Event[posted]) error {
			done++
			return nil
		}))
		src := topics{"idle": make(feed), "silent": make(feed), "busy": make(feed)}
		stop := runFree(t, projector.Subscribe(src, "idle", "silent", "busy"), projector.RunnerConfig{Concurrency: 1}, p)
		for n := range 3 {
			src["busy"].deliver(t, keyed("k", n+1))
		}
		src["idle"].deliver(t, keyed("k", 4))
		require.NoError(t, stop())
		require.Equal(t, 4, done)
	})
}

// A subscription that ends by itself ends the runner, also while a message is being retried.
func TestASubscriptionThatEndsWhileAMessageIsRetried(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := projector.Define("p", types, projector.Options{}, projector.On("a", func(context.Context, struct{}, eventstore.Event[posted]) error {
			return &projector.Error{Class: projector.Transient, Err: errors.New("always")}
		}))
		f := make(feed)
		r, err := projector.NewRunner(free{}, projector.Subscribe(f, "review"), &projector.RunnerConfig{Concurrency: 2, Logger: slog.New(slog.DiscardHandler)}, p)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- r.Run(t.Context()) }()
		f <- keyed("k", 1)
		time.Sleep(time.Minute)
		close(f)
		require.ErrorContains(t, <-done, "the subscription to review ended")
	})
}

// What waits in a lane when the runner stops is not begun, and not acked.
func TestStopLeavesWhatWaitsInALane(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := 0
		p := projector.Define("p", types, projector.Options{}, projector.On("a", func(context.Context, struct{}, eventstore.Event[posted]) error {
			began++
			time.Sleep(time.Second)
			return nil
		}))
		f := make(feed)
		stop := runFree(t, projector.Subscribe(f, "review"), projector.RunnerConfig{Concurrency: 8}, p)
		first, second := keyed("k", 1), keyed("k", 2)
		f <- first
		f <- second
		synctest.Wait()
		require.NoError(t, stop())
		<-first.Acked()
		select {
		case <-second.Acked():
			t.Fatal("acked, though it was not handled")
		case <-second.Nacked():
			t.Fatal("nacked")
		default:
		}
		require.Equal(t, 1, began)
	})
}

// each is a source of feeds, one for each projector, that notes which were closed.
type each struct {
	feeds  map[string]feed
	closed []string
}

type closing struct {
	feed
	close func()
}

func (c closing) Close() error { c.close(); return nil }

func (e *each) of(name string) (message.Subscriber, error) {
	f, ok := e.feeds[name]
	if !ok {
		return nil, errors.New("no such group")
	}
	return closing{f, func() { e.closed = append(e.closed, name) }}, nil
}

// With a subscription each, a projector that cannot go on holds up no other.
func TestSubscribeEach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		done := 0
		stuck := projector.Define("stuck", types, projector.Options{}, projector.On("a", func(context.Context, struct{}, eventstore.Event[posted]) error {
			return &projector.Error{Class: projector.Transient, Err: errors.New("always")}
		}))
		works := projector.Define("works", types, projector.Options{}, projector.On("a", func(context.Context, struct{}, eventstore.Event[posted]) error {
			done++
			return nil
		}))
		src := &each{feeds: map[string]feed{"stuck": make(feed), "works": make(feed)}}
		stop := runFree(t, projector.SubscribeEach(src.of, "review"), projector.RunnerConfig{Concurrency: 1}, stuck, works)
		src.feeds["stuck"] <- keyed("k", 1)
		for n := range 5 {
			src.feeds["works"].deliver(t, keyed("k", n+1))
		}
		require.Equal(t, 5, done)
		require.Empty(t, src.closed)
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"stuck", "works"}, src.closed)

		delete(src.feeds, "works")
		src.closed = nil
		r, err := projector.NewRunner(free{}, projector.SubscribeEach(src.of, "review"), nil, stuck, works)
		require.NoError(t, err)
		require.ErrorContains(t, r.Run(t.Context()), "subscriber of works: no such group")
		require.Equal(t, []string{"stuck"}, src.closed)
	})
}

var errTeapot = errors.New("teapot")

// Everything that a runner does is told, with how long it took.
func TestRunnerTellsItsObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var told []string
		tell := func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprintf(format, args...))
		}
		tries := 0
		p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(time.Second)
			if e.Data.Stars == 2 {
				return projector.Permanent(errors.New("no"))
			}
			if tries++; tries == 1 {
				return errTeapot
			}
			return add(ctx, tx, e)
		})
		f := make(feed)
		stop := run(t, newDB(t), f, projector.RunnerConfig{
			Concurrency: 3,
			Classify: func(err error) projector.Class {
				if errors.Is(err, errTeapot) {
					return projector.Transient
				}
				return projector.UnknownClass
			},
			Observer: projector.Observer{
				Handled: func(handler string, skipped bool, waited, took time.Duration, err error) {
					tell("handled %s: skipped %t, waited %s, took %s, failed %t", handler, skipped, waited, took, err != nil)
				},
				Retried: func(handler string, class projector.Class, attempts int, after time.Duration) {
					tell("retried %s: %s, %d attempts, after %s", handler, class, attempts, after)
				},
				Parked: func(projector, handler string, class projector.Class, code string) {
					tell("parked %s %s: %s %s", projector, handler, class, code)
				},
				Queued: func(topic string, inFlight, most int) { tell("queued %s: %d of %d", topic, inFlight, most) },
			},
		}, p)
		m := msg("1", "posted", `{"Stars":1}`)
		m.Metadata[outbox.HeaderRecordedAt] = time.Now().Add(-time.Minute).UTC().Format(time.RFC3339Nano)
		f.deliver(t, m)
		synctest.Wait() // its place is given back
		f.deliver(t, msg("1", "posted", `{"Stars":1}`))
		synctest.Wait()
		f.deliver(t, msg("2", "posted", `{"Stars":2}`))
		require.NoError(t, stop())
		require.Equal(t, []string{
			"queued review: 1 of 3",
			"handled p/a: skipped false, waited 1m1s, took 1s, failed true",
			"retried p/a: transient, 0 attempts, after 100ms",
			"handled p/a: skipped false, waited 1m2.1s, took 1s, failed false",
			"queued review: 1 of 3",
			"handled p/a: skipped true, waited 0s, took 0s, failed false",
			"queued review: 1 of 3",
			"handled p/a: skipped false, waited 0s, took 1s, failed true",
			"parked p p/a: permanent ",
		}, told)
	})
}
