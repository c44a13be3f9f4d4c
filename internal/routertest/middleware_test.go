package routertest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// In the documented order: PoisonQueue, Throttle, Retry, CorrelationID, Middleware.
// Promise: G4.6
func TestMiddlewareInARouter(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		inARouter(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		inARouter(t, newPostgres(t))
	})
}

// tries fails the calls of some messages.
type tries struct {
	mu  sync.Mutex
	all map[string]int // by UUID
}

// next counts a call, and returns an error for "flaky" messages in the first two calls, and for "bad"
// messages in each.
func (f *tries) next(m *message.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all[m.UUID]++
	switch kind := string(m.Payload); {
	case kind == "bad", kind == "flaky" && f.all[m.UUID] < 3:
		return errors.New("no")
	}
	return nil
}

func inARouter[Tx any](t *testing.T, d *database[Tx]) {
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	poisoned := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	t.Cleanup(func() { require.NoError(t, poisoned.Close()) })
	poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", isPoison)
	require.NoError(t, err)
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}
	faults := &tries{all: map[string]int{}}
	router := newRouter(t)
	router.AddMiddleware(poison, middleware.NewThrottle(1000, time.Second).Middleware, retry.Middleware, middleware.CorrelationID)
	unused := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	router.AddHandler("count handler", "reviews", in, "counted", unused, func(m *message.Message) ([]*message.Message, error) {
		if err := d.count(m); err != nil {
			return nil, err
		}
		out := message.NewMessage(watermill.NewUUID(), []byte("counted "+m.UUID))
		return []*message.Message{out}, faults.next(m)
	}).AddMiddleware(d.once(t))
	startRouter(t, router)

	var all sync.WaitGroup
	send := func(id, kind string) {
		m := message.NewMessage(id, []byte(kind))
		m.Metadata["correlation_id"] = "c-" + id
		all.Go(func() { require.NoError(t, in.Publish("reviews", m)) })
	}
	const each = 20
	for i := range each {
		for range 3 {
			send(fmt.Sprint("good-", i), "good")
			send(fmt.Sprint("flaky-", i), "flaky")
		}
		send(fmt.Sprint("bad-", i), "bad")
	}
	send("", "empty")
	all.Wait() // acked

	d.requireTotal(t, each, "good")
	d.requireTotal(t, each, "flaky")
	d.requireTotal(t, 0, "bad")
	d.requireTotal(t, 0, "empty")
	for i := range each {
		require.Equal(t, 1, faults.all[fmt.Sprint("good-", i)])
		require.Equal(t, 3, faults.all[fmt.Sprint("flaky-", i)])
		require.Equal(t, 3, faults.all[fmt.Sprint("bad-", i)])
	}
	require.Zero(t, faults.all[""])
	entries, err := d.entries(t.Context(), outbox.Filter{Limit: 1000})
	require.NoError(t, err)
	require.Len(t, entries, 2*each)
	for _, e := range entries {
		cause := string(e.Payload[len("counted "):])
		require.Equal(t, "counted", e.Topic)
		require.Equal(t, "c-"+cause, e.Headers[provider.HeaderCorrelation])
		require.Equal(t, cause, e.Headers[provider.HeaderCausation])
	}
	bad, err := poisoned.Subscribe(t.Context(), "poison")
	require.NoError(t, err)
	reasons := map[string]string{}
	for range each + 1 {
		m := <-bad
		reasons[m.UUID] = m.Metadata[middleware.ReasonForPoisonedKey]
		m.Ack()
	}
	require.Equal(t, "no", reasons["bad-0"])
	require.Contains(t, reasons[""], "message id")
	require.Len(t, reasons, each+1)
}

// The process is killed after the handler's writes and before the commit. Then two other processes get
// the message at once.
// Promise: G4.6
func TestMiddlewareAfterAKill(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		afterAKill(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		afterAKill(t, newPostgres(t))
	})
}

func afterAKill[Tx any](t *testing.T, d *database[Tx]) {
	killed := startChild(t, d.name, d.at)
	handle := d.once(t)(func(m *message.Message) ([]*message.Message, error) { return nil, d.count(m) })
	done := make(chan error, 2)
	for range cap(done) {
		go func() {
			_, err := handle(message.NewMessage("m-1", []byte("a")))
			done <- err
		}()
	}
	select {
	case err := <-done:
		t.Fatalf("it did not wait for the other process: %v", err)
	case <-time.After(200 * time.Millisecond): // a longer wait would prove no more
	}
	require.NoError(t, killed.Process.Kill()) // SIGKILL
	_ = killed.Wait()
	for range cap(done) {
		require.NoError(t, <-done)
	}
	d.requireTotal(t, 1, "a")
}

// A router closes while a handler runs: the message is committed and acked.
// Promise: G4.6
func TestMiddlewareWhileTheRouterCloses(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		whileTheRouterCloses(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		whileTheRouterCloses(t, newPostgres(t))
	})
}

func whileTheRouterCloses[Tx any](t *testing.T, d *database[Tx]) {
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, reached, proceed := newRouter(t), make(chan context.Context), make(chan struct{})
	router.AddConsumerHandler("count handler", "reviews", in, func(m *message.Message) error {
		reached <- m.Context()
		<-proceed
		return d.count(m)
	}).AddMiddleware(
		func(h message.HandlerFunc) message.HandlerFunc { // sees the context that the router cancels
			return func(m *message.Message) ([]*message.Message, error) {
				reached <- m.Context()
				return h(m)
			}
		}, d.once(t))
	done := make(chan error, 1)
	go func() { done <- router.Run(context.Background()) }()
	<-router.Running()
	m := message.NewMessage("m-1", []byte("a"))
	published := make(chan error, 1)
	go func() { published <- in.Publish("reviews", m) }()
	routers, own := <-reached, <-reached
	closed := make(chan error, 1)
	go func() { closed <- router.Close() }()
	<-routers.Done()
	require.NoError(t, own.Err())
	close(proceed)
	require.NoError(t, <-closed)
	require.NoError(t, <-done)
	require.NoError(t, <-published)
	d.requireTotal(t, 1, "a")
}

// Old markers are deleted while the middleware is used.
// Promise: G4.6
func TestMiddlewareDeletesOldMarkers(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		deletesOldMarkers(t, newSQLite(t), "update kinora_markers set processed_at = processed_at - 8 * 86400000",
			"insert into totals select 'markers', count(*) from kinora_markers")
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		deletesOldMarkers(t, newPostgres(t), "update kinora.markers set processed_at = processed_at - interval '8 days'",
			"insert into totals select 'markers', count(*) from kinora.markers")
	})
}

func deletesOldMarkers[Tx any](t *testing.T, d *database[Tx], age, measure string) {
	handle := d.once(t)(func(m *message.Message) ([]*message.Message, error) { return nil, d.count(m) })
	apply := func(from, to int) {
		for i := from; i < to; i++ {
			_, err := handle(message.NewMessage(fmt.Sprint("m-", i), []byte("a")))
			require.NoError(t, err)
		}
	}
	apply(0, 50)
	require.NoError(t, d.exec(t.Context(), age))
	apply(50, 101)
	require.NoError(t, d.exec(t.Context(), measure))
	d.requireTotal(t, 51, "markers")
	require.NoError(t, d.exec(t.Context(), age))
	n, err := marker.Prune(t.Context(), d, marker.Retention{}, "", "count")
	require.NoError(t, err)
	require.Equal(t, 51, n)
	d.requireTotal(t, 101, "a")
}

// A handler that only queues statements runs once, after the marker is known. A statement that fails undoes
// the marker.
func TestMiddlewareOfAQueuingHandler(t *testing.T) {
	t.Parallel()
	d, calls := newPostgres(t), 0
	once, err := projector.Middleware(d.Provider.(*postgres.DB).Batched(), "count", marker.Retention{})
	require.NoError(t, err)
	handle := once(func(m *message.Message) ([]*message.Message, error) {
		batch, ok := projector.TxFrom[*pgx.Batch](m.Context())
		require.True(t, ok)
		if batch.Queue(addSQL, string(m.Payload)); calls == 0 {
			batch.Queue("select 1 / 0")
		}
		calls++
		return nil, nil
	})
	for n := range 4 {
		_, err := handle(message.NewMessage("m-1", []byte("a")))
		require.Equal(t, n == 0, err != nil, err)
	}
	require.Equal(t, 2, calls)
	d.requireTotal(t, 1, "a")
}

// channel is a subscriber whose messages the test sends itself.
type channel chan *message.Message

func (c channel) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case m := <-c:
				m.SetContext(ctx)
				out <- m
			}
		}
	}()
	return out, nil
}

func (channel) Close() error { return nil }

// A router closes while a message waits for a retry: it is nacked, and does not go to the poison queue.
func TestWaitingRetryIsNotPoison(t *testing.T) {
	t.Parallel()
	d, in, failed := newSQLite(t), make(channel), make(chan struct{}, 1)
	poisoned := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}) // accepts all, and has no reader
	poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", isPoison)
	require.NoError(t, err)
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Hour}
	router := newRouter(t)
	router.AddMiddleware(poison, retry.Middleware)
	router.AddConsumerHandler("count handler", "reviews", in, func(m *message.Message) error {
		failed <- struct{}{}
		return errors.Join(d.count(m), errNo)
	}).AddMiddleware(d.once(t))
	done := make(chan error, 1)
	go func() { done <- router.Run(context.Background()) }()
	<-router.Running()
	m := message.NewMessage("m-1", []byte("a"))
	in <- m
	<-failed
	require.NoError(t, router.Close())
	require.NoError(t, <-done)
	select {
	case <-m.Nacked():
	case <-m.Acked():
		t.Fatal("acked")
	}
	d.requireTotal(t, 0, "a")
}

// isPoison is the filter of the documentation of Middleware.
func isPoison(err error) bool {
	class := projector.ClassOf(err)
	return (class == projector.ClassUnknown || class == projector.ClassPermanent) && !errors.Is(err, context.Canceled)
}

// What a handler adds with the context of its message has the message as the cause, and its correlation id and
// traceparent.
// Promise: G13.1
func TestMiddlewareContextFlows(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		contextFlows(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		contextFlows(t, newPostgres(t))
	})
}

func contextFlows[Tx any](t *testing.T, d *database[Tx]) {
	handle := d.once(t)(func(m *message.Message) ([]*message.Message, error) {
		tx, _ := projector.TxFrom[Tx](m.Context())
		if err := d.enqueuer(tx).Enqueue(m.Context(), outbox.Message{Topic: "added"}); err != nil {
			return nil, err
		}
		out := message.NewMessage("out", nil)
		out.SetContext(m.Context())
		return nil, outbox.NewPublisher(d.enqueuer(tx)).Publish("published", out)
	})
	m := message.NewMessage("m-1", nil)
	m.Metadata[provider.HeaderCorrelation], m.Metadata[provider.HeaderTraceparent] = "c-1", "00-1"
	_, err := handle(m)
	require.NoError(t, err)
	entries, err := d.entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for _, e := range entries {
		require.Equal(t, map[string]string{
			provider.HeaderCorrelation: "c-1", provider.HeaderCausation: "m-1", provider.HeaderTraceparent: "00-1",
		}, e.Headers, e.Topic)
	}
}
