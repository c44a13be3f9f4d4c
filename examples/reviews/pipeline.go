package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// lease is how long another relay leaves alone what a relay claimed: long enough to publish a batch of 50
// in-process, and short enough that what a killed process held is soon taken over.
const lease = 5 * time.Second

// newBroker is an in-process broker that waits for acks. One that does not would take a message, let the
// relay mark it published, and lose it in a crash: such a broker keeps nothing.
func newBroker() *gochannel.GoChannel {
	quiet := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}
	return gochannel.NewGoChannel(
		gochannel.Config{BlockPublishUntilSubscriberAck: true},
		watermill.NewSlogLoggerWithLevelMapping(slog.Default(), quiet))
}

// pipeline carries events from the outbox to the read models, all in this process.
type pipeline struct {
	stop   context.CancelFunc
	broker *gochannel.GoChannel
	done   chan struct{} // closed when it ended
	err    error         // why it ended; nil where it was stopped
}

// startPipeline starts relay, broker and runner. Stop it before the store is closed.
func startPipeline(ctx context.Context, s serviceStore) (*pipeline, error) {
	p := &pipeline{broker: newBroker(), done: make(chan struct{})}
	runner, err := s.runner(projector.Subscribe(p.broker, review.Category))
	if err != nil {
		return nil, err
	}
	// The broker takes one message after another, so a batch keeps its order.
	relay, err := outbox.NewRelay(s, p.broker, &outbox.RelayConfig{Lease: lease, OrderedPublisher: true})
	if err != nil {
		return nil, err
	}
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx)) // it drains what there is, then stops by Stop
	go func() {
		defer close(p.done)
		p.err = kinora.Run(ctx, runner, relay) // the relay last: it must not publish before somebody listens
	}()
	select {
	case <-relay.Running():
		return p, nil
	case <-p.done:
		return nil, p.Stop()
	}
}

// Stop drains and stops everything, and returns what went wrong.
func (p *pipeline) Stop() error {
	p.stop()
	<-p.done
	return errors.Join(p.err, p.broker.Close())
}

// caughtUp returns when nothing is on its way any more: the broker waits for acks, so what is published has
// been applied, or parked. It fails when ended is closed before. report is told about how much is left.
func caughtUp(ctx context.Context, s store, ended <-chan struct{}, report func(left int64)) error {
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
		if len(open) == 0 {
			report(0)
			return nil
		}
		next.After = open[0].Seq - 1
		report(max(1, total-next.After))
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
	counts, err := s.StatusCounts(ctx)
	if err != nil {
		return err
	}
	parked := 0
	for after := int64(0); ; {
		page, err := s.ParkedMessages(ctx, "", after, 1000)
		if err != nil {
			return err
		}
		if len(page) == 0 {
			break
		}
		parked, after = parked+len(page), page[len(page)-1].Seq
	}
	if counts[outbox.Abandoned] > 0 || parked > 0 {
		return fmt.Errorf("the read model lacks events: %d outbox entries are abandoned, %d messages are parked",
			counts[outbox.Abandoned], parked)
	}
	return nil
}
