package provider

import "context"

// Restorer is a capability of a Provider whose read model may go back to an earlier state, such as the
// one of Combine.
type Restorer interface {
	// Lost returns the ids, in order of position, of the events of a log that the read model has not
	// applied and that are recorded as parked, although they are not parked: they were applied, and the
	// read model has lost it. A unit with Restore applies them again.
	Lost(ctx context.Context, b Build) ([]string, error)

	// DropAhead deletes parked messages that are applied again, in their place among the events that were
	// lost. These are the first messages of each lane, as far as they are behind the position and the read
	// model has no record of them: the log brings them again. In a lane of lost, which are those of Lost
	// events, they are all: Lost returns them too then, or the log brings them.
	DropAhead(ctx context.Context, b Build, position int64, lost map[Lane]bool) error

	// CanReplay reports whether parked messages can be applied now: the read model has not gone back, or
	// Lost events are applied again.
	CanReplay(ctx context.Context, b Build) (bool, error)

	// Shows reports whether readers see the tables of pairs under their other names.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)
}
