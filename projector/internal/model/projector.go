package model

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/google/uuid"
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
	Has     []string // of what messages may need (provider.Parked.Needs), sorted
	Do      Do
	// Announced is called once a runner has announced the handlers.
	Announced func()
}

// Complete sets what follows from the other fields.
func (p *Projector) Complete() { p.Has = p.has() }

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
	Removed     []string             // handlers that an earlier program had, by their full names
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
// names. ok is false if this program does not have a handler of names, unless it was removed.
func (p *Projector) HandlersFor(eventType string, names []string) (found []provider.Handler, ok bool) {
	all := p.ByType[eventType]
	if len(names) == 0 {
		return all, true
	}
	missing := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(p.Rules.Removed, name) })
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

// Scope is what the context of a handler says of its generation.
type Scope struct {
	Suffix   string // of the tables
	Replayed bool   // another generation has applied the event
	// Long, if not nil, gets a name that is too long for a suffix.
	Long *atomic.Pointer[string]
}

type scopeKey struct{}

// ScopeOf returns the scope of a handler's context.
func ScopeOf(ctx context.Context) Scope {
	s, _ := ctx.Value(scopeKey{}).(Scope)
	return s
}

// WithScope returns a context with a scope, unless that is zero.
func WithScope(ctx context.Context, s Scope) context.Context {
	if s == (Scope{}) {
		return ctx
	}
	return context.WithValue(ctx, scopeKey{}, s)
}

// maxSuffixed is the length limit of a name that gets a suffix. It has room for 999,999 generations, "_g999999".
const maxSuffixed = provider.MaxTableBytes - 8

// CheckSuffixed returns an error for names that would be too long with a suffix: PostgreSQL cuts them, so that two generations
// would have one name.
func CheckSuffixed(names ...string) error {
	for _, name := range names {
		if n := len(name[strings.LastIndex(name, ".")+1:]); n > maxSuffixed {
			return fmt.Errorf("%w: %w", provider.ErrInput, &eventstore.InvalidError{Field: fmt.Sprintf("table or index %q", name),
				Reason: fmt.Sprintf("%d bytes: at most %d are allowed, because the number of a generation is added (_g1 to _g999999)", n, maxSuffixed)})
		}
	}
	return nil
}

// outputs is the UUID namespace of the ids of handlers' output.
var outputs = uuid.MustParse("8f0e0f6c-0f57-5a5e-9c53-2d7e0a4b9a11")

// Completed returns the output of a handler with stable ids, the key of the event, and the event
// as the cause. Values of the event that are not valid keys or headers are left out. out is not
// changed, since it belongs to the handler.
func Completed(out []outbox.Message, handler string, cause eventstore.Raw) []outbox.Message {
	out = slices.Clone(out)
	for i := range out {
		m := &out[i]
		if m.ID == "" {
			m.ID = uuid.NewSHA1(outputs, []byte(handler+"\x00"+cause.ID+"\x00"+strconv.Itoa(i))).String()
		}
		if m.Key == "" && provider.CheckText("key", cause.Stream, provider.MaxIDBytes) == nil {
			m.Key = cause.Stream
		}
		*m = m.Inherit(caused(eventstore.Metadata{}, cause))
	}
	return out
}

// caused returns metadata whose cause is an event: the event's id, correlation id and traceparent
// replace those of m.
func caused(m eventstore.Metadata, by eventstore.Raw) eventstore.Metadata {
	is := provider.Inherited(eventstore.Metadata{
		CorrelationID: cmp.Or(by.Metadata.CorrelationID, m.CorrelationID), CausationID: by.ID, Traceparent: cmp.Or(by.Metadata.Traceparent, m.Traceparent),
	})
	m.CorrelationID, m.CausationID, m.Traceparent = is.CorrelationID, is.CausationID, is.Traceparent
	return m
}

// WithCause returns a context with which events, messages and tasks inherit from the event.
func WithCause(ctx context.Context, by eventstore.Raw) context.Context {
	return eventstore.WithMetadata(ctx, caused(eventstore.MetadataFrom(ctx), by))
}
