package outbox

import (
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// Message is what goes out.
type Message struct {
	ID      string            // the same on every publication; empty: a new UUIDv7 (in a handler's output: derived from the cause)
	Topic   string            // 1 to 255 bytes
	Key     string            // the ordering key; empty: the message's own id, so that it waits for no other (in a handler's output: the cause's stream)
	Payload []byte            // published byte for byte; at most the provider's MaxPayload
	Headers map[string]string // see eventstore.CheckHeaders
	// OrderedKey makes others that enqueue a message of this topic and key with it wait until this transaction
	// ends, so that entries of a key that spans streams are published in the order of commits. Without it that
	// order holds only where one transaction committed before the other enqueued, as it always is in a stream.
	OrderedKey bool
}

// Normalize fills in an empty ID and Key, copies Headers, and refuses with *eventstore.InvalidError what no
// provider could store. maxPayload ≤ 0 means eventstore.DefaultMaxPayload. Providers call it before any SQL.
func (m Message) Normalize(maxPayload int) (Message, error) {
	if m.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return m, fmt.Errorf("draw a message id: %w", err)
		}
		m.ID = id.String()
	}
	if m.Key == "" {
		m.Key = m.ID
	}
	if maxPayload <= 0 {
		maxPayload = eventstore.DefaultMaxPayload
	}
	for _, f := range []struct{ name, value string }{{"message id", m.ID}, {"topic", m.Topic}, {"key", m.Key}} {
		if err := eventstore.CheckText(f.name, f.value, eventstore.MaxIDBytes); err != nil {
			return m, err
		}
	}
	if len(m.Payload) > maxPayload {
		return m, &eventstore.InvalidError{Field: "payload", Reason: fmt.Sprintf("%d bytes: at most %d", len(m.Payload), maxPayload)}
	}
	if err := eventstore.CheckHeaders("headers", m.Headers); err != nil {
		return m, err
	}
	m.Headers = maps.Clone(m.Headers)
	return m, nil
}

// Route says to which topics an event goes: one entry each. A nil Route makes no entries, so that a service
// that only reads its log grows no outbox.
type Route func(stream string, d eventstore.Draft) []string

// ByCategory routes an event of stream "review-42-ann" to topic "review".
func ByCategory(stream string, _ eventstore.Draft) []string {
	return []string{eventstore.Category(stream)}
}

// Topics asks the route for every draft and refuses with *eventstore.InvalidError a topic that no provider
// could store. A topic named twice for one draft counts once.
func (r Route) Topics(stream string, drafts []eventstore.Draft) ([][]string, error) {
	topics := make([][]string, len(drafts))
	if r == nil {
		return topics, nil
	}
	for i := range drafts {
		for _, topic := range r(stream, drafts[i]) {
			if err := eventstore.CheckText("topic", topic, eventstore.MaxIDBytes); err != nil {
				return nil, err
			}
			if !slices.Contains(topics[i], topic) {
				topics[i] = append(topics[i], topic)
			}
		}
	}
	return topics, nil
}
