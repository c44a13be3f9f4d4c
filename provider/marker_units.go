package provider

import (
	"context"
	"time"
)

// MarkerUnits are Units of a store that keeps markers and checkpoints next to the read model, and
// nothing else, such as Redis. Keeps().Markers must be true. Combine adds a second store.
//
// Parked messages are in the second store. Next to the read model is a record of each of them (Asides), so that
// one is applied once although the two stores commit one after the other:
//   - A message is parked in the second store first, and then recorded.
//   - The writes of a parked message and the end of its record are one commit. If the second store is not changed
//     after it, the message comes again, has a marker and no record, and is not applied.
type MarkerUnits[Tx any] interface {
	Units[Tx]
	Progress

	// DoCombined is Do for a unit whose parked messages, output and generations are in a second store. Unit.Switch has
	// no Last, and Set is not stored. It calls run once or several times, and commits what run has written.
	//   - Unit.Advance moves the checkpoint up to the first parked message.
	//   - commit, if not nil, must be called after the second store has committed: it records the
	//     parked messages, and moves the checkpoint to Advance.To.
	//   - Unit.Switch shows tables before the second store commits. If that does not commit, the reader
	//     of the live generation notices (Shows), and shows its own.
	DoCombined(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) (commit func(context.Context) error, err error)

	// Outcomes returns the outcomes of questions whose Generation is not zero, by markers, records and
	// checkpoints. A recorded message is OutcomeWaiting.
	Outcomes(ctx context.Context, questions []Question) ([]Outcome, error)

	// Asides returns the recorded messages of a generation: their ids, and positions or 0.
	Asides(ctx context.Context, b Build) (map[string]int64, error)

	// Forget deletes the records of messages that were skipped. Their markers stay.
	Forget(ctx context.Context, b Build, ids []string) error

	// Prune, Unlogged and ClearGeneration are those of Records and Builds, for markers, records and tables.
	Prune(ctx context.Context, b Build, handlers []string, window time.Duration, limit int) (int, error)
	Unlogged(ctx context.Context, b Build, handlers []string) (bool, error)
	ClearGeneration(ctx context.Context, b Build, handlers, tables []string, limit int) (int, error)

	// SetState changes the checkpoint as Builds.SetGeneration does for the State of g.
	SetState(ctx context.Context, g Generation) error

	// Shows is that of Restorer.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)

	// Differing returns the keys of rows that differ, at most 100,000, while units may change them. A comparison
	// during a switch then looks only at these.
	Differing(ctx context.Context, c Comparison) ([]Difference, error)
}

// Restorer is a capability of a Provider whose read model may go back to an earlier state, as that of Combine.
type Restorer interface {
	// Lost returns the ids, in order of position, of the events that are recorded as parked, although they are neither
	// parked nor applied: the read model has lost them. A unit with Restore applies them again.
	Lost(ctx context.Context, b Build) ([]string, error)

	// DropAhead deletes parked messages that are applied again, in their place among the events that were lost: the
	// first messages of each lane, as far as they are behind the position and the read model has no record of
	// them. In a lane of lost, which are those of Lost events, it deletes all. The log, or Lost, brings them again.
	DropAhead(ctx context.Context, b Build, position int64, lost map[Lane]bool) error

	// CanReplay reports whether parked messages can be applied now: the read model has not gone back, or
	// Lost events are applied again.
	CanReplay(ctx context.Context, b Build) (bool, error)

	// Shows reports whether readers see the tables of pairs under their other names.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)
}
