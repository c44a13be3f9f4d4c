package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

// workerFlags are the flags of a part of the pipeline in its own process.
type workerFlags struct {
	DB database `required:"" env:"REVIEWS_DB" placeholder:"postgres://…" help:"The database with the data and the topics. Missing tables are created."`
}

// Validate is called by kong.
func (f *workerFlags) Validate() error { return f.check() }

func (f *workerFlags) check() error {
	if f.DB.kind != "postgres" {
		return fmt.Errorf("--db %s has no broker that other processes can reach: use postgres://…", f.DB.kind)
	}
	return nil
}

// run runs a service until ctx ends and the service has drained.
func (f *workerFlags) run(ctx context.Context, name string, subscriptions int,
	service func(serviceStore, broker) (kinora.Service, error),
) (err error) {
	if err := f.check(); err != nil {
		return err
	}
	db, err := f.DB.create(ctx)
	if err != nil {
		return nilIfEnded(ctx, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	b, err := openBroker(ctx, sqlKind, f.DB, subscriptions, review.Category)
	if err != nil {
		return nilIfEnded(ctx, err)
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	s, err := service(db, b)
	if err != nil {
		return err
	}
	up, done := make(chan struct{}), make(chan struct{})
	defer func() { close(done); <-up }()
	go func() {
		defer close(up)
		select {
		case <-s.Running():
			slog.Info(name+" is running", "topic", review.Category)
		case <-done:
		}
	}()
	if err = kinora.Run(ctx, s); errors.Is(err, context.Canceled) {
		return nilIfEnded(ctx, err)
	}
	return err
}

// nilIfEnded returns nil if ctx has ended: a stop during the start is not an error.
func nilIfEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// relayCmd publishes the entries of the outbox.
type relayCmd struct {
	workerFlags `embed:""`
}

// Run relays until ctx ends.
func (c *relayCmd) Run(ctx context.Context) error {
	return c.run(ctx, "relay", 0, func(s serviceStore, b broker) (kinora.Service, error) { return newRelay(s, b) })
}

// projectCmd applies the published messages.
type projectCmd struct {
	workerFlags `embed:""`
}

// Run projects until ctx ends. Only one of several processes has a batch of messages at a time.
// When that process ends, another one takes over.
func (c *projectCmd) Run(ctx context.Context) error {
	return c.run(ctx, "project", 1, func(s serviceStore, b broker) (kinora.Service, error) {
		return s.runner(projector.Subscribe(b, review.Category))
	})
}
