package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
)

// brokerTakeover is how long the messages of a killed process wait. Kafka accepts no less than 6s.
const brokerTakeover = 10 * time.Second

var defaultURLs = map[string]string{
	natsKind: "nats://127.0.0.1:4222", redisKind: "redis://127.0.0.1:6379/0", kafkaKind: "kafka://127.0.0.1:9092",
}

// remoteBroker is a broker that is a server of its own.
type remoteBroker struct {
	message.Publisher
	from message.Subscriber
}

var _ broker = (*remoteBroker)(nil)

// newRemoteBroker connects, and creates missing topics.
func newRemoteBroker(ctx context.Context, a brokerAddress, topics ...string) (*remoteBroker, error) {
	if a.url == "" {
		a.url = defaultURLs[a.kind]
	}
	open, err := brokers.Open(brokers.Config{Address: a.url, Takeover: brokerTakeover, Logger: slog.Default()})
	if err != nil {
		return nil, err
	}
	if err := open.Prepare(ctx, topics...); err != nil {
		return nil, fmt.Errorf("prepare the broker: %w", err)
	}
	b := &remoteBroker{}
	if b.Publisher, err = open.Publisher(); err != nil {
		return nil, fmt.Errorf("open the broker: %w", err)
	}
	if b.from, err = open.Subscriber(consumerGroup); err != nil {
		return nil, errors.Join(fmt.Errorf("open the broker: %w", err), b.Publisher.Close())
	}
	return b, nil
}

// Subscribe implements message.Subscriber.
func (b *remoteBroker) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	return b.from.Subscribe(ctx, topic)
}

// Close implements message.Publisher and message.Subscriber.
func (b *remoteBroker) Close() error { return errors.Join(b.from.Close(), b.Publisher.Close()) }
