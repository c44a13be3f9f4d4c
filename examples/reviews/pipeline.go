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

// lease is how long a relay's claim protects its entries from other relays. It is long enough to
// publish a batch of 50 in-process, and short enough that a killed process is soon replaced.
const lease = 5 * time.Second

// pipelineFlags configure the pipeline from the outbox to the read models.
type pipelineFlags struct {
	Broker   string `enum:"memory,sql" default:"memory" help:"The broker: memory, in this process, or sql, topics in the same PostgreSQL database."`
	Pipeline bool   `default:"true" negatable:"" help:"Relay and project in this process. With --no-pipeline and --broker sql, 'reviews relay' and 'reviews project' do it in other processes."`
}

// check checks the flags before anything is opened.
func (f pipelineFlags) check(d database) error {
	if !f.Pipeline && f.Broker != sqlKind {
		return errors.New("--no-pipeline requires a broker that other processes can reach: use --broker sql")
	}
	return checkBroker(f.Broker, d)
}

// pipeline carries events from the outbox to the read models.
type pipeline struct {
	unconsumedCounter
	stop   context.CancelFunc
	broker broker
	done   chan struct{} // closed when the pipeline has ended
	err    error         // why it ended; nil after a clean stop
}

// start starts relay, broker and runner, or with --no-pipeline only the broker. Stop the pipeline
// before the store is closed.
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
		// The relay comes last: it must not publish before the runner subscribes.
		services = []kinora.Service{runner, relay}
	}
	p := &pipeline{unconsumedCounter: b, broker: b, done: make(chan struct{})}
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx)) // only Stop stops it, after draining
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

// retention keeps published entries for people, and for the progress and checks that read them.
var retention = outbox.EntryRetention{Published: 24 * time.Hour}

// newRelay returns a relay to a broker that keeps the order of a batch. Both brokers do: one takes
// a batch in one statement, the other takes one message after another.
func newRelay(s provider.Outbox, to message.Publisher) (*outbox.Relay, error) {
	return outbox.NewRelay(s, to, &outbox.RelayConfig{
		Lease: lease, OrderedPublisher: true,
		Keep: retention,
		Poll: 50 * time.Millisecond, // appends of another process do not wake the relay
	})
}

// Stop drains and stops the pipeline, and returns its error.
func (p *pipeline) Stop() error {
	p.stop()
	<-p.done
	return errors.Join(p.err, p.broker.Close())
}

// waitCaughtUp returns when every entry is published and every message is acked, so that each is
// applied or parked. It returns an error if ended is closed first. It calls report with the
// approximate number of remaining events.
func waitCaughtUp(ctx context.Context, s store, u unconsumedCounter, ended <-chan struct{}, report func(left int64)) error {
	counts, err := s.StatusCounts(ctx)
	if err != nil {
		return err
	}
	total := int64(0)
	for _, n := range counts {
		total += n
	}
	// Entries before the first open one are finished, so each query starts where the last one
	// ended.
	next := outbox.Filter{Status: []outbox.Status{outbox.Pending, outbox.Claimed, outbox.Failed}, Limit: 1}
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		open, err := s.Entries(ctx, next)
		if err != nil {
			return err
		}
		// Read after the entries, so that a message published in between is counted.
		left, err := u.unconsumed(ctx)
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
			return errors.New("the pipeline ended unexpectedly") // Stop returns the reason
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// checkApplied returns an error if there are abandoned entries or parked messages.
func checkApplied(ctx context.Context, s store) error {
	counts, err := s.StatusCounts(ctx, outbox.Abandoned)
	if err != nil {
		return err
	}
	parked, err := s.ParkedCount(ctx, "")
	if err != nil {
		return err
	}
	if counts[outbox.Abandoned] > 0 || parked > 0 {
		return fmt.Errorf("the read model lacks events: %d outbox entries are abandoned, %d messages are parked (list them with 'reviews parked')",
			counts[outbox.Abandoned], parked)
	}
	return nil
}
