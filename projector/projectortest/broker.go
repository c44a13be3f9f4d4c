package projectortest

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// broker is a subscriber whose messages the kit sends.
type broker chan *message.Message

// Subscribe implements message.Subscriber.
func (b broker) Subscribe(context.Context, string) (<-chan *message.Message, error) { return b, nil }

// Close implements message.Subscriber.
func (broker) Close() error { return nil }

const topic = "events"

// messageOf returns an event as a relay would publish it.
func messageOf(e *prepared, at eventstore.Appended, log string) *message.Message {
	m := provider.FromEvent(e.Stream, at.Version, e.draft, topic)
	if log != "" {
		m.SetPlace(at.Position, log)
	}
	return outbox.ToWatermill(outbox.Entry{OutboxMessage: m, CreatedAt: e.RecordedAt})
}
