package projector

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/projector/internal/deliver"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Handle applies m as a delivery of a subscription, and returns nil after the commit: every projector
// has applied or parked it, or has skipped it as a duplicate. It is a message.NoPublishHandlerFunc:
//
//	runner, err := projector.NewRunner(db, projector.FromRouter(), projector.RunnerConfig{}, ratings)
//	group, err := kinora.Start(ctx, runner)
//	router.AddConsumerHandler("ratings", "review", subscriber, runner.Handle)
//
// Concurrent calls share units. The router runs one call for each message that the subscriber has
// delivered. So the messages of a key are applied in their order if the subscriber waits for an ack
// before it delivers the next one of the key, as most brokers' do.
//
// Failures of handlers are not returned: the message is parked and acked. An error means that m must be
// delivered again:
//   - ClassShutdown: the runner has stopped, or the context of m ended before a worker took m. Once m is
//     taken, the end of its context has no effect, since routers cancel all messages when they close. If
//     the runner had stopped before, Handle returns after a second, so that redeliveries are not a busy loop.
//   - ClassTransient: Run was not called within RunnerConfig.Timeout. Before that, Handle waits.
//   - ClassPermanent: the source of the runner is not FromRouter.
//
// Stop the router before the runner. No retries or poison queues are needed around Handle: a poison queue
// must let errors of ClassShutdown and ClassTransient pass (middleware.PoisonQueueWithFilter).
func (r *Runner) Handle(m *message.Message) error {
	if !r.src.router {
		return &Error{Class: ClassPermanent, Err: errors.New("runner: Handle requires a Source of FromRouter")}
	}
	ctx := m.Context()
	if err := r.awaitRunning(ctx); err != nil {
		return err
	}
	own := m.CopyWithContext() // the router may change m after Handle has returned
	d := r.receiver.Receive(message.SubscribeTopicFromCtx(ctx), own, len(r.all.Feeders))
	if !r.pass(ctx, d) && r.taking.Err() == nil {
		return notTaken(ctx)
	}
	select {
	case <-own.Acked():
		return nil
	case <-r.ended:
	}
	select {
	case <-own.Acked():
		return nil
	default:
		return errStopped
	}
}

// pass gives a message to the workers, or with Untrusted to deliver.TakeAhead. It returns false if ctx or the runner ends before.
func (r *Runner) pass(ctx context.Context, d *model.Received) bool {
	if r.routed == nil {
		return deliver.Dispatch(r.taking, ctx.Done(), d, poolsOf(r.all.Feeders))
	}
	select {
	case r.routed <- d:
		return true
	case <-ctx.Done():
	case <-r.taking.Done():
	}
	return false
}

func (r *Runner) awaitRunning(ctx context.Context) error {
	select {
	case <-r.ended:
		model.Wait(ctx, stoppedPause)
		return errStopped
	default:
	}
	select {
	case <-r.running:
		return nil
	default:
	}
	late := time.NewTimer(r.cfg.Timeout)
	defer late.Stop()
	select {
	case <-r.running:
		return nil
	case <-r.ended:
		return errStopped
	case <-ctx.Done():
		return notTaken(ctx)
	case <-late.C:
		return &Error{Class: ClassTransient, Code: "begin", Err: errors.New("runner: it is not running: start it before the router")}
	}
}

// stoppedPause is how long a message waits for its error if the runner has stopped: most brokers deliver it
// again at once.
const stoppedPause = time.Second

func notTaken(ctx context.Context) error {
	return &Error{Class: provider.ClassShutdown, Err: fmt.Errorf("runner: the message was not taken: %w", ctx.Err())}
}

var errStopped = &Error{Class: provider.ClassShutdown, Err: errors.New("runner: it has stopped: stop the router before the runner")}
