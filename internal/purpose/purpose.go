// Package purpose lets a relay and a runner say, to a provider whose roles have different rights,
// which of them asks whether it is ready.
package purpose

import "context"

// Purpose is the use of a store.
type Purpose string

const (
	Any    Purpose = ""       // an application's own question
	Relay  Purpose = "relay"  // outbox.Relay
	Runner Purpose = "runner" // projector.Runner
)

type key struct{}

// With returns a context that says that p asks.
func With(ctx context.Context, p Purpose) context.Context { return context.WithValue(ctx, key{}, p) }

// Of returns who asks.
func Of(ctx context.Context) Purpose {
	p, _ := ctx.Value(key{}).(Purpose)
	return p
}
