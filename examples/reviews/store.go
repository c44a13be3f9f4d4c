package main

import (
	"context"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// store is a database of any kind: Kinora's contracts and the ratings. Only the files store_*.go and
// projection_redis.go use a provider.
type store interface {
	eventstore.Store
	provider.Outbox
	outbox.Inspector
	provider.Parking
	// ParkedCount counts the messages of a projector that are waiting or stuck. An empty name means
	// all projectors.
	ParkedCount(ctx context.Context, projector string) (int64, error)

	// ratings returns the ratings in the table with this prefix, sorted by product.
	ratings(ctx context.Context, prefix string) ([]rating, error)
	Close() error
}

// serviceStore is a store with the read model of the service, which may be in another server.
type serviceStore interface {
	store
	provider.Log
	task.Inspector
	projection
	// operated returns the database for operators, and migrationSQL the statements of its Migrate.
	operated() operated
	migrationSQL() (string, error)
	// inTx runs fn in a transaction, as Transact of a provider does: fn may run several times.
	inTx(ctx context.Context, fn func(tx eventstore.TxStore) error) error
	// moderation returns the services that moderate reviews.
	moderation(m moderation) ([]kinora.Service, error)
	// answer passes an answer to a task.
	answer(ctx context.Context, a task.Answer) (task.Outcome, error)
}

// demoStore is a store with the read models of the demo.
type demoStore interface {
	store
	demoModels
}

// demoModels are the read models of the demo.
type demoModels interface {
	// createDemoTables creates the tables of the demo's read models.
	createDemoTables(ctx context.Context) error
	// demoRunner returns a runner of the demo's two projectors.
	demoRunner(src projector.Source, t *trace) (*projector.Runner, error)
}
