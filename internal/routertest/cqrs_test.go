package routertest_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

var errNo = errors.New("no")

type rated struct{ Product string }

// eventBus returns an event bus in a transaction.
func eventBus[Tx any](d *database[Tx], tx Tx) (*cqrs.EventBus, error) {
	return cqrs.NewEventBusWithConfig(outbox.NewPublisher(d.enqueuer(tx)), cqrs.EventBusConfig{
		GeneratePublishTopic: func(p cqrs.GenerateEventPublishTopicParams) (string, error) { return p.EventName, nil },
		Marshaler:            cqrs.JSONMarshaler{GenerateName: cqrs.StructName},
	})
}

// The events of an event bus in the caller's transaction are published if it commits.
func TestEventBusInATransaction(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		busInATransaction(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		busInATransaction(t, newPostgres(t))
	})
}

func busInATransaction[Tx any](t *testing.T, d *database[Tx]) {
	for _, fails := range []error{errNo, nil} {
		err := d.transact(t.Context(), func(ctx context.Context, tx Tx) error {
			bus, err := eventBus(d, tx)
			if err != nil {
				return err
			}
			return errors.Join(d.add(ctx, tx, "a"), bus.Publish(ctx, rated{"jar"}), fails)
		})
		require.ErrorIs(t, err, fails)
	}
	d.requireTotal(t, 1, "a")
	entries, err := d.entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	e := entries[0]
	require.Equal(t, []string{"rated", `{"Product":"jar"}`, "rated"}, []string{e.Topic, string(e.Payload), e.Headers["name"]})
	require.Equal(t, e.ID, e.Key)
}

// A message that cannot be stored is refused before anything is written, and the transaction stays
// usable.
func TestPublisherRefusesWhatCannotBeStored(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		refusesWhatCannotBeStored(t, newSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		refusesWhatCannotBeStored(t, newPostgres(t))
	})
}

func refusesWhatCannotBeStored[Tx any](t *testing.T, d *database[Tx]) {
	header := func(name, value string) *message.Message {
		m := message.NewMessage("bad", nil)
		m.Metadata[name] = value
		return m
	}
	require.NoError(t, d.transact(t.Context(), func(ctx context.Context, tx Tx) error {
		p := outbox.NewPublisher(d.enqueuer(tx))
		good := message.NewMessage("good", []byte("1"))
		for _, bad := range []*message.Message{
			header("a", "\x00"), header("a", strings.Repeat("a", 1025)), header("", "a"), header(outbox.HeaderKey, strings.Repeat("a", 256)),
			message.NewMessage("bad\n", nil), message.NewMessage("bad", make([]byte, 1<<20+1)),
		} {
			_, invalid := errors.AsType[*eventstore.InvalidError](p.Publish("reviews", good, bad))
			require.True(t, invalid)
		}
		_, invalid := errors.AsType[*eventstore.InvalidError](p.Publish("", good))
		require.True(t, invalid)
		require.NoError(t, p.Publish("reviews"))
		keyed := header(outbox.HeaderKey, "k")
		keyed.UUID = ""
		require.NoError(t, p.Publish("reviews", good, keyed))
		require.NoError(t, p.Publish("reviews", good)) // it is there already
		return p.Close()
	}))
	entries, err := d.entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, []string{"good", "good"}, []string{entries[0].ID, entries[0].Key})
	require.Len(t, entries[1].ID, 36)
	require.Equal(t, "k", entries[1].Key)
}

// A handler of an event processor gets the transaction, and publishes with an event bus in it.
// Promise: G4.6
func TestMiddlewareUnderAnEventProcessor(t *testing.T) {
	t.Parallel()
	d := newSQLite(t)
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, marshaler, fails := newRouter(t), cqrs.JSONMarshaler{GenerateName: cqrs.StructName}, true
	processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(p cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return p.EventName, nil },
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return in, nil
		},
		Marshaler: marshaler,
	})
	require.NoError(t, err)
	handler, err := processor.AddHandler(cqrs.NewEventHandler("count", func(ctx context.Context, e *rated) error {
		tx, _ := projector.TxFrom[*sql.Tx](ctx)
		bus, err := eventBus(d, tx)
		if err != nil {
			return err
		}
		err = errors.Join(d.add(ctx, tx, e.Product), bus.Publish(ctx, rated{"from " + e.Product}))
		if fails {
			fails = false
			return errNo
		}
		return err
	}))
	require.NoError(t, err)
	handler.AddMiddleware(d.once(t))
	startRouter(t, router)
	m, err := marshaler.Marshal(rated{"jar"})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, in.Publish("rated", m.Copy()))
	}
	d.requireTotal(t, 1, "jar")
	entries, err := d.entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.JSONEq(t, `{"Product":"from jar"}`, string(entries[0].Payload))
}

// All handlers of a group that take an event run in one transaction.
func TestMiddlewareUnderAnEventGroupProcessor(t *testing.T) {
	t.Parallel()
	d := newSQLite(t)
	in := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, marshaler, fails := newRouter(t), cqrs.JSONMarshaler{GenerateName: cqrs.StructName}, true
	processor, err := cqrs.NewEventGroupProcessorWithConfig(router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "rated", nil },
		SubscriberConstructor: func(cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return in, nil
		},
		Marshaler: marshaler,
	})
	require.NoError(t, err)
	counts := func(prefix string) cqrs.GroupEventHandler {
		return cqrs.NewGroupEventHandler(func(ctx context.Context, e *rated) error {
			tx, _ := projector.TxFrom[*sql.Tx](ctx)
			if err := d.add(ctx, tx, prefix+e.Product); err != nil || prefix != "b " || !fails {
				return err
			}
			fails = false
			return errNo
		})
	}
	require.NoError(t, processor.AddHandlersGroup("group", counts("a "), counts("b ")))
	router.AddMiddleware(d.once(t)) // a group has no handler to add it to
	startRouter(t, router)
	m, err := marshaler.Marshal(rated{"jar"})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, in.Publish("rated", m.Copy()))
	}
	d.requireTotal(t, 1, "a jar")
	d.requireTotal(t, 1, "b jar")
}

// Messages with a key are published in commit order: the second transaction waits for the first. Messages
// without a key do not wait.
// Promise: G3.2
func TestPublisherOrdersAKey(t *testing.T) {
	t.Parallel()
	d := newPostgres(t)
	begun, proceed := make(chan struct{}), make(chan struct{})
	publish := func(id, key string, between func()) error {
		return d.transact(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			m := message.NewMessage(id, nil)
			if key != "" {
				m.Metadata[outbox.HeaderKey] = key
			}
			err := outbox.NewPublisher(d.enqueuer(tx)).Publish("reviews", m)
			between()
			return err
		})
	}
	done := make(chan error, 2)
	go func() {
		done <- publish("first", "k", func() {
			close(begun)
			<-proceed
		})
	}()
	<-begun
	go func() { done <- publish("second", "k", func() {}) }()
	require.NoError(t, publish("free", "", func() {}))
	patience.NoError(t, func() error { // the second waits
		return d.exec(t.Context(), `do $$ begin assert exists (select from pg_locks where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database())); end $$`)
	})
	close(proceed)
	require.NoError(t, <-done)
	require.NoError(t, <-done)
	patience.NoError(t, func() error { // both are there, in the order of their commits
		return d.exec(t.Context(), `do $$ begin assert (select array_agg(message_id order by id) from kinora.outbox where key = 'k') = '{first,second}'; end $$`)
	})
}
