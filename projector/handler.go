package projector

import (
	"context"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
)

// Handler is one handler of a projector. On, OnEmit and OnBatch return it.
type Handler[Tx any] struct {
	name  string
	was   []string
	match func(*eventstore.Types) []string
	run   func(ctx context.Context, tx Tx, t *eventstore.Types, m *model.Message) ([]outbox.Message, error)
	batch func(ctx context.Context, tx Tx, events []any) error     // of OnBatch, instead of run
	take  func(t *eventstore.Types, m *model.Message) (any, error) // returns an event for batch
	emits bool
	setup bool // OnCreate or OnReset: it takes no events
}

// Was declares earlier names of the handler: of the same projector ("created"), or of another
// ("old-ratings/created"). A marker with an earlier name counts, and new markers are written with
// all names. So old and new versions of a program can run at the same time during a deployment.
func (h Handler[Tx]) Was(names ...string) Handler[Tx] {
	h.was = append(slices.Clip(h.was), names...)
	return h
}

// On returns a handler that calls fn for each event of type E or, if E is an interface, of each
// registered type that implements E.
//
// name identifies the handler, not the event. With the name of the projector
// ("product-ratings/posted") it is part of each marker: to rename a handler, see Was. It must
// match ^[a-z][a-z0-9_-]{0,40}$.
//
// fn must write only through its transaction. It may run again for the same event, after its
// earlier writes were rolled back; its other effects may then happen twice. An error rolls the
// transaction back; Class says what follows.
//
// To call another system, return a message (OnEmit), or add a task in the transaction
// (TasksIn(tx).Enqueue of the database): it takes place if the transaction commits. Never call it in
// fn: a call in a transaction that is rolled back has happened all the same, and happens again with
// the next try; a rebuild calls it for every event of the past; and while it takes long, a connection
// and the later messages wait.
//
// What fn appends (UpdateTx with InTx(tx) of the database), adds as a task, or publishes with its ctx
// inherits from the event: its id as the causation id, and its correlation id and traceparent.
// eventstore.WithMetadata in fn replaces these.
func On[Tx, E any](name string, fn func(context.Context, Tx, eventstore.Event[E]) error) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	h := OnEmit(name, func(ctx context.Context, tx Tx, e eventstore.Event[E]) ([]outbox.Message, error) {
		return nil, fn(ctx, tx, e)
	})
	h.emits = false
	return h
}

// OnEmit returns a handler with output: the messages that fn returns are added to the outbox in
// the same transaction.
//   - The ID of a message without one is derived from the handler, the event and the index of the
//     message.
//   - The Key of a message without one is the stream of the event.
//   - Each message has the id of the event as its causation id, and the event's correlation id and
//     traceparent, unless its Headers have these already.
func OnEmit[Tx, E any](
	name string, fn func(context.Context, Tx, eventstore.Event[E]) ([]outbox.Message, error),
) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	return Handler[Tx]{
		name: name, match: eventstore.Matching[E], emits: true,
		run: func(ctx context.Context, tx Tx, t *eventstore.Types, m *model.Message) ([]outbox.Message, error) {
			e, err := model.Decoded[E](t, m)
			if err != nil {
				return nil, model.Undecodable(err)
			}
			return fn(ctx, tx, e)
		},
	}
}

// OnBatch returns a handler that calls fn for several events at once, for statements that apply many
// rows. It is like On otherwise.
//   - events are those of a unit, at least one and at most RunnerConfig.Batch, in the order of the unit.
//     So a stream is in order. No other handler of the projector runs for a later event of a stream
//     before fn has run for the earlier ones. Between events of different streams, fn may run before or
//     after other handlers.
//   - If fn returns an error, the unit is rolled back, and fn runs again for fewer events, until only
//     the one that fails is left. That one is parked.
//   - RunnerConfig.Timeout is for one call of fn.
//   - The ctx of fn has no metadata of the events, which may have different causes.
//   - The store must undo a unit as a whole: NewRunner refuses Redis.
func OnBatch[Tx, E any](name string, fn func(ctx context.Context, tx Tx, events []eventstore.Event[E]) error) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	return Handler[Tx]{
		name: name, match: eventstore.Matching[E],
		take: func(t *eventstore.Types, m *model.Message) (any, error) {
			e, err := model.Decoded[E](t, m)
			return e, model.Undecodable(err)
		},
		batch: func(ctx context.Context, tx Tx, events []any) error {
			all := make([]eventstore.Event[E], len(events))
			for i, e := range events {
				all[i] = e.(eventstore.Event[E])
			}
			return fn(ctx, tx, all)
		},
	}
}
