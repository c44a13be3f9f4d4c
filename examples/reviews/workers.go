package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

// pipelineWorker is a part of the pipeline in its own process.
type pipelineWorker struct {
	name          string
	db            database
	broker        brokerAddress
	subscriptions int
	service       func(s serviceStore, b broker) (kinora.Service, error) // b is nil without a broker
}

// run runs the service until ctx ends and the service has drained.
func (w *pipelineWorker) run(ctx context.Context) (err error) {
	if err := w.broker.check(w.db); err != nil {
		return err
	}
	db, err := w.db.create(ctx, w.broker.kind)
	if err != nil {
		return nilIfEnded(ctx, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	var b broker
	if w.broker.kind != noneKind {
		if b, err = w.broker.open(ctx, w.db, w.subscriptions, review.Category); err != nil {
			return nilIfEnded(ctx, err)
		}
		defer func() { err = errors.Join(err, b.Close()) }()
	}
	s, err := w.service(db, b)
	if err != nil {
		return err
	}
	up, done := make(chan struct{}), make(chan struct{})
	defer func() { close(done); <-up }()
	go func() {
		defer close(up)
		select {
		case <-s.Running():
			slog.Info(w.name+" is running", "broker", w.broker.kind)
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
	DB     database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…. Missing files and tables are created."`
	Broker string   `enum:"sql,nats,redis,kafka" default:"sql" help:"The broker: sql, topics in the same PostgreSQL database, or nats, redis or kafka, the server at --broker-url."`

	brokerURL `embed:""`
}

// Validate is called by kong.
func (c *relayCmd) Validate() error { return c.at(c.Broker).check(c.DB) }

// Run relays until ctx ends.
func (c *relayCmd) Run(ctx context.Context) error {
	w := pipelineWorker{name: "relay", db: c.DB, broker: c.at(c.Broker),
		service: func(s serviceStore, b broker) (kinora.Service, error) { return newRelay(s, b) }}
	return w.run(ctx)
}

// projectCmd applies events to the read models.
type projectCmd struct {
	DB     database `required:"" env:"REVIEWS_DB" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…. Missing files and tables are created."`
	Broker string   `enum:"none,sql,nats,redis,kafka" default:"none" help:"How events reach this process: none, from the event log; sql, through topics in the same PostgreSQL database; nats, redis or kafka, through the server at --broker-url."`

	projectionFlags `embed:""`
	brokerURL       `embed:""`

	AckDeadline time.Duration `hidden:"" help:"Only for tests: another ack deadline of --broker sql."`
}

// Validate is called by kong.
func (c *projectCmd) Validate() error { return c.at(c.Broker).check(c.DB) }

// Run projects until ctx ends. Only one of several processes reads the log, or has a batch of
// messages, at a time. When that process ends, another one takes over.
func (c *projectCmd) Run(ctx context.Context) error {
	from := c.at(c.Broker)
	from.ackDeadline = c.AckDeadline
	w := pipelineWorker{name: "project", db: c.of(c.DB), broker: from, subscriptions: 1,
		service: func(s serviceStore, b broker) (kinora.Service, error) {
			if b == nil {
				return s.runner(fromLog(s))
			}
			return s.runner(projector.Subscribe(b, review.Category))
		}}
	return w.run(ctx)
}
