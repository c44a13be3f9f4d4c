package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Middleware returns a middleware that makes a plain Watermill handler take effect once for each message
// (idempotent). It runs the handler in a transaction of db, which TxFrom returns, and commits it with a
// marker of the message's UUID. A message that has a marker is acked, and the handler is not called. A
// second delivery at the same moment waits for the first. Messages that the handler returns are added to
// the outbox in the same transaction, for the router's publish topic (see outbox.NewPublisher), and are
// not returned to the router: a relay publishes them.
//
//	once, err := projector.Middleware(db, "count-reviews", marker.Retention{})
//	router.AddMiddleware(poison, throttle.Middleware, retry.Middleware, middleware.CorrelationID)
//	router.AddConsumerHandler("count", "reviews", subscriber, count).AddMiddleware(once)
//
// Add it to one handler, after (so inside of) all others: PoisonQueue first, then Throttle, Retry and
// CorrelationID. What is inside of it runs while the transaction is open.
//
// name is part of each marker, so do not change it. It must match ^[a-z][a-z0-9_-]{0,40}$. Each handler
// requires a name of its own, in all services that share the database: handlers of one name would skip
// each other's messages. Projectors have other markers, so they may have the same name.
//
// The handler must write only through the transaction, and must not end it. It has until the deadline of
// the message's context (middleware.Timeout), or 30 seconds, together with the commit. The close of the
// router does not end its context. An output message gets the ordering key of the received one, its id as
// the causation id, and its correlation id and traceparent, unless it has its own.
//
// The middleware returns an error of the handler unchanged, after the rollback, but gives errors of the
// database their class (ClassOf). Other errors:
//   - ClassTransient: the database is unreachable or busy, or another delivery holds the marker.
//   - ClassAmbiguous: the reply to COMMIT was lost. The next delivery finds the marker, or runs again.
//   - ClassPermanent: the UUID is empty or invalid, two handlers of the router use the middleware, or
//     there is output without a publish topic (message.ErrOutputInNoPublisherHandler).
//
// So a poison queue must take only errors of ClassUnknown and ClassPermanent, and not those of a stop:
//
//	poison, err := middleware.PoisonQueueWithFilter(publisher, "poison", func(err error) bool {
//		class := projector.ClassOf(err)
//		return (class == projector.ClassUnknown || class == projector.ClassPermanent) && !errors.Is(err, context.Canceled)
//	})
//
// Markers are kept for kept.Window, 8 days if kept is zero. With the first of each hundred messages it
// deletes up to 500 older ones. marker.Prune(ctx, db, kept, "", name) deletes all of them, and marker.Drop
// those of a handler that was removed.
//
// Middleware returns an error for an invalid name, a nil db, marker.ErrUnsafe, or a store that does not
// commit markers and output with the handler's writes, such as Redis.
func Middleware[Tx any](db provider.Provider[Tx], name string, kept marker.Retention) (message.HandlerMiddleware, error) {
	if db == nil {
		return nil, errors.New("middleware: the store is nil")
	}
	if err := checkName("handler", name); err != nil {
		return nil, fmt.Errorf("middleware: %w", err)
	}
	if k := db.Keeps(); !k.Atomic || !k.Markers || !k.Output {
		return nil, fmt.Errorf("middleware %s: the store must commit markers and output with the handler's writes: use one such as PostgreSQL or SQLite", name)
	}
	kept, err := kept.WithDefaults()
	if err != nil {
		return nil, fmt.Errorf("middleware %s: %w", name, err)
	}
	o := &once[Tx]{db: db, name: name, window: kept.Window}
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(m *message.Message) ([]*message.Message, error) { return nil, o.handle(m, h) }
	}, nil
}

// TxFrom returns the transaction of the message's handler from the context of the message, if Middleware
// runs the handler in one of type Tx, such as pgx.Tx or *sql.Tx.
func TxFrom[Tx any](ctx context.Context) (Tx, bool) {
	tx, ok := ctx.Value(txKey[Tx]{}).(Tx)
	return tx, ok
}

type txKey[Tx any] struct{}

// once runs one handler of a router, once for each message.
type once[Tx any] struct {
	db      provider.Provider[Tx]
	name    string
	window  time.Duration          // how long markers are kept
	user    atomic.Pointer[string] // the name of the handler in the router
	applied atomic.Int64           // messages
}

func (o *once[Tx]) handle(m *message.Message, h message.HandlerFunc) error {
	if err := o.check(m); err != nil {
		return fmt.Errorf("middleware %s: %w", o.name, Permanent(err))
	}
	ctx, cancel := ownDeadline(m.Context())
	defer cancel()
	u := provider.Unit{
		Projector: o.unit(), Once: true,
		Messages: []provider.Message{{
			ID: m.UUID, Lane: provider.LaneOfMessage(m.UUID), Handlers: []provider.Handler{{Name: o.name}}, Mark: true,
		}},
	}
	var failed error // of the handler
	began := false
	err := o.db.Do(ctx, u, func(ctx context.Context, tx Tx, found provider.Found) (c provider.Closing, err error) {
		if began = true; !found.Fresh[0][0] {
			return c, nil
		}
		found.Begin(0)
		c.Output, failed = o.call(context.WithValue(ctx, txKey[Tx]{}, tx), m, h)
		return c, failed
	})
	switch {
	case err == nil:
		o.prune(ctx)
		return nil
	case failed != nil && provider.ClassOf(err) == provider.ClassOf(failed):
		return failed
	case !began && ctx.Err() != nil:
		err = &Error{Class: ClassTransient, Code: "begin", Err: err}
	}
	return fmt.Errorf("middleware %s: %w", o.name, err)
}

// unit is the name of the projector in units. No projector can have it.
func (o *once[Tx]) unit() string { return "handler/" + o.name }

func (o *once[Tx]) check(m *message.Message) error {
	name := message.HandlerNameFromCtx(m.Context())
	if name != "" && !o.user.CompareAndSwap(nil, &name) {
		if user := *o.user.Load(); user != name {
			return fmt.Errorf("the handlers %q and %q of the router would share markers: create a middleware for each", user, name)
		}
	}
	return provider.CheckText("message id", m.UUID, provider.MaxIDBytes)
}

// ownDeadline returns a context with the values and the deadline of a message's context. It does not end
// when a router closes and cancels all messages.
func ownDeadline(of context.Context) (context.Context, context.CancelFunc) {
	ctx := context.WithoutCancel(of)
	if at, has := of.Deadline(); has {
		return context.WithDeadline(ctx, at)
	}
	return context.WithTimeout(ctx, 30*time.Second)
}

// call calls the handler, and returns its output.
func (o *once[Tx]) call(ctx context.Context, m *message.Message, h message.HandlerFunc) ([]outbox.Message, error) {
	received := m.Context()
	defer m.SetContext(received)
	cause := eventstore.Raw{
		ID: m.UUID, Stream: m.Metadata[outbox.HeaderKey],
		Metadata: eventstore.Metadata{
			CorrelationID: m.Metadata[provider.HeaderCorrelation], Traceparent: m.Metadata[provider.HeaderTraceparent],
		},
	}
	m.SetContext(model.WithCause(ctx, cause))
	crash.Point("handler: before")
	out, err := h(m)
	crash.Point("handler: after")
	if err != nil || len(out) == 0 {
		return nil, err
	}
	topic := message.PublishTopicFromCtx(received)
	if topic == "" {
		return nil, Permanent(message.ErrOutputInNoPublisherHandler)
	}
	var c collector
	if err := outbox.NewPublisher(&c).Publish(topic, out...); err != nil {
		return nil, err
	}
	return model.Completed(c, o.name, cause), nil
}

// collector is an outbox.Enqueuer that keeps the messages.
type collector []outbox.Message

// Enqueue implements outbox.Enqueuer.
func (c *collector) Enqueue(_ context.Context, ms ...outbox.Message) error {
	*c = append(*c, ms...)
	return nil
}

// prune deletes old markers with each hundredth message: more than have been added since.
func (o *once[Tx]) prune(ctx context.Context) {
	if o.applied.Add(1)%100 != 1 {
		return
	}
	if _, err := o.db.Prune(ctx, o.unit(), []string{o.name}, o.window, 500); err != nil {
		slog.Default().Warn("old markers not deleted", "handler", o.name,
			"class", provider.ClassOf(err).String(), "code", provider.CodeOf(err))
	}
}
