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

// store is a database of any kind: Kinora's contracts and the ratings. Only the files store_*.go
// use a provider.
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

// serviceStore is a store with the read models of the service.
type serviceStore interface {
	store
	projector.State
	task.Inspector
	// createReadModel creates the tables of the read model, and the views that readers use.
	createReadModel(ctx context.Context) error
	// runner returns a runner of the read models.
	runner(src projector.Source) (*projector.Runner, error)
	// applyParked applies parked messages that are due.
	applyParked(ctx context.Context) error
	// dryRun shows what a replay of parked messages would change.
	dryRun(ctx context.Context, f projector.ParkedFilter) (*projector.DryRun, error)
	// plan returns what a rebuild of the read model would do.
	plan(ctx context.Context, how projector.RebuildHow) (*projector.Plan, error)
	// generations returns the generations of the read model.
	generations(ctx context.Context) ([]projector.Generation, error)
	// verify compares the read model with the events, and repairs it.
	verify(ctx context.Context, v projector.Verification) (*projector.Verified, error)
	// inTx runs fn in a transaction, as Transact of a provider does: fn may run several times.
	inTx(ctx context.Context, fn func(tx eventstore.TxStore) error) error
	// moderation returns the services that moderate reviews.
	moderation(m moderation) ([]kinora.Service, error)
	// answer passes an answer to a task.
	answer(ctx context.Context, a task.Answer) (task.Outcome, error)
	// wait returns when the read models show the appended events.
	wait(ctx context.Context, at eventstore.Appended) error
	// lag returns how far the read models are behind the events. It returns
	// projector.ErrNoCheckpoint if no runner has started yet.
	lag(ctx context.Context) (projector.Lag, error)

	// products returns the ratings of products with reviews, sorted by product: at most limit
	// products after the given one.
	products(ctx context.Context, after string, limit int) ([]rating, error)
	// product returns the rating of one product and at most limit of its newest reviews, both read
	// in one snapshot. A product without reviews has a zero rating.
	product(ctx context.Context, product string, limit int) (rating, []currentReview, error)
	// newest returns at most limit of the newest reviews of all products.
	newest(ctx context.Context, limit int) ([]currentReview, error)
}

// demoStore is a store with the read models of the demo.
type demoStore interface {
	store
	// createDemoTables creates the tables of the demo's read models.
	createDemoTables(ctx context.Context) error
	// demoRunner returns a runner of the demo's two projectors.
	demoRunner(src projector.Source, t *trace) (*projector.Runner, error)
}
