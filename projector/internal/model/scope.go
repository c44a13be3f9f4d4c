package model

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
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
