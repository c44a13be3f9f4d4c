package provider

import (
	"context"
	"time"
)

// Liveness records which runners are alive, and which messages they have in flight. A crash of
// the database may lose these records; a crash of a runner does not. Each method is a separate
// transaction.
type Liveness interface {
	// Beat records that runner is alive until lease from now, on the store's clock. A lease of
	// zero records a clean end: the runner and its messages in flight are deleted. Other runners,
	// and their messages in flight, are deleted when their lease ended longer than record ago.
	Beat(ctx context.Context, runner string, lease, record time.Duration) (Health, error)

	// InFlight records the messages that w is about to run. They replace those of the call before.
	InFlight(ctx context.Context, b Build, w Worker, messages []string) error
}

// Worker identifies a worker of a runner.
type Worker struct {
	Runner string
	Number int
}

// Health is what Liveness.Beat returns, on the store's clock.
type Health struct {
	Now time.Time
	// Crashed is the end of the lease of the last runner that crashed, of the runners that are
	// still recorded; zero if there is none. That runner crashed before this time.
	Crashed time.Time
}
