package provider

import "context"

// Diagnoser is a capability of a provider: the checks that depend on its server. They need no
// migrated tables.
type Diagnoser interface {
	// Diagnose returns what is wrong with the server, the roles and the way to it, in any order. It
	// changes nothing.
	Diagnose(ctx context.Context, l DiagnosisLimits) ([]Finding, error)
}
