package projector

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// Options tell how a projector is run; the zero value is the default.
type Options struct {
	// Markers makes every handler's effect happen once for each message, by a marker in the effect's own
	// transaction. Off, nothing is written or read for it, and a redelivered message takes effect again.
	Markers bool
	// Parking says what becomes of the messages behind one that is parked.
	Parking Parking
	// Unknown says what a message of an unregistered type meets. Types that are registered and have no
	// handler are skipped.
	Unknown Unknown
}

// Parking is what becomes of the messages behind one that cannot be handled.
type Parking int

const (
	// ParkKey: later messages of its key are parked behind it, in order, and come back in order by themselves once it is
	// replayed or skipped. A handler that has applied the message itself goes on with its key; so, where several handlers take
	// the same type, one that is poisoned does not stop the others. A message without a key holds up nothing.
	ParkKey Parking = iota
	// ParkMessage: it is parked alone. No order is promised then for its key.
	ParkMessage
	// Halt: it is parked, not acked, and the runner ends with ErrHalted; it does not start again before the message is replayed or
	// skipped; then it comes again. That stops all projectors of the runner: give one that halts a runner of its own. It wants
	// Options.Markers.
	Halt
)

// Unknown is what a message of an unregistered type meets.
type Unknown int

const (
	ParkUnknown Unknown = iota // it is parked: a producer may have been deployed first. It comes back by itself once a runner knows the type
	SkipUnknown                // it is acked and forgotten
)

// Projector is a definition: data, to be declared at package level. Making one cannot fail; NewRunner
// reports what is wrong with it.
type Projector[Tx any] struct {
	name     string
	types    *eventstore.Types
	opts     Options
	handlers []Handler[Tx]
}

// Define declares a projector: name stands for its read model and is part of every marker, for ever.
func Define[Tx any](name string, types *eventstore.Types, opts Options, handlers ...Handler[Tx]) *Projector[Tx] {
	return &Projector[Tx]{name: name, types: types, opts: opts, handlers: handlers}
}

// Name is the projector's name.
func (p *Projector[Tx]) Name() string { return p.name }

// Handlers are the full names of its handlers, and those that they had before: all under which it leaves markers.
func (p *Projector[Tx]) Handlers() []string {
	var names []string
	for _, h := range p.handlers {
		names = append(append(names, p.full(h.name)), p.fulls(h.was)...)
	}
	return names
}

// Handler is one handler. Make it with On or OnEmit.
type Handler[Tx any] struct {
	name  string
	was   []string
	match func(*eventstore.Types) []string
	run   func(ctx context.Context, tx Tx, t *eventstore.Types, r eventstore.Raw) ([]outbox.Message, error)
	emits bool
}

// Was declares earlier names of the handler: markers under them still count, and new ones are left under them
// too, so that instances of the old code and of the new one may run side by side while they are replaced. A name is one of the same
// projector ("created"), or of another ("old-ratings/created").
func (h Handler[Tx]) Was(names ...string) Handler[Tx] {
	h.was = append(slices.Clip(h.was), names...)
	return h
}

// On runs fn for each event of E; where E is an interface, for each registered type that implements it.
// The string names the handler, not the event: with the projector's name ("product-ratings/posted") it is
// the handler's part of every marker, for ever; see Was.
//
// fn writes through the transaction it is given, and only through it: everything else it does may happen
// again. It may run again with its earlier writes undone. An error rolls back; see Class.
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

// OnEmit is On with output: the messages that fn returns go into the outbox of the same transaction. Each gets
// an id derived from the handler, the event and its place, unless it has one; the event's stream as its key,
// unless it has one; and the event as its cause.
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

// unregistered is the code of a message whose type, or whose version of it, is not known yet.
const unregistered = "unregistered"

func undecodable(err error) error {
	code := "undecodable"
	if errors.Is(err, eventstore.ErrUnregistered) {
		code = unregistered
	}
	return &Error{Class: PermanentClass, Code: code, Err: err}
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,40}$`)

func checkName(what, name string) error {
	if !nameRE.MatchString(name) {
		return &eventstore.InvalidError{Field: fmt.Sprintf("%s %q", what, name), Reason: "want " + nameRE.String()}
	}
	return nil
}

// full is the name under which a handler of this projector keeps its markers.
func (p *Projector[Tx]) full(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return p.name + "/" + name
}

// fulls is the handler's earlier names in full.
func (p *Projector[Tx]) fulls(names []string) []string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = p.full(n)
	}
	return out
}

// check reports everything that is wrong with the definition.
func (p *Projector[Tx]) check(records Records) error {
	errs := []error{checkName("projector", p.name), p.types.Err()}
	if p.opts.Parking < ParkKey || p.opts.Parking > Halt || p.opts.Unknown < ParkUnknown || p.opts.Unknown > SkipUnknown {
		errs = append(errs, fmt.Errorf("parking %d, unknown %d: no such option", p.opts.Parking, p.opts.Unknown))
	}
	if len(p.handlers) == 0 {
		errs = append(errs, errors.New("no handlers"))
	}
	seen := map[string]bool{}
	for _, h := range p.handlers {
		errs = append(errs, checkName("handler", h.name))
		for i, n := range append([]string{h.name}, h.was...) {
			if seen[p.full(n)] {
				errs = append(errs, fmt.Errorf("handler name %q is used twice", n))
			}
			seen[p.full(n)] = true
			if owner, short, ok := strings.Cut(n, "/"); ok && i > 0 {
				errs = append(errs, checkName("earlier projector", owner), checkName("earlier handler", short))
			} else if i > 0 {
				errs = append(errs, checkName("earlier handler", n))
			}
		}
		switch {
		case h.run == nil:
			errs = append(errs, fmt.Errorf("handler %q: make it with On or OnEmit, and a function", h.name))
		case p.types.Err() == nil && len(h.match(p.types)) == 0:
			errs = append(errs, fmt.Errorf("handler %q: no registered event type is one that it takes", h.name))
		case h.emits && !records.Outbox:
			errs = append(errs, fmt.Errorf("handler %q: OnEmit needs a provider with an outbox", h.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("projector %s: %w", p.name, err)
	}
	return nil
}
