package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// The read models of the demo.
const (
	exactPrefix   = "demo_exactly_once_"
	controlPrefix = "demo_control_"
)

// newDemoRunner makes a runner of the service's projector, twice: over the same deliveries, with the same
// handlers, into tables of their own. One keeps markers. The other, the control, does not, and shows what
// happens then.
func newDemoRunner[Tx any](db provider.Provider[Tx], src projector.Source, t *trace, exact, control readModel[Tx]) (*projector.Runner, error) {
	return projector.NewRunner(tracedUnits[Tx]{db, t}, src, projector.RunnerConfig{
		Lease: time.Second,                 // so that the runner of a killed worker is soon known to be dead
		Retry: claim.Backoff{Attempts: -1}, // being killed counts as an attempt, and the demo does it on purpose
	},
		productReviews("demo-control", projector.Options{}, control),
		productReviews("demo-exactly-once", projector.Options{Markers: true}, exact))
}

// role is what a worker does.
type role string

const (
	wholeWork   role = "all"
	relayWork   role = "relay"
	projectWork role = "project"
)

// worker is what gets killed: relay and runners over a broker, or one of them, and a database that others
// append to.
type worker struct {
	role       role
	db         demoStore
	broker     broker
	duplicates float64
	seed       uint64
	trace      *trace
}

// run works until ctx ends and everything has drained.
func (w *worker) run(ctx context.Context) error {
	var services []kinora.Service
	if w.role != relayWork {
		from := tracedSubscriber{w.broker, w.trace}
		for _, topic := range []string{review.Category, againTopic} {
			runner, err := w.db.demoRunner(projector.Subscribe(from, topic), w.trace)
			if err != nil {
				return err
			}
			services = append(services, runner)
		}
	}
	if w.role == wholeWork {
		services = append(services, settler{w.broker, w.db, make(chan struct{})})
	}
	if w.role != projectWork {
		repeat := newRepeater(w.broker, w.duplicates, w.seed)
		relay, err := outbox.NewRelay(w.outbox(), repeat, &outbox.RelayConfig{
			Batch: 20, Lease: time.Second, // so that what a killed worker held is taken over within a second
			Backoff:          claim.Backoff{Attempts: -1}, // being killed counts as an attempt, and we do it on purpose
			Poll:             20 * time.Millisecond,       // the appends of another process give no hint
			OrderedPublisher: true,
			Keep:             kept,
		})
		if err != nil {
			return err
		}
		services = append(services, repeat, relay)
	}
	err := kinora.Run(ctx, services...)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // told to stop before all had started
	}
	return err
}

// outbox is the relay's view of the database. Where the handlers are in the same process, it is their starts
// and acks that count.
func (w *worker) outbox() provider.Outbox {
	if w.role == relayWork {
		return tracedOutbox{w.db, w.trace}
	}
	return w.db
}

// settler is stopped after the repeater and before the runners: it lets them finish what is on its way.
type settler struct {
	unconsumer
	parked  parkedCounter
	running chan struct{}
}

// Running implements kinora.Service.
func (s settler) Running() <-chan struct{} { return s.running }

// Run waits for the end of ctx, and then until everything is acked.
func (s settler) Run(ctx context.Context) error {
	close(s.running)
	<-ctx.Done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	return settle(ctx, s, s.parked)
}

const settleLimit = time.Minute

// parkedCounter counts the parked messages of a store.
type parkedCounter interface {
	ParkedCount(ctx context.Context, projector string) (int64, error)
}

// settle waits until everything that is published is acked, and nothing is parked.
func settle(ctx context.Context, u unconsumer, p parkedCounter) error {
	for {
		n, err := u.unconsumed(ctx)
		if err == nil && n == 0 {
			n, err = p.ParkedCount(ctx, "")
		}
		if err != nil || n == 0 {
			return err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("%d messages are not acked, or parked: %w", n, err)
		}
	}
}

const demoDBEnv = "REVIEWS_DEMO_DB"

// demoWorkerCmd is the process that the demo starts, kills, and starts again.
type demoWorkerCmd struct {
	DB         database `required:"" env:"REVIEWS_DEMO_DB"`
	Broker     string
	Role       role
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
	subscriptions := 2
	if c.Role == relayWork {
		subscriptions = 0
	}
	b, err := openBroker(ctx, c.Broker, c.DB, subscriptions, review.Category, againTopic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	w := worker{role: c.Role, db: db, broker: b, duplicates: c.Duplicates, seed: c.Seed, trace: &trace{
		write: writeSteps(os.Stdout),
		// Without a witness nothing that happens here counts, and the parent is gone anyway.
		broken: func(error) { os.Exit(1) },
	}}
	return w.run(ctx)
}
