package projector

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Projector is the definition of a projector. Declare it at package level with Define, which
// cannot fail: NewRunner returns the errors of a definition.
type Projector[Tx any] struct {
	name     string
	types    *eventstore.Types
	opts     Options
	handlers []Handler[Tx]
	unmarked atomic.Bool // the store of a runner in this process keeps no markers
	logged   atomic.Bool // a runner in this process reads a log for it
}

// Name returns the projector's name.
func (p *Projector[Tx]) Name() string { return p.name }

// Types returns the table of types that p was defined with.
func (p *Projector[Tx]) Types() *eventstore.Types { return p.types }

// Options returns the options that p was defined with.
func (p *Projector[Tx]) Options() Options { return p.opts }

// Takes returns the stored names of the event types that p has handlers for, sorted. It includes earlier
// names.
func (p *Projector[Tx]) Takes() []string { return slices.Sorted(maps.Keys(p.takers())) }

// Handlers returns the full names of the handlers, such as "product-ratings/posted", including
// earlier names: all names in the markers of p. marker.Prune and marker.Orphans take them.
func (p *Projector[Tx]) Handlers() []string {
	var names []string
	for _, h := range p.handlers {
		if full := p.full(h); !h.setup {
			names = append(names, full.Names()...)
		}
	}
	return names
}

func (p *Projector[Tx]) takers() map[string][]provider.Handler {
	byType := map[string][]provider.Handler{}
	for _, h := range p.handlers {
		if h.setup {
			continue
		}
		for _, eventType := range h.match(p.types) {
			byType[eventType] = append(byType[eventType], p.full(h))
		}
	}
	return byType
}

// hasSetup reports whether p has a handler of OnCreate or OnReset.
func (p *Projector[Tx]) hasSetup(name string) bool {
	return slices.ContainsFunc(p.handlers, func(h Handler[Tx]) bool { return h.setup && h.name == name })
}

// full returns a handler with its full names, as markers have them.
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

func (p *Projector[Tx]) check(keeps provider.Keeps) error {
	errs := []error{p.types.Err()}
	if p.opts.Parking < ParkKey || p.opts.Parking > Halt {
		errs = append(errs, fmt.Errorf("options.Parking is %d: use a constant of its type", p.opts.Parking))
	}
	if err := provider.CheckFrom(p.opts.From); err != nil {
		errs = append(errs, fmt.Errorf("options.From: %w", err))
	}
	if len(p.Handlers()) == 0 {
		errs = append(errs, errors.New("there are no handlers: give at least one"))
	}
	errs = append(errs, p.checkRebuild(keeps))
	seen := map[string]bool{}
	for _, h := range p.handlers {
		if h.setup {
			if seen[h.name] || h.run == nil {
				errs = append(errs, fmt.Errorf("handler %q: give one function that is not nil", h.name))
			}
			seen[h.name] = true
			continue
		}
		errs = append(errs, p.checkHandler(h, seen, keeps))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("projector %s: %w", p.name, err)
	}
	return nil
}

// checkHandler returns all errors of a handler. seen are the names of those before it.
func (p *Projector[Tx]) checkHandler(h Handler[Tx], seen map[string]bool, keeps provider.Keeps) error {
	var errs []error
	full := p.full(h)
	for _, name := range full.Names() {
		if seen[name] {
			errs = append(errs, fmt.Errorf("handler name %q is used twice: use each name once", name))
		}
		seen[name] = true
		owner, short, _ := strings.Cut(name, "/")
		errs = append(errs, checkName("projector", owner), checkName("handler", short))
	}
	switch {
	case h.run == nil && h.batch == nil:
		errs = append(errs, fmt.Errorf("handler %q: create it with On, OnEmit or OnBatch, and a function that is not nil", h.name))
	case p.types.Err() == nil && len(h.match(p.types)) == 0:
		errs = append(errs, fmt.Errorf("handler %q: no registered event type matches its event: register the type", h.name))
	case h.batch != nil && !keeps.Atomic:
		errs = append(errs, fmt.Errorf("handler %q: OnBatch requires a store that undoes a unit as a whole", h.name))
	case h.emits && !keeps.Output:
		errs = append(errs, fmt.Errorf("handler %q: OnEmit requires a store with an outbox", h.name))
	}
	return errors.Join(errs...)
}

// Define returns a projector. Its name is part of each marker, so do not change it. It must match
// ^[a-z][a-z0-9_-]{0,40}$.
//
// All handlers of a message run in one transaction, in the given order: all of them apply the
// message, or it is parked for all of them. Put a handler that must not delay others into another
// projector.
func Define[Tx any](name string, types *eventstore.Types, opts Options, handlers ...Handler[Tx]) *Projector[Tx] {
	return &Projector[Tx]{name: name, types: types, opts: opts, handlers: handlers}
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,40}$`)

func checkName(what, name string) error {
	if !nameRE.MatchString(name) {
		return &eventstore.InvalidError{Field: fmt.Sprintf("%s %q", what, name), Reason: "must match " + nameRE.String()}
	}
	return nil
}
