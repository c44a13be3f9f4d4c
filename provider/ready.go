package provider

import (
	"context"
	"fmt"
)

// ReadyChecker is a capability of a provider. Relays and runners call it once, when they start.
type ReadyChecker interface {
	// ReadyFor returns an error for a problem that no retry can solve, such as a schema that is not
	// migrated, or a role without the rights of the service. If the database is only unreachable,
	// it returns nil.
	ReadyFor(ctx context.Context, s Service) error
}

// Service is a kind of service that uses a database. Each needs other rights.
type Service int

// The services.
const (
	AnyService    Service = iota // any: the rights of one of them are enough
	RelayService                 // outbox.Relay
	RunnerService                // projector.Runner
	WorkerService                // task.Worker
)

// NewerError is returned by Migrate and Ready of a provider, and so by relays and runners when they
// start: a newer program has migrated the database, and this one does not know its tables. Nothing
// was changed.
type NewerError struct {
	Database int64 // the version of the database's schema
	Program  int64 // the newest version that this program knows
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("the database's schema has version %d, and this program knows versions up to %d: "+
		"deploy the program that migrated the database, or a later one", e.Database, e.Program)
}
