package provider

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Liveness records which runners are alive, and which messages they have in flight. A crash of the database may lose
// these records; a crash of a runner does not. Each method is a separate transaction.
type Liveness interface {
	// Beat records that runner is alive until lease from now, on the store's clock. A lease of zero records a clean
	// end. Runners, and their messages in flight, are deleted after that, or when their lease ended longer than
	// record ago.
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
	Now     time.Time
	Crashed time.Time // the latest end of a lease of the recorded runners that crashed, before it; zero: none
}

// Leases grants leases on names. At most one token has a name at a time, on the store's clock.
type Leases interface {
	// AcquireLease leases name to t.Token for t.Lease from now on. If the token has the lease
	// already, it is extended. It returns false if another token has a lease that has not ended. Leases on other names
	// that ended more than an hour ago, as those of processes that were killed, are deleted.
	// t is complete (claim.Terms.WithDefaults).
	AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error)

	// ReleaseLease ends the lease of a token. It changes nothing if the token does not have it.
	ReleaseLease(ctx context.Context, name string, token claim.Token) error

	// LeaseNames returns the names, in order of their bytes, that begin with prefix and that a token has
	// a lease on.
	LeaseNames(ctx context.Context, prefix string) ([]string, error)
}
