package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// lease is how long another relay leaves alone what a relay claimed: long enough to publish a batch of 50
// in-process, and short enough that what a killed process held is soon taken over.
const lease = 5 * time.Second

// pipelineFlags say how events get from the outbox to the read models.
type pipelineFlags struct {
	Broker   string `enum:"memory,sql" default:"memory" help:"What carries messages: memory, in this process, or sql, topics in the same PostgreSQL database."`
	Pipeline bool   `default:"true" negatable:"" help:"Relay and project in this process; with --no-pipeline and --broker sql, 'reviews relay' and 'reviews project' do it elsewhere."`
}

// check refuses what cannot work before anything is opened.
func (f pipelineFlags) check(d database) error {
	if !f.Pipeline && f.Broker != sqlKind {
		return errors.New("--no-pipeline leaves the work to other processes, which a broker in memory does not reach: use --broker sql")
	}
	return checkBroker(f.Broker, d)
}

// pipeline carries events from the outbox to the read models.
type pipeline struct {
	unconsumer
	stop   context.CancelFunc
	broker broker
	done   chan struct{} // closed when it ended
	err    error         // why it ended; nil where it was stopped
}

// start starts relay, broker and runner, or with --no-pipeline the broker alone. Stop it before the store is
// closed.
func (f pipelineFlags) start(ctx context.Context, d database, s serviceStore) (*pipeline, error) {
	if err := f.check(d); err != nil {
		return nil, err
	}
	subscriptions := 0
	if f.Pipeline {
		subscriptions = 1
	}
	b, err := openBroker(ctx, f.Broker, d, subscriptions, review.Category)
	if err != nil {
		return nil, err
	}
	var services []kinora.Service
	if f.Pipeline {
		runner, err1 := s.runner(projector.Subscribe(b, review.Category))
		relay, err2 := newRelay(s, b)
		if err := errors.Join(err1, err2); err != nil {
			return nil, errors.Join(err, b.Close())
		}
		services = []kinora.Service{runner, relay} // the relay last: it must not publish before somebody listens
	}
	p := &pipeline{unconsumer: b, broker: b, done: make(chan struct{})}
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx)) // it drains what there is, then stops by Stop
	go func() {
		defer close(p.done)
		p.err = kinora.Run(ctx, services...)
	}()
	for _, one := range services {
		select {
		case <-one.Running():
		case <-p.done:
			return nil, p.Stop()
		}
	}
	return p, nil
}

// kept is for people, and for progress and checks, which look at what went out.
var kept = outbox.EntryRetention{Published: 24 * time.Hour}

// newRelay makes a relay to a broker that keeps the order of a batch: one takes it in one statement, and the
// other takes one message after another.
func newRelay(s provider.Outbox, to message.Publisher) (*outbox.Relay, error) {
	return outbox.NewRelay(s, to, &outbox.RelayConfig{
		Lease: lease, OrderedPublisher: true,
		Keep: kept,
		Poll: 50 * time.Millisecond, // the appends of another process give no hint
	})
}

// Stop drains and stops everything, and returns what went wrong.
func (p *pipeline) Stop() error {
	p.stop()
	<-p.done
	return errors.Join(p.err, p.broker.Close())
}

// caughtUp returns when nothing is on its way any more: every entry is published, and every message acked, so
// that it has been applied, or parked. It fails when ended is closed before. report is told about how much is
// left.
func caughtUp(ctx context.Context, s store, u unconsumer, ended <-chan struct{}, report func(left int64)) error {
	counts, err := s.StatusCounts(ctx)
	if err != nil {
		return err
	}
	total := int64(0)
	for _, n := range counts {
		total += n
	}
	// Entries before the first open one are done with, so that each look goes on where the last one ended.
	next := outbox.Filter{Status: []outbox.Status{outbox.Pending, outbox.Claimed, outbox.Failed}, Limit: 1}
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		open, err := s.Entries(ctx, next)
		if err != nil {
			return err
		}
		left, err := u.unconsumed(ctx) // after the entries: what is published in between is in one of the two
		if err != nil {
			return err
		}
		if len(open) == 0 && left == 0 {
			report(0)
			return nil
		}
		if len(open) > 0 {
			next.After = open[0].Seq - 1
			left += total - next.After
		}
		report(max(1, left))
		select {
		case <-time.After(pause):
		case <-ended:
			return errors.New("the pipeline ended by itself") // Stop says why
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// troubled tells what did not get through: abandoned entries and parked messages.
func troubled(ctx context.Context, s store) error {
	counts, err := s.StatusCounts(ctx, outbox.Abandoned)
	if err != nil {
		return err
	}
	parked, err := s.ParkedCount(ctx, "")
	if err != nil {
		return err
	}
	if counts[outbox.Abandoned] > 0 || parked > 0 {
		return fmt.Errorf("the read model lacks events: %d outbox entries are abandoned, %d messages are parked",
			counts[outbox.Abandoned], parked)
	}
	return nil
}
