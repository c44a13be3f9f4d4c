package provider

import (
	"context"
	"time"
)

// Parking stores parked messages, as one queue per lane. Each method is a separate transaction.
type Parking interface {
	// Due returns the first messages of due lanes, by build and lane, the lanes in order of
	// the time when they became due. Of each lane it returns one message, or up to f.Each if
	// these are ClassHeld. A lane whose first message is stuck is never due.
	Due(ctx context.Context, f DueFilter) ([]Parked, error)

	// Try counts an attempt at p, which Due has returned, and makes its lane due only after again
	// has passed. So no other runner tries it until then, and the attempt counts even if the
	// process ends.
	//   - It returns false if p has changed since, its lane is not due, or another unit has its
	//     lane.
	//   - If p has limit attempts already, it returns false and p is stuck. A negative limit
	//     means no limit.
	Try(ctx context.Context, p Parked, limit int, again time.Duration) (bool, error)

	// Parked returns the messages that f selects in order of Seq. DueAt is that of the lane.
	Parked(ctx context.Context, f ParkedFilter) ([]Parked, error)

	// Decide changes the waiting and stuck messages that f selects, and returns their number.
	// With StateWaiting they are due now and their attempts are reset. With StateSkipped they are
	// skipped, and the messages behind them are due. d is stored with them unless it is zero.
	//   - ErrInput: to is another state, or d is neither zero nor valid (CheckDecision). Nothing
	//     is changed.
	Decide(ctx context.Context, f ParkedFilter, to ParkedState, d Decision) (int, error)
}
