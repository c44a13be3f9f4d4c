package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// The read models of the demo.
const (
	exactPrefix   = "demo_exactly_once_"
	controlPrefix = "demo_control_"
)

// newDemoRunner makes a runner of the service's projector, twice: over the same deliveries, with the same
// handlers, into tables of their own. One keeps markers. The other, the control, does not, and shows what
// happens then.
func newDemoRunner[Tx any](unit projector.UnitOfWork[Tx], src projector.Source, t *trace, exact, control readModel[Tx]) (*projector.Runner, error) {
	return projector.NewRunner(tracedUnit[Tx]{unit, t}, src, nil,
		productReviews("demo-control", projector.Options{}, control),
		productReviews("demo-exactly-once", projector.Options{Markers: true}, exact))
}

// worker is what gets killed: relay, broker and runners over a database that others append to.
type worker struct {
	db         demoStore
	duplicates float64
	seed       uint64
	trace      *trace
}

// run works until ctx ends and everything has drained.
func (w *worker) run(ctx context.Context) error {
	broker := newBroker()
	from := tracedSubscriber{broker, w.trace}
	first, err := w.db.demoRunner(projector.Subscribe(from, review.Category), w.trace)
	if err != nil {
		return err
	}
	second, err := w.db.demoRunner(projector.Subscribe(from, againTopic), w.trace)
	if err != nil {
		return err
	}
	repeat := newRepeater(broker, w.duplicates, w.seed)
	relay, err := outbox.NewRelay(w.db, repeat, &outbox.RelayConfig{
		Batch: 20, Lease: time.Second, // so that what a killed worker held is taken over within a second
		Backoff:          claim.Backoff{Attempts: -1}, // being killed counts as an attempt, and we do it on purpose
		Poll:             20 * time.Millisecond,       // the appends of another process give no hint
		OrderedPublisher: true,
	})
	if err != nil {
		return err
	}
	err = kinora.Run(ctx, first, second, repeat, relay)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // told to stop before all had started
	}
	return errors.Join(err, broker.Close())
}

const demoDBEnv = "REVIEWS_DEMO_DB"

// demoWorkerCmd is the process that the demo starts, kills, and starts again.
type demoWorkerCmd struct {
	DB         database `required:"" env:"REVIEWS_DEMO_DB"`
	Duplicates float64
	Seed       uint64
}

// Run works until standard input ends: when the parent closes it, or is gone. Ctrl-C, which a terminal sends
// to both, is the parent's affair.
func (c *demoWorkerCmd) Run(ctx context.Context) (err error) {
	slog.SetLogLoggerLevel(slog.LevelWarn)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	db, err := c.DB.createDemo(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	w := worker{db: db, duplicates: c.Duplicates, seed: c.Seed, trace: &trace{
		write: writeSteps(os.Stdout),
		// Without a witness nothing that happens here counts, and the parent is gone anyway.
		broken: func(error) { os.Exit(1) },
	}}
	return w.run(ctx)
}
