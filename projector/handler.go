package projector

import (
	"context"
	"errors"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// Handler is one handler. Make it with On or OnEmit.
type Handler[Tx any] struct {
	name  string
	was   []string
	match func(*eventstore.Types) []string
	run   func(ctx context.Context, tx Tx, t *eventstore.Types, r eventstore.Raw) ([]outbox.Message, error)
	emits bool
}

// Was declares earlier names of the handler. Markers under them count, and new ones are left under them too, so that
// old and new code may run side by side during a deployment. A name is one of the same projector ("created"), or of
// another ("old-ratings/created").
func (h Handler[Tx]) Was(names ...string) Handler[Tx] {
	h.was = append(slices.Clip(h.was), names...)
	return h
}

// On runs fn for each event of E; if E is an interface, for each registered type that implements it. The string names
// the handler, not the event: together with the projector's name ("product-ratings/posted") it is the handler's part
// of every marker, for ever; see Was.
//
// fn writes through the transaction that it is given, and only through it: everything else that it does may happen
// again. It may run again with its earlier writes undone. An error rolls the transaction back; see Class.
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

// OnEmit is On with output: the messages that fn returns go into the outbox of the same transaction. A message
// without an id gets one that is derived from the handler, the event and the message's index; one without a key gets
// the event's stream; and each names the event as its cause.
func OnEmit[Tx, E any](name string, fn func(context.Context, Tx, eventstore.Event[E]) ([]outbox.Message, error)) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	return Handler[Tx]{
		name: name, match: eventstore.Matching[E], emits: true,
		run: func(ctx context.Context, tx Tx, t *eventstore.Types, r eventstore.Raw) ([]outbox.Message, error) {
			e, err := eventstore.Decode[E](t, r)
			if err != nil {
				return nil, undecodable(err)
			}
			return fn(ctx, tx, e)
		},
	}
}

func undecodable(err error) error {
	code := codeUndecodable
	if errors.Is(err, eventstore.ErrUnregistered) {
		code = codeUnregistered
	}
	return &Error{Class: ClassPermanent, Code: code, Err: err}
}
