package model

import (
	"context"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
)

// Projector is a projector in a runner, without its type parameter. It does not change.
type Projector struct {
	Name    string
	Version int
	Types   *eventstore.Types
	ByType  map[string][]provider.Handler
	Batches map[string]Take // the handlers of OnBatch, by name
	Rules   Rules
	Tables  []string // Options.Tables
	Keeps   provider.Keeps
	Marks   bool     // it writes markers
	Marked  []string // all handler names in its markers
	Emits   bool     // one of its handlers has output
	Creates bool     // it has OnCreate
	Resets  bool     // it has OnReset
	Logged  bool     // a reader of the log applies its events
	Do      Do
}

// Rules are the other options of a projector, and those of its runner that concern its messages.
type Rules struct {
	From        eventstore.From
	Markers     bool
	BrokerOnly  bool
	Ordered     bool
	Alone       bool // ParkMessage: a lane is one message
	Halts       bool // a stuck message ends the runner
	SkipUnknown bool
	Segments    int
	OnChange    generation.How
	Categories  []string             // whose events of unregistered types are read too
	Filter      eventstore.LogFilter // of the log; empty with Categories: see Taken
	Decodes     bool                 // the runner has a decoder for messages of other software
	OnlyLog     bool                 // the runner reads only the log: the checkpoint stays in ModeCatchUp
}

// Take decodes the event of a message for a handler of OnBatch.
type Take func(*eventstore.Types, *Message) (any, error)

// Call runs a handler, by its name, in the transaction of a unit: for a message, or for the events of a
// handler of OnBatch.
type Call func(ctx context.Context, handler string, m *Message, events []any) ([]outbox.Message, error)

// Do opens a unit, calls body in its transaction, and commits.
type Do func(ctx context.Context, u provider.Unit, body Body) error

// Body is what happens in a unit.
type Body func(context.Context, Call, provider.Found) (provider.Closing, error)

// Names of the handlers that take no events. They have a space, so no other handler has them.
const (
	Created = "on create"
	Reset   = "on reset"
)

// HandlersFor returns the handlers of an event type: all, or those with one of names if there are
// names. ok is false if this program does not have a handler of names.
func (p *Projector) HandlersFor(eventType string, names []string) (found []provider.Handler, ok bool) {
	all, missing := p.ByType[eventType], slices.Clone(names)
	if len(names) == 0 {
		return all, true
	}
	for _, h := range all {
		before := len(missing)
		missing = slices.DeleteFunc(missing, func(name string) bool { return slices.Contains(h.Names(), name) })
		if len(missing) < before {
			found = append(found, h)
		}
	}
	return found, len(missing) == 0
}

// TablesOf returns the tables of a generation, given the suffix of their names.
func (p *Projector) TablesOf(suffix string) (names []string) {
	for _, name := range p.Tables {
		names = append(names, name+suffix)
	}
	return names
}

// ViewsOf returns the views that show the tables of a generation.
func (p *Projector) ViewsOf(suffix string) (pairs []provider.TablePair) {
	for _, name := range p.Tables {
		pairs = append(pairs, provider.TablePair{Table: name + suffix, Other: name})
	}
	return pairs
}

// HandlersOf returns all names in the markers of a generation, as far as they are known.
func (p *Projector) HandlersOf(g *generation.Row) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(g.Handlers, p.Marked))))
}
