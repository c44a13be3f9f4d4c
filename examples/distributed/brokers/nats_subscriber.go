package brokers

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsSubscriber reads the partitions of a topic with pull consumers. Watermill's own subscribers of
// JetStream have no partitions, and may send to a closed channel when a subscription ends.
type natsSubscriber struct {
	conn     *nats.Conn
	js       jetstream.JetStream
	log      watermill.LoggerAdapter
	consumer func(partition int, topic string) jetstream.ConsumerConfig
	life     context.Context //nolint:containedctx // it ends with Close
	end      context.CancelFunc
	mu       sync.Mutex // held while readers are added, and while life ends
	readers  sync.WaitGroup
}

// Subscribe reads all partitions of a topic. At most one message of each is in flight.
func (s *natsSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(s.life, cancel)
	end := func() { unhook(); cancel() }
	var partitions []jetstream.MessagesContext
	for p := range natsPartitions {
		messages, err := s.open(ctx, topic, p)
		if err != nil {
			for _, m := range partitions {
				m.Stop()
			}
			end()
			return nil, err
		}
		partitions = append(partitions, messages)
	}
	s.mu.Lock() // Close waits only for readers that were added before
	defer s.mu.Unlock()
	out, open := make(chan *message.Message), sync.WaitGroup{}
	for _, messages := range partitions {
		context.AfterFunc(ctx, messages.Drain)
		open.Go(func() { s.read(ctx, messages, out) })
	}
	s.readers.Go(func() {
		open.Wait()
		end()
		close(out)
	})
	return out, nil
}

// open creates the consumer of a partition, unless it exists.
func (s *natsSubscriber) open(ctx context.Context, topic string, partition int) (jetstream.MessagesContext, error) {
	consumer, err := answered(ctx, s.log, "create a consumer of "+topic, func(ctx context.Context) (jetstream.Consumer, error) {
		return s.js.CreateOrUpdateConsumer(ctx, topic, s.consumer(partition, topic))
	})
	if err != nil {
		return nil, err
	}
	// A server that does not answer is noticed after two heartbeats.
	return consumer.Messages(jetstream.PullMaxMessages(1), jetstream.PullExpiry(5*time.Second), jetstream.PullHeartbeat(time.Second))
}

// read passes the messages of a partition to out until ctx ends or the consumer is deleted.
func (s *natsSubscriber) read(ctx context.Context, messages jetstream.MessagesContext, out chan<- *message.Message) {
	defer leave(messages)
	for {
		m, err := messages.Next()
		switch {
		case errors.Is(err, jetstream.ErrMsgIteratorClosed):
			return
		case errors.Is(err, jetstream.ErrConsumerDeleted) || errors.Is(err, jetstream.ErrConsumerNotFound):
			s.log.Error("the consumer is gone", err, nil)
			return
		case err != nil: // the server is away; Next tries again
			s.log.Debug("read failed", watermill.LogFields{"err": err.Error()})
			if !pause(ctx, 100*time.Millisecond) {
				return
			}
		default:
			s.deliver(ctx, messages, m, out)
		}
	}
}

// leave returns when the server knows that a subscription takes no more messages, or after natsTimeout. Until then it may
// send those that are given back to this subscription again, and they would wait for the end of AckWait.
func leave(messages jetstream.MessagesContext) {
	messages.Drain()
	for {
		m, err := messages.Next(jetstream.NextMaxWait(natsTimeout))
		if err != nil {
			return
		}
		_ = m.Nak()
	}
}

// deliver sends a message to the runner and waits for its ack. While it waits, it extends AckWait:
// only the messages of a runner that is gone are given to another one.
func (s *natsSubscriber) deliver(ctx context.Context, messages jetstream.MessagesContext, m jetstream.Msg, out chan<- *message.Message) {
	msg, err := (&wmnats.NATSMarshaler{}).Unmarshal(&nats.Msg{Data: m.Data(), Header: m.Headers()})
	if err != nil {
		s.log.Error("a message is not Watermill's", err, watermill.LogFields{"subject": m.Subject()})
		_ = m.Term()
		return
	}
	msgCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	msg.SetContext(msgCtx)
	alive := time.NewTicker(max(s.consumer(0, "").AckWait/3, 10*time.Millisecond))
	defer alive.Stop()
	for to := out; ; {
		select {
		case to <- msg:
			to = nil
		case <-msg.Acked():
			s.ack(ctx, m)
			return
		case <-msg.Nacked():
			_ = m.NakWithDelay(100 * time.Millisecond)
			return
		case <-alive.C:
			_ = m.InProgress()
		case <-ctx.Done():
			select {
			case <-msg.Acked(): // a runner acks before it ends its subscription
				s.ack(ctx, m)
			default:
				leave(messages)
				_ = m.Nak() // another runner gets it at once
			}
			return
		}
	}
}

// ack returns once the server has the ack, or after natsTimeout. Then the message is delivered again.
func (s *natsSubscriber) ack(ctx context.Context, m jetstream.Msg) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), natsTimeout)
	defer cancel()
	if err := m.DoubleAck(ctx); err != nil {
		s.log.Debug("ack failed", watermill.LogFields{"err": err.Error()})
	}
}

// Close ends the subscriptions and waits until their acks are sent.
func (s *natsSubscriber) Close() error {
	s.mu.Lock()
	s.end()
	s.mu.Unlock()
	s.readers.Wait()
	s.conn.Close()
	return nil
}

// pause returns false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
