package routertest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

type posted struct{ Kind string }

var types = eventstore.NewTypes(eventstore.Type[posted]("posted"))

func event(id, kind string) *message.Message {
	m := message.NewMessage(id, fmt.Appendf(nil, `{"Kind":%q}`, kind))
	m.Metadata[provider.HeaderType], m.Metadata[provider.HeaderStream] = "posted", "review-"+id
	return m
}

// counter returns a projector "count". The handler fails for events of the kind "bad".
func counter[Tx any](d *database[Tx]) *projector.Projector[Tx] {
	return projector.Define("count", types, projector.Options{Markers: true, BrokerOnly: true},
		projector.On("posted", func(ctx context.Context, tx Tx, e eventstore.Event[posted]) error {
			if err := d.add(ctx, tx, e.Data.Kind); err != nil || e.Data.Kind != "bad" {
				return err
			}
			return projector.Permanent(errNo)
		}))
}

func routerRunner[Tx any](t *testing.T, d *database[Tx]) *projector.Runner {
	t.Helper()
	r, err := projector.NewRunner(d.Provider, projector.FromRouter(), projector.RunnerConfig{Concurrency: 2, Logger: slog.New(slog.DiscardHandler)}, counter(d))
	require.NoError(t, err)
	return r
}

// A router with Watermill's middlewares passes messages to a runner, while the runner is replaced by
// another one.
// Promise: G4.6
func TestRunnerInARouter(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		runnerInARouter(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		runnerInARouter(t, newPostgres(t))
	})
}

func runnerInARouter[Tx any](t *testing.T, d *database[Tx]) {
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	poison, err := middleware.PoisonQueueWithFilter(nil, "poison", func(err error) bool {
		class := projector.ClassOf(err)
		return class != projector.ClassTransient && class != provider.ClassShutdown
	})
	require.NoError(t, err)
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}
	router := newRouter(t)
	router.AddMiddleware(poison, middleware.NewThrottle(1000, time.Second).Middleware, retry.Middleware, middleware.CorrelationID)
	runners := make(chan *projector.Runner, 1)
	first := routerRunner(t, d)
	runners <- first
	router.AddConsumerHandler("count", "review", in, func(m *message.Message) error {
		r := <-runners
		runners <- r
		return r.Handle(m)
	})
	startRouter(t, router)

	const each = 50
	var all sync.WaitGroup
	for i := range each {
		for range 3 {
			all.Go(func() { require.NoError(t, in.Publish("review", event(fmt.Sprint("good-", i), "good"))) })
		}
		all.Go(func() { require.NoError(t, in.Publish("review", event(fmt.Sprint("bad-", i), "bad"))) })
	}
	group, err := kinora.Start(t.Context(), first)
	require.NoError(t, err)
	patience.Until(t, func() bool {
		n, err := d.total(t.Context(), "good")
		return err == nil && n > 0
	}, "a good message")
	require.NoError(t, group.Stop()) // the router nacks the rest
	second := routerRunner(t, d)
	group, err = kinora.Start(t.Context(), second)
	require.NoError(t, err)
	<-runners
	runners <- second
	all.Wait() // acked
	require.NoError(t, group.Stop())
	d.requireTotal(t, each, "good")
	d.requireTotal(t, 0, "bad")
	parked, err := d.Parked(t.Context(), projector.ParkedFilter{Projector: "count", Limit: 1000})
	require.NoError(t, err)
	require.Len(t, parked, each)
	require.Equal(t, "review", parked[0].Topic)
}

// named reads the name of an event as Kinora's relay writes it.
type named struct{ cqrs.JSONMarshaler }

func (named) NameFromMessage(m *message.Message) string { return m.Metadata[provider.HeaderType] }

// An event processor hands the messages of one of its handlers to a runner. Another handler of the
// processor takes the same events with the middleware.
func TestRunnerUnderAnEventProcessor(t *testing.T) {
	t.Parallel()
	d := newSQLite(t)
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, r := newRouter(t), routerRunner(t, d)
	processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return "review", nil },
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return in, nil
		},
		Marshaler: named{cqrs.JSONMarshaler{GenerateName: cqrs.StructName}},
	})
	require.NoError(t, err)
	_, err = processor.AddHandler(cqrs.NewEventHandler("ratings", func(ctx context.Context, _ *posted) error {
		return r.Handle(cqrs.OriginalMessageFromCtx(ctx))
	}))
	require.NoError(t, err)
	plain, err := processor.AddHandler(cqrs.NewEventHandler("plain", func(ctx context.Context, e *posted) error {
		tx, ok := projector.TxFrom[*sql.Tx](ctx)
		if !ok {
			return errors.New("no transaction")
		}
		return d.add(ctx, tx, "plain "+e.Kind)
	}))
	require.NoError(t, err)
	once, err := projector.Middleware(d.Provider, "count", marker.Retention{}) // the name of the projector
	require.NoError(t, err)
	plain.AddMiddleware(once)
	group, err := kinora.Start(t.Context(), r)
	require.NoError(t, err)
	startRouter(t, router)
	for range 2 {
		require.NoError(t, in.Publish("review", event("m-1", "good")))
	}
	require.NoError(t, router.Close())
	require.NoError(t, group.Stop())
	d.requireTotal(t, 1, "good")
	d.requireTotal(t, 1, "plain good")
}

// A middleware for two handlers would skip each other's messages, so it refuses the second.
// Promise: G4.6
func TestMiddlewareOfTwoHandlers(t *testing.T) {
	t.Parallel()
	d := newSQLite(t)
	in := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	router, once, errs := newRouter(t), d.once(t), make(chan error, 10)
	report := func(h message.HandlerFunc) message.HandlerFunc {
		return func(m *message.Message) ([]*message.Message, error) {
			out, err := h(m)
			errs <- err
			return out, nil
		}
	}
	router.AddMiddleware(report, once)
	router.AddConsumerHandler("first", "reviews", in, d.count)
	router.AddConsumerHandler("second", "reviews", in, d.count)
	startRouter(t, router)
	require.NoError(t, in.Publish("reviews", message.NewMessage("m-1", []byte("a"))))
	failed := errors.Join(<-errs, <-errs)
	require.Equal(t, projector.ClassPermanent, projector.ClassOf(failed))
	require.ErrorContains(t, failed, "create a middleware for each")
	d.requireTotal(t, 1, "a")
}
