package projector

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
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

// Define declares a projector. The name identifies its read model, and is part of every marker, for ever.
//
// The handlers that take a message run in one transaction, in the order given: all of them apply it, or it is parked
// for all of them. A handler that must not hold up its neighbours belongs into a projector of its own.
func Define[Tx any](name string, types *eventstore.Types, opts Options, handlers ...Handler[Tx]) *Projector[Tx] {
	return &Projector[Tx]{name: name, types: types, opts: opts, handlers: handlers}
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,40}$`)

func checkName(what, name string) error {
	if !nameRE.MatchString(name) {
		return &eventstore.InvalidError{Field: fmt.Sprintf("%s %q", what, name), Reason: "want " + nameRE.String()}
	}
	return nil
}
