package main

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

var errCutOff = errors.New("the broker hung up")

// publisher publishes through the broker: Publish returns when the broker has replied.
type publisher struct {
	socket string
	name   string
	mu     sync.Mutex
	link   *link
}

// Publish implements message.Publisher.
func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link == nil {
		conn, err := net.Dial("unix", p.socket)
		if err != nil {
			return err
		}
		p.link = newLink(conn)
		p.link.send(packet{Verb: hello, Name: p.name})
	}
	letters := make([]letter, len(messages))
	for i, m := range messages {
		letters[i] = letter{m.UUID, m.Payload, m.Metadata}
	}
	p.link.send(packet{Verb: publish, Topic: topic, Letters: letters})
	if _, err := p.link.read(); err != nil {
		p.link.close()
		p.link = nil
		return errors.Join(errCutOff, err)
	}
	return nil
}

// Close implements message.Publisher.
func (p *publisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.link != nil {
		p.link.close()
	}
	return nil
}

// subscriber is a consumer of a group. If the broker hangs up, it reconnects. Messages that it
// already has are processed, but their acks have no effect.
type subscriber struct {
	socket string
	name   string
	group  string
	acking func(id string) // called before the ack is sent to the broker
	all    sync.WaitGroup
}

// Subscribe implements message.Subscriber.
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	to := make(chan *message.Message)
	s.all.Go(func() {
		defer close(to)
		for ctx.Err() == nil {
			s.session(ctx, topic, to)
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	return to, nil
}

// Close implements message.Subscriber.
func (s *subscriber) Close() error {
	s.all.Wait()
	return nil
}

// session forwards the deliveries of one connection until the connection ends.
func (s *subscriber) session(ctx context.Context, topic string, to chan<- *message.Message) {
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		return
	}
	l := newLink(conn)
	defer l.close()
	defer context.AfterFunc(ctx, l.close)()
	l.send(packet{Verb: hello, Name: s.name})
	l.send(packet{Verb: subscribe, Topic: topic, Group: s.group})
	for {
		p, err := l.read()
		if err != nil {
			return
		}
		m := message.NewMessage(p.Letters[0].ID, p.Letters[0].Payload)
		m.Metadata = p.Letters[0].Meta
		if m.Metadata == nil {
			m.Metadata = message.Metadata{}
		}
		go s.await(ctx, l, m, p.Numbers)
		select {
		case to <- m:
		case <-ctx.Done():
			return
		}
	}
}

// await forwards the ack of a message, also on a closed link, where the ack is lost. Runners do not
// nack: a nack is ignored.
func (s *subscriber) await(ctx context.Context, l *link, m *message.Message, numbers []int64) {
	select {
	case <-m.Acked():
		s.acking(m.UUID)
		l.send(packet{Verb: done, Numbers: numbers})
	case <-ctx.Done():
	}
}
