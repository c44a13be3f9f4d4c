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
	name      string
	types     *eventstore.Types
	opts      Options
	handlers  []Handler[Tx]
	unmarked  atomic.Bool // the store of a runner in this process keeps no markers
	logged    atomic.Bool // a runner in this process reads a log for it
	announced atomic.Bool // and has said which handlers it has
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
	for _, name := range p.opts.Removed {
		if err := checkName("options.Removed", name); err != nil {
			errs = append(errs, err)
		}
	}
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
		if slices.Contains(p.removed(), name) {
			errs = append(errs, fmt.Errorf("handler %q is also in options.Removed: remove it there", name))
		}
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

// Options configure a projector. The zero value is the default.
type Options struct {
	// Markers makes each handler apply each message once (deduplication), by a marker in the
	// transaction of the handler. Without markers a redelivered message takes effect again, and
	// nothing is written or read for it.
	Markers bool
	// RepeatSafe: the handlers may run again for a message that they have applied, for example because
	// they only replace values. Without Markers and without RepeatSafe, a runner that subscribes to a
	// broker warns once that redelivered messages take effect again.
	RepeatSafe bool
	// From is where a new projector begins to read the log. Zero means at the first event. It has
	// no effect once the projector has a checkpoint.
	From eventstore.From
	// BrokerOnly: events that the broker does not deliver are not read from the log. Without it, a
	// projector with Markers applies every event of its handlers that is in the log
	// (RunnerConfig.Log), whatever the topics of the subscription, and a new one begins at From.
	BrokerOnly bool
	// Ordered: a delivery brings the earlier events of its stream that are not applied yet, from
	// the log. Without it, an event that the broker lost is applied behind later ones of its
	// stream. It requires Markers and a log.
	Ordered bool
	// Segments is into how many segments the projector is split, if a runner reads it FromLog: shares of
	// the streams, at most 256. Runners with Segments in any number of processes each read a part of
	// them. Events of one stream stay in order; those of different streams are applied at the same time. The
	// number can be changed with any deployment: that of the runner that moves the checkpoint counts. A
	// runner without Segments reads none of them. Zero and 1 mean one reader.
	Segments int
	// Version is that of the handlers. Raise it when they write other rows than before. Runners with
	// different Versions feed different generations of the read model, if the newer one has
	// RebuildOnChange. Zero means 1.
	Version int
	// RebuildOnChange says how a runner rebuilds the read model if Version is higher than that of the
	// live one.
	RebuildOnChange RebuildHow
	// Removed are the names of handlers that an earlier program had and that were removed on purpose. Without it, a program
	// that lacks a handler is taken for an older one: it parks the events of the handler, and those behind them in their
	// streams, for a program that has it. List the names in its Was too: messages may be parked under them. The names may be left
	// out once no old program runs and nothing is parked for the handler.
	Removed []string
	// Tables are the names of the read model's tables, without a suffix (see Table), and with the
	// schema unless that is the default one: "reports.ratings". They are emptied before a rebuild in
	// place, unless there is OnReset. OnCreate creates them. They may refer to each other by foreign keys, in any
	// order of the list. A name has at most 63 bytes without its schema, with OnCreate 55: see Table.
	Tables []string
	// Parking is what happens to the messages behind a parked one.
	Parking Parking
	// SkipUnknown acks a message of an unregistered type, and stores nothing. Otherwise it is parked, and
	// waits without attempts for a program that has the type, so a producer may be deployed first. A message
	// of a registered type without a handler is always skipped.
	SkipUnknown bool
}

// Parking is what happens to the messages behind one that cannot be applied.
type Parking int

const (
	// ParkKey: later messages of its key are parked behind it, and applied in order after it is
	// applied or skipped. This holds for all handlers of the projector. A message without a key
	// holds back no other.
	ParkKey Parking = iota
	// ParkMessage: only the message itself is parked. Then the order in its key is not guaranteed.
	ParkMessage
	// Halt: like ParkKey. In addition, once a message is stuck, or this program is unable to apply it, the runner ends
	// with ErrHalted. None starts until it is replayed or skipped, or another program has applied it. This stops all projectors of
	// the runner: use a separate runner for this one.
	Halt
)
