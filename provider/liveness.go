package provider

import (
	"context"
	"time"
)

// Liveness knows which runners are alive, and what careful workers are about to run. What it knows may be lost in a
// crash of the database, and never in one of a runner. Each method is a transaction of its own.
type Liveness interface {
	// Beat says that runner is alive until lease from now, on the store's clock. A lease of zero says that it ended
	// well: its names are deleted, and it is forgotten. Other runners are forgotten, with their names, when their
	// lease ended longer than record ago.
	Beat(ctx context.Context, runner string, lease, record time.Duration) (Health, error)

	// Name says which messages w is about to run, in place of those that it named before.
	InFlight(ctx context.Context, projector string, w Worker, messages []string) error
}

// Worker identifies a worker of a runner.
type Worker struct {
	Runner string
	Number int
}

// Health is what Liveness.Beat returns, on the store's clock.
type Health struct {
	Now time.Time
	// Crashed is when the lease of the last runner ended that did not end well, of those not forgotten yet; zero if
	// there is none. That runner ended before it.
	Crashed time.Time
}
