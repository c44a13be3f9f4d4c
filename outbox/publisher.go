package outbox

import (
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
)

// NewPublisher returns a Watermill publisher that adds messages to the outbox in the transaction of
// tx (InTx of a provider). A relay publishes them after the commit. So it takes the place of the
// publisher of Watermill's forwarder, also under cqrs.EventBus and cqrs.CommandBus:
//
//	publisher := outbox.NewPublisher(db.InTx(tx))
//	err := publisher.Publish("orders", message.NewMessage(watermill.NewUUID(), payload))
//
// Publish adds all its messages or none:
//   - The UUID is the id of the message; if it is empty, the message gets a new one. A message whose id
//     is already in the outbox for that topic is ignored.
//   - The metadata are the headers, with the limits of Message. Each message inherits the correlation id,
//     the causation id and the traceparent of its own context (Message.SetContext), and of that of the
//     first message, unless it has these headers. In a handler, set the handler's context.
//   - HeaderKey ("kinora_key") in the metadata is the ordering key: messages of a topic with this key are
//     published in commit order (Message.OrderedKey). Without it, the message waits for no other, and
//     others may be published before it.
//   - The statement runs in the context of the first message.
//   - A topic, UUID, metadata or payload that cannot be stored is an *eventstore.InvalidError. Then the
//     transaction stays usable. Other errors are those of the database.
//
// Close does nothing: the transaction belongs to the caller. The publisher is as safe for concurrent
// use as the transaction.
func NewPublisher(tx Enqueuer) message.Publisher { return publisher{tx} }

type publisher struct{ tx Enqueuer }

func (p publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	entries := make([]Message, len(messages))
	for i, m := range messages {
		key := m.Metadata[HeaderKey]
		entries[i] = Message{ID: m.UUID, Topic: topic, Key: key, OrderedKey: key != "", Payload: m.Payload, Headers: m.Metadata}
		entries[i] = entries[i].Inherit(eventstore.MetadataFrom(m.Context()))
	}
	return p.tx.Enqueue(messages[0].Context(), entries...)
}

func (publisher) Close() error { return nil }
