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
	"github.com/kinora-go/kinora/provider"
)

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
