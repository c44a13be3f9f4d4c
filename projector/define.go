package projector

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Options configure a projector; the zero value is the default.
type Options struct {
	// Markers makes each handler's effect happen once for each message (an idempotent projector), by a marker in the
	// transaction of the effect. Without it nothing is written or read for that, and a redelivered message takes
	// effect again.
	Markers bool
	// Parking says what happens to the messages behind one that is parked.
	Parking Parking
	// Unknown says what happens to a message of an unregistered type. Messages of a registered type that no handler
	// takes are skipped.
	Unknown Unknown
}

// Parking says what happens to the messages behind one that cannot be applied.
type Parking int

const (
	// ParkKey: later messages of its key are parked behind it, and applied in order once it is applied or skipped.
	// It holds for all handlers of the projector. A message without a key holds back nothing.
	ParkKey Parking = iota
	// ParkMessage: it is parked alone. Then no order is promised for its key.
	ParkMessage
	// Halt: as ParkKey; and once a message is stuck, the runner ends with ErrHalted, and does not start until the
	// message is replayed or skipped. That stops all projectors of the runner: give this one a runner of its own.
	Halt
)

// Unknown says what happens to a message of an unregistered type.
type Unknown int

const (
	ParkUnknown Unknown = iota // it is parked, as a producer may be deployed first, and applied once a runner knows the type
	SkipUnknown                // it is acked and forgotten
)

// Projector is a definition: data, declared at package level. Making one cannot fail; NewRunner reports what is
// wrong with it.
type Projector[Tx any] struct {
	name     string
	types    *eventstore.Types
	opts     Options
	handlers []Handler[Tx]
	unmarked atomic.Bool // a runner of this process cannot keep its markers
}

// Define declares a projector. The name identifies its read model, and is part of every marker, for ever.
//
// The handlers that take a message run in one transaction, in the order given: all of them apply it, or it is parked
// for all of them. A handler that must not hold up its neighbours belongs into a projector of its own.
func Define[Tx any](name string, types *eventstore.Types, opts Options, handlers ...Handler[Tx]) *Projector[Tx] {
	return &Projector[Tx]{name: name, types: types, opts: opts, handlers: handlers}
}

// Name returns the projector's name.
func (p *Projector[Tx]) Name() string { return p.name }

// Handlers returns the full names of its handlers, earlier names included: all names in its markers.
func (p *Projector[Tx]) Handlers() []string {
	var names []string
	for _, h := range p.handlers {
		full := p.full(h)
		names = append(names, full.Names()...)
	}
	return names
}

// takers are the handlers that take each event type, in order.
func (p *Projector[Tx]) takers() map[string][]provider.Handler {
	byType := map[string][]provider.Handler{}
	for _, h := range p.handlers {
		for _, eventType := range h.match(p.types) {
			byType[eventType] = append(byType[eventType], p.full(h))
		}
	}
	return byType
}

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

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,40}$`)

func checkName(what, name string) error {
	if !nameRE.MatchString(name) {
		return &eventstore.InvalidError{Field: fmt.Sprintf("%s %q", what, name), Reason: "want " + nameRE.String()}
	}
	return nil
}

// full returns the names that a handler has in markers.
func (p *Projector[Tx]) full(h Handler[Tx]) provider.Handler {
	all := provider.Handler{Name: p.name + "/" + h.name}
	for _, was := range h.was {
		if !strings.Contains(was, "/") {
			was = p.name + "/" + was
		}
		all.Was = append(all.Was, was)
	}
	return all
}

// check returns everything that is wrong with the definition.
func (p *Projector[Tx]) check(keeps provider.Keeps) error {
	errs := []error{p.types.Err()}
	if p.opts.Parking < ParkKey || p.opts.Parking > Halt || p.opts.Unknown < ParkUnknown || p.opts.Unknown > SkipUnknown {
		errs = append(errs, fmt.Errorf("parking %d, unknown %d: no such option", p.opts.Parking, p.opts.Unknown))
	}
	if len(p.handlers) == 0 {
		errs = append(errs, errors.New("no handlers"))
	}
	seen := map[string]bool{}
	for _, h := range p.handlers {
		full := p.full(h)
		for _, name := range full.Names() {
			if seen[name] {
				errs = append(errs, fmt.Errorf("handler name %q is used twice", name))
			}
			seen[name] = true
			owner, short, _ := strings.Cut(name, "/")
			errs = append(errs, checkName("projector", owner), checkName("handler", short))
		}
		switch {
		case h.run == nil:
			errs = append(errs, fmt.Errorf("handler %q: make it with On or OnEmit, and a function", h.name))
		case p.types.Err() == nil && len(h.match(p.types)) == 0:
			errs = append(errs, fmt.Errorf("handler %q: it takes none of the registered event types", h.name))
		case h.emits && !keeps.Output:
			errs = append(errs, fmt.Errorf("handler %q: OnEmit needs a provider with an outbox", h.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("projector %s: %w", p.name, err)
	}
	return nil
}
