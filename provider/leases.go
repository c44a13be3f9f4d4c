package provider

import (
	"context"

	"github.com/kinora-go/kinora/claim"
)

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
