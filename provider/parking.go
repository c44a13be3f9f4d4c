package provider

import (
	"context"
	"time"
)

// Parking keeps messages that were set aside, as a queue for each lane. Each method is a transaction of its own.
type Parking interface {
	// Due lists the first messages of lanes whose time has come, by projector, lane by lane, the lanes in order of
	// their time: of each lane a single message, or up to f.Each if these are ClassHeld. A lane with a stuck message at
	// its front is never due.
	Due(ctx context.Context, f DueFilter) ([]Parked, error)

	// Try counts an attempt at p, which Due has listed, and puts its lane off: nobody else tries it for again, and
	// the attempt counts even if its process ends.
	//   - It is false if p is not as it was listed, its lane is not due, or another unit has its lane.
	//   - It is false, and p is stuck, if p has limit attempts already; a negative limit is none.
	Try(ctx context.Context, p Parked, limit int, again time.Duration) (bool, error)

	// Parked lists what f selects in order of Seq. DueAt is that of the lane.
	Parked(ctx context.Context, f ParkedFilter) ([]Parked, error)

	// Decide makes what f selects, of the messages that are waiting or stuck, due now with no attempts counted
	// (StateWaiting), or skips it (StateSkipped), and returns how many. It keeps d with them unless d is zero.
	//   - What waits behind a skipped message is due.
	//   - Any other state is ErrInput; so is a d that is not zero and that Validate refuses. Nothing is changed then.
	Decide(ctx context.Context, f ParkedFilter, to ParkedState, d Decision) (int, error)
}
