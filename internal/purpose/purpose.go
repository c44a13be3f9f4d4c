// Package purpose tells a provider whose roles have different rights whether a relay or a runner
// calls Ready.
package purpose

import "context"

// Purpose is the use of a store.
type Purpose string

const (
	Any    Purpose = ""       // a call by the application
	Relay  Purpose = "relay"  // outbox.Relay
	Runner Purpose = "runner" // projector.Runner
)

type key struct{}

// With returns a context for calls by p.
func With(ctx context.Context, p Purpose) context.Context { return context.WithValue(ctx, key{}, p) }

// Of returns the purpose of ctx.
func Of(ctx context.Context) Purpose {
	p, _ := ctx.Value(key{}).(Purpose)
	return p
}
