package provider

import "context"

// Restorer is a capability of a Provider whose read model may go back to an earlier state, such as the
// one of Combine.
type Restorer interface {
	// Lost returns the ids, in order of position, of the events of a log that the read model has not
	// applied and that are recorded as parked, although they are not parked: they were applied, and the
	// read model has lost it. A unit with Restore applies them again.
	Lost(ctx context.Context, b Build) ([]string, error)

	// Shows reports whether readers see the tables of pairs under their other names.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)
}
