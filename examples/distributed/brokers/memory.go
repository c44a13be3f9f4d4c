package brokers

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
)

// Memory is a broker in this process: Watermill's gochannel. It stores nothing. It loses a message
// that has no subscriber, or whose subscriber ends before it acks. Use it only for projectors that
// also read the log.
//
// Start runners before relays, and give a runner one subscription (projector.Subscribe with one
// topic): while Publish waits for an ack, Subscribe waits for Publish.
type Memory struct{ channel *gochannel.GoChannel }

var _ Broker = Memory{}

// NewMemory returns a broker. Close ends it.
func NewMemory() Memory {
	return Memory{gochannel.NewGoChannel(gochannel.Config{
		// Publish waits for the acks, so that a relay does not mark messages as published that
		// runners have not applied yet. It also keeps their order.
		BlockPublishUntilSubscriberAck: true,
	}, nil)}
}

// Close ends all subscriptions.
func (m Memory) Close() error { return m.channel.Close() }

// Prepare does nothing.
func (m Memory) Prepare(context.Context, ...string) error { return nil }

// Publisher returns the channel. Close of one publisher ends the broker.
func (m Memory) Publisher() (message.Publisher, error) { return m.channel, nil }

// Subscriber returns a subscriber. There are no groups: each subscriber gets every message, and of
// the runners of a projector the first one applies it.
func (m Memory) Subscriber(string) (message.Subscriber, error) {
	ctx, cancel := context.WithCancel(context.Background())
	return memorySubscriber{m.channel, ctx, cancel}, nil
}

// memorySubscriber ends its own subscriptions when it is closed. GoChannel.Close would end all.
type memorySubscriber struct {
	channel *gochannel.GoChannel
	life    context.Context //nolint:containedctx // it ends with Close
	end     context.CancelFunc
}

func (m memorySubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(m.life, cancel)
	return m.channel.Subscribe(ctx, topic)
}

func (m memorySubscriber) Close() error {
	m.end()
	return nil
}
