package projector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/projector/internal/deliver"
	"github.com/kinora-go/kinora/projector/internal/feed"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Source is what a runner reads. FromLog, Subscribe, SubscribeEach and FromRouter return it.
type Source struct {
	router     bool
	log        provider.Log
	categories []string
	sub        message.Subscriber
	each       func(projector string) (message.Subscriber, error)
	topics     []string
}

// FromLog returns a Source that reads the events of log, without a broker: from Options.From on,
// and then each new event. Of the runners of a projector, in any number of processes, one reads at
// a time; another takes over when it ends. Each projector needs no markers: its checkpoint is
// committed with its effects.
//
// The events are those that the projector has handlers for, of every category. In addition, events
// of types that are not registered are read in these categories, and parked until a program has
// the type (Options.SkipUnknown); without categories they are skipped. With categories, the whole log is
// read, and filtered in this process.
func FromLog(log provider.Log, categories ...string) Source {
	return Source{log: log, categories: categories}
}

// Subscribe returns a Source that reads topics from s. The projectors of the runner share each
// delivery: it is acked after all of them have applied or parked it, so a projector that retries
// delays the others.
func Subscribe(s message.Subscriber, topics ...string) Source {
	return Source{sub: s, topics: topics}
}

// SubscribeEach returns a Source that reads topics for each projector from a separate subscriber,
// for example of its own consumer group. So no projector delays another. Runner.Run calls
// subscriber once per projector, and closes the subscribers after it has drained.
func SubscribeEach(subscriber func(projector string) (message.Subscriber, error), topics ...string) Source {
	return Source{each: subscriber, topics: topics}
}

// FromRouter returns a Source without a subscription: a Watermill router passes the messages to
// Runner.Handle. The projectors of the runner share each message, as with Subscribe.
func FromRouter() Source { return Source{router: true} }

func (s Source) isZero() bool {
	return !s.router && s.log == nil && s.sub == nil && s.each == nil && len(s.topics) == 0 && len(s.categories) == 0
}

func (s Source) check() error {
	if s.router {
		return nil
	}
	if s.log != nil {
		for _, category := range s.categories {
			if err := provider.CheckName("category", category); err != nil {
				return fmt.Errorf("source: %w", err)
			}
		}
		return nil
	}
	if s.sub == nil && s.each == nil || len(s.topics) == 0 {
		return errors.New("the source has no log, no subscriber or no topics: create it with FromLog, Subscribe, SubscribeEach or FromRouter")
	}
	for i, topic := range s.topics {
		if topic == "" || slices.Contains(s.topics[:i], topic) {
			return fmt.Errorf("source: topic %q is empty or listed twice: remove it", topic)
		}
	}
	return nil
}

// subscription has the messages of a topic for some projectors.
type subscription struct {
	topic    string
	messages <-chan *message.Message
	pools    []*deliver.Pool
}

func poolsOf(feeders []*feed.Feeder) (all []*deliver.Pool) {
	for _, f := range feeders {
		all = append(all, f.Pool())
	}
	return all
}

// open subscribes to every topic. It returns the subscribers that the runner must close, also
// with an error.
func (s Source) open(ctx context.Context, all []*feed.Feeder) (subs []subscription, owned []message.Subscriber, err error) {
	if s.log != nil || s.router {
		return nil, nil, nil
	}
	share, sub := len(all), s.sub
	if s.each != nil {
		share = 1
	}
	for feeders := range slices.Chunk(all, share) {
		if s.each != nil {
			name := feeders[0].Projector.Name
			if sub, err = s.each(name); err == nil && sub == nil {
				err = errors.New("the function returned nil")
			}
			if err != nil {
				return nil, owned, fmt.Errorf("subscriber of projector %s: %w", name, err)
			}
			owned = append(owned, sub)
		}
		for _, topic := range s.topics {
			messages, err := sub.Subscribe(ctx, topic)
			if err != nil {
				return nil, owned, fmt.Errorf("subscribe to %s: %w", topic, err)
			}
			subs = append(subs, subscription{topic, messages, poolsOf(feeders)})
		}
	}
	return subs, owned, nil
}

// read passes the messages of a subscription to the workers of its projectors until ctx ends.
func (s subscription) read(ctx context.Context, r *Runner) error {
	pass := func(d *model.Received) bool { return deliver.Dispatch(ctx, nil, d, s.pools) }
	if r.cfg.Untrusted {
		in, end := deliver.TakeAhead(ctx, r.receiver, s.pools)
		defer end()
		pass = func(d *model.Received) bool {
			select {
			case in <- d:
				return true
			case <-ctx.Done():
				return false
			}
		}
	}
	for {
		var m *message.Message
		select {
		case <-ctx.Done():
			return nil
		case m = <-s.messages:
		}
		if m == nil { // the channel is closed
			return fmt.Errorf("the subscription to %s ended", s.topic)
		}
		if !pass(r.receiver.Receive(s.topic, m, len(s.pools))) {
			return nil
		}
	}
}

func closeAll(owned []message.Subscriber) (err error) {
	for _, sub := range owned {
		if e := sub.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("runner: close a subscriber: %w", e))
		}
	}
	return err
}

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
		model.Wait(ctx, time.Second) // most brokers deliver the message again at once
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

func notTaken(ctx context.Context) error {
	return &Error{Class: provider.ClassShutdown, Err: fmt.Errorf("runner: the message was not taken: %w", ctx.Err())}
}

var errStopped = &Error{Class: provider.ClassShutdown, Err: errors.New("runner: it has stopped: stop the router before the runner")}
