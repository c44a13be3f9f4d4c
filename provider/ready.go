package provider

import "context"

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
