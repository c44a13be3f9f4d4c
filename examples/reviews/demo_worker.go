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

// newDemoRunner returns a runner with the service's projector twice: the same deliveries and
// handlers, and different tables. One projector has markers. The other, the control, has none and
// shows the effect of duplicates: RepeatSafe only suppresses the warning of that. BrokerOnly: neither reads the log, so that all depends on the
// deliveries.
func newDemoRunner[Tx any](db provider.Provider[Tx], src projector.Source, t *trace, exact, control readModel[Tx]) (*projector.Runner, error) {
	return projector.NewRunner(tracedUnits[Tx]{db, t}, src, projector.RunnerConfig{
		Lease: time.Second,                 // how soon a killed worker's runner counts as dead
		Retry: claim.Backoff{Attempts: -1}, // a kill counts as an attempt, and the demo kills on purpose
	},
		productReviews("demo-control", projector.Options{RepeatSafe: true}, control),
		productReviews("demo-exactly-once", projector.Options{Markers: true, BrokerOnly: true}, exact))
}

// role is the task of a worker.
type role string

const (
	wholeWork   role = "all"
	relayWork   role = "relay"
	projectWork role = "project"
)

// worker is the part of the demo that is killed: relay and runners, or one of the two, over a
// broker and a database to which another process appends.
type worker struct {
	role       role
	db         demoStore
	broker     demoBroker
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
		services = append(services, drainWaiter{w.broker, w.db, make(chan struct{})})
	}
	if w.role != projectWork {
		repeat := newRepeater(w.broker, w.duplicates, w.seed)
		relay, err := outbox.NewRelay(w.outbox(), repeat, &outbox.RelayConfig{
			Batch: 20, Lease: time.Second, // a killed worker's claims are taken over within a second
			Backoff:          claim.Backoff{Attempts: -1}, // a kill counts as an attempt
			Poll:             20 * time.Millisecond,       // other processes do not wake the relay
			OrderedPublisher: true,
			Keep:             retention,
		})
		if err != nil {
			return err
		}
		services = append(services, repeat, relay)
	}
	err := kinora.Run(ctx, services...)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // stopped before all services had started
	}
	return err
}

// outbox returns the relay's view of the database. It is traced only in a relay process: elsewhere
// the starts and acks of the handlers count.
func (w *worker) outbox() provider.Outbox {
	if w.role == relayWork {
		return tracedOutbox{w.db, w.trace}
	}
	return w.db
}

// drainWaiter is stopped after the repeater and before the runners, so that the runners can finish
// the messages in flight.
type drainWaiter struct {
	unconsumedCounter
	parked  parkedCounter
	running chan struct{}
}

// Running implements kinora.Service.
func (s drainWaiter) Running() <-chan struct{} { return s.running }

// Run waits until ctx ends, and then until every message is acked.
func (s drainWaiter) Run(ctx context.Context) error {
	close(s.running)
	<-ctx.Done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	return waitDrained(ctx, s, s.parked)
}

const drainTimeout = time.Minute

// parkedCounter counts the parked messages of a store.
type parkedCounter interface {
	ParkedCount(ctx context.Context, projector string) (int64, error)
}

// waitDrained waits until every published message is acked and no message is parked.
func waitDrained(ctx context.Context, u unconsumedCounter, p parkedCounter) error {
	for {
		n, err := u.unconsumed(ctx)
		if err == nil && n == 0 {
			n, err = p.ParkedCount(ctx, "")
		}
		if err != nil || n == 0 {
			return err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("%d messages are not acked or are parked: %w", n, err)
		}
	}
}

const (
	demoDBEnv    = "REVIEWS_DEMO_DB"
	demoRedisEnv = "REVIEWS_DEMO_REDIS" // empty: the read models are in the database
)

// demoWorkerCmd is the process that the demo starts, kills, and restarts.
type demoWorkerCmd struct {
	DB         database `required:"" env:"REVIEWS_DEMO_DB"`
	Redis      string   `env:"REVIEWS_DEMO_REDIS"`
	Broker     string
	Role       role
	Duplicates float64
	Seed       uint64
}

// Run works until standard input ends: the parent has closed it or has ended. Run ignores Ctrl-C,
// which a terminal sends to both processes: the parent handles it.
func (c *demoWorkerCmd) Run(ctx context.Context) (err error) {
	slog.SetLogLoggerLevel(slog.LevelWarn)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	if c.Redis != "" {
		c.DB.redis = redisKeys{c.Redis, demoTag}
	}
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
	b, err := brokerAddress{kind: c.Broker}.openDemo(ctx, c.DB, subscriptions, review.Category, againTopic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	w := worker{role: c.Role, db: db, broker: b, duplicates: c.Duplicates, seed: c.Seed, trace: &trace{
		write: writeSteps(os.Stdout),
		// A step that the parent cannot read does not count, and the parent is gone.
		onError: func(error) { os.Exit(1) },
	}}
	return w.run(ctx)
}
