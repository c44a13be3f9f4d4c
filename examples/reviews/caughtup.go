package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// retryPatience is how long waitCaughtUp waits while none of the messages that are tried again is
// applied. It is longer than all attempts at a message, and than the lease of a killed runner.
const retryPatience = time.Minute

// errPipelineEnded says that nothing more will come. Stop of the pipeline returns the reason.
var errPipelineEnded = errors.New("the pipeline ended unexpectedly")

// waitCaughtUp returns when each event is applied or stuck, and the number of messages that are
// stuck or wait behind a stuck one. The runner may be in another process.
//   - It calls report with the number of events that are neither applied nor parked. A large number
//     is an estimate.
//   - It waits for parked messages that are tried again, for example those of a killed runner. It
//     returns an error if none of them is applied or becomes stuck within retryPatience.
//   - It returns an error if ended is closed first.
func waitCaughtUp(ctx context.Context, s serviceStore, ended <-chan struct{}, report func(behind int64)) (stuck int, err error) {
	retried := retries{patience: retryPatience}
	for pause, absent := 5*time.Millisecond, false; ; pause = min(2*pause, 200*time.Millisecond) {
		lag, err := lagOf(ctx, s)
		switch noRunner := errors.Is(err, projector.ErrNoCheckpoint); {
		case noRunner && !absent:
			absent = true
			slog.Info("waiting for the first process that updates the read models: start 'reviews project'")
		case noRunner:
		case err != nil:
			return 0, err
		case lag.Events > 0:
			report(lag.Events)
		default:
			report(0)
			// Counted later than the events: those that were not behind are applied or parked.
			f, err := ofLive(ctx, s, projector.ParkedFilter{})
			if err != nil {
				return 0, err
			}
			waiting, stuck, err := count(ctx, s, f)
			if err != nil || waiting == 0 {
				return stuck, err
			}
			if err := retried.check(waiting); err != nil {
				return 0, err
			}
		}
		select {
		case <-time.After(pause):
		case <-ended:
			return 0, errPipelineEnded
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// waitPublished returns when each entry of the outbox is published or abandoned. The read models may be
// complete before: their runner reads what it lacks from the log. It returns an error if ended is closed
// first.
func waitPublished(ctx context.Context, s outbox.Inspector, ended <-chan struct{}) error {
	for {
		counts, err := s.StatusCounts(ctx, outbox.Pending, outbox.Claimed, outbox.Failed)
		if err != nil || counts[outbox.Pending]+counts[outbox.Claimed]+counts[outbox.Failed] == 0 {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ended:
			return errPipelineEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lagOf returns how far the read models are behind. While they catch up from far behind, it returns
// an estimate from positions: an exact lag reads each event, which takes long.
func lagOf(ctx context.Context, s serviceStore) (projector.Lag, error) {
	c, err := s.state().Checkpoint(ctx, provider.Build{Projector: s.name()})
	if err != nil {
		return projector.Lag{}, err
	}
	if c.Mode == provider.ModeCatchUp {
		head, err := s.LogPosition(ctx, eventstore.From{Now: true})
		if behind := head - c.Place.Position; err != nil || behind > farBehind {
			return projector.Lag{Events: behind, Oldest: c.Place.RecordedAt, Position: c.Place.Position}, err
		}
	}
	return s.lag(ctx)
}

const farBehind = 1000 // positions

// retries observes the messages that are tried again.
type retries struct {
	patience time.Duration
	waiting  int
	since    time.Time // when waiting last changed
}

// check returns an error if the number of waiting messages has not changed for the patience.
func (r *retries) check(waiting int) error {
	switch {
	case waiting != r.waiting:
		if r.waiting == 0 {
			slog.Info("waiting for parked messages that are tried again", "messages", waiting, "at_most", r.patience)
		}
		r.waiting, r.since = waiting, time.Now()
	case time.Since(r.since) > r.patience:
		return fmt.Errorf("the read model lacks events: %d messages are tried again, and none was applied for %s: "+
			"'reviews parked' lists them with their errors", waiting, r.patience)
	}
	return nil
}

// errStuck is the error of a read model that lacks the events of stuck messages.
func errStuck(n int) error {
	return fmt.Errorf("the read model lacks events: %d messages are stuck, or wait behind a stuck one: "+
		"list them with 'reviews parked', then replay or skip them", n)
}
