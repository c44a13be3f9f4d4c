package main

import (
	"context"
	"errors"

	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// projection is the read model of the service, and the projector that fills it. It is in the database
// of the events, or in Redis.
type projection interface {
	reader
	// name returns the name of the projector.
	name() string
	// state returns what the projector has done.
	state() projector.State
	// createReadModel creates the tables of the read model, and the views that readers use.
	createReadModel(ctx context.Context) error
	// runner returns a runner of the read model.
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
	// handlers returns the handlers of the projector for the commands of kinora.
	handlers() commands.Handlers
	// wait returns when the read model shows the appended events.
	wait(ctx context.Context, at eventstore.Appended) error
	// lag returns how far the read model is behind the events. It returns
	// projector.ErrNoCheckpoint if no runner has started yet.
	lag(ctx context.Context) (projector.Lag, error)
	// closeProjection closes the connections to Redis, if the read model is there.
	closeProjection() error

	demoModels
}

// reader reads the read model.
type reader interface {
	// ratings returns the ratings in the table with this prefix, sorted by product.
	ratings(ctx context.Context, prefix string) ([]rating, error)
	// products returns the ratings of products with reviews, sorted by product: at most limit
	// products after the given one.
	products(ctx context.Context, after string, limit int) ([]rating, error)
	// best returns the ratings of at most limit products with the most stars, the best first.
	best(ctx context.Context, limit int) ([]rating, error)
	// product returns the rating of one product and at most limit of its newest reviews, both read
	// in one snapshot. A product without reviews has a zero rating.
	product(ctx context.Context, product string, limit int) (rating, []currentReview, error)
	// newest returns at most limit of the newest reviews of all products.
	newest(ctx context.Context, limit int) ([]currentReview, error)
}

// projectionOf is a projection in a store with transactions of type Tx.
type projectionOf[Tx any] struct {
	reader
	reviews *projector.Projector[Tx]
	db      provider.Provider[Tx]
	read    projector.State // see state

	exact, control readModel[Tx] // of the demo
	transact       func(ctx context.Context, fn func(context.Context, Tx) error) error
}

func (p *projectionOf[Tx]) closeProjection() error { return nil }

func (p *projectionOf[Tx]) name() string { return p.reviews.Name() }

func (p *projectionOf[Tx]) state() projector.State { return p.read }

func (p *projectionOf[Tx]) createReadModel(ctx context.Context) error {
	return p.reviews.Create(ctx, p.db, nil)
}

func (p *projectionOf[Tx]) runner(src projector.Source) (*projector.Runner, error) {
	return projector.NewRunner(p.db, src, projector.RunnerConfig{Lease: lease}, p.reviews)
}

func (p *projectionOf[Tx]) applyParked(ctx context.Context) error {
	return p.reviews.ApplyParked(ctx, p.db, nil)
}

func (p *projectionOf[Tx]) dryRun(ctx context.Context, f projector.ParkedFilter) (*projector.DryRun, error) {
	return p.reviews.DryRun(ctx, p.db, f, nil)
}

func (p *projectionOf[Tx]) plan(ctx context.Context, how projector.RebuildHow) (*projector.Plan, error) {
	return p.reviews.Plan(ctx, p.db, how, nil)
}

func (p *projectionOf[Tx]) generations(ctx context.Context) ([]projector.Generation, error) {
	return p.reviews.Generations(ctx, p.read)
}

func (p *projectionOf[Tx]) verify(ctx context.Context, v projector.Verification) (*projector.Verified, error) {
	return p.reviews.Verify(ctx, p.db, v, nil)
}

func (p *projectionOf[Tx]) handlers() commands.Handlers {
	return commands.HandlersOf(p.reviews, p.db, nil)
}

func (p *projectionOf[Tx]) wait(ctx context.Context, at eventstore.Appended) error {
	return p.reviews.Wait(ctx, p.read, at)
}

func (p *projectionOf[Tx]) lag(ctx context.Context) (projector.Lag, error) {
	return p.reviews.Lag(ctx, p.read)
}

func (p *projectionOf[Tx]) demoRunner(src projector.Source, t *trace) (*projector.Runner, error) {
	return newDemoRunner(p.db, src, t, p.exact, p.control)
}

// createDemoTables creates the tables of the demo. Its projectors do not read the log, so they cannot be
// rebuilt and their runner creates no tables.
func (p *projectionOf[Tx]) createDemoTables(ctx context.Context) error {
	return p.transact(ctx, func(ctx context.Context, tx Tx) error {
		return errors.Join(p.exact.create(ctx, tx), p.control.create(ctx, tx))
	})
}
