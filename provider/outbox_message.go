package provider

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// OutboxMessage is a message to be published.
type OutboxMessage struct {
	// ID is the same on every publication. Empty: a new UUIDv7; in a handler's output: derived from the event.
	ID    string
	Topic string // 1 to 255 bytes
	// Key is the ordering key. Empty: the message's own id, so that it waits for no other; in a handler's output: the
	// event's stream.
	Key     string
	Payload []byte            // published byte for byte; at most the provider's MaxPayload
	Headers map[string]string // at most 64 keys of 255 bytes, with values of 1024 bytes
	// OrderedKey makes other transactions that enqueue a message of this topic and key, with OrderedKey, wait until
	// this transaction ends. So entries of a key that spans streams are published in commit order. Without it that
	// order holds only if one transaction committed before the other enqueued, as is always the case in a stream.
	OrderedKey bool
}

// Normalize fills in an empty ID and Key and copies Headers. A message that no provider can store is an
// *eventstore.InvalidError. maxPayload ≤ 0 means DefaultMaxPayload. Providers call it before any SQL.
func (m OutboxMessage) Normalize(maxPayload int) (OutboxMessage, error) {
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
		maxPayload = DefaultMaxPayload
	}
	for _, f := range []struct{ name, value string }{{"message id", m.ID}, {"topic", m.Topic}, {"key", m.Key}} {
		if err := CheckText(f.name, f.value, MaxIDBytes); err != nil {
			return m, err
		}
	}
	if len(m.Payload) > maxPayload {
		return m, invalidf("payload", "%d bytes: at most %d", len(m.Payload), maxPayload)
	}
	if err := CheckHeaders("headers", m.Headers); err != nil {
		return m, err
	}
	m.Headers = maps.Clone(m.Headers)
	return m, nil
}

// Topics calls route for every draft and returns the topics of each. A topic that no provider can store is an
// *eventstore.InvalidError. A topic named twice for one draft counts once. A nil route has no topics.
func Topics(route func(stream string, d eventstore.Draft) []string, stream string, drafts []eventstore.Draft) ([][]string, error) {
	topics := make([][]string, len(drafts))
	if route == nil {
		return topics, nil
	}
	for i := range drafts {
		for _, topic := range route(stream, drafts[i]) {
			if err := CheckText("topic", topic, MaxIDBytes); err != nil {
				return nil, err
			}
			if !slices.Contains(topics[i], topic) {
				topics[i] = append(topics[i], topic)
			}
		}
	}
	return topics, nil
}

// Names of headers. The payload is the event's data, unchanged.
const (
	HeaderType        = "kinora_type"        // the event's stored name; a message without it is not an event
	HeaderSchema      = "kinora_schema"      // its schema version
	HeaderStream      = "kinora_stream"      // its stream
	HeaderVersion     = "kinora_version"     // its version in the stream
	HeaderKey         = "kinora_key"         // the ordering key: for brokers, the partition key
	HeaderRecordedAt  = "kinora_recorded_at" // RFC 3339 with nanoseconds, UTC
	HeaderCorrelation = "correlation_id"     // as Watermill's own middleware names it
	HeaderCausation   = "causation_id"
	HeaderTraceparent = "traceparent"
	HeaderActor       = "actor"
	HeaderExtra       = "extra_" // the prefix of each key of Metadata.Extra
)

// ErrMalformed: a message is not in the wire form. No retry can help.
var ErrMalformed = errors.New("malformed message")

// FromEvent returns the message of an event that gets this version in stream.
func FromEvent(stream string, version int64, d eventstore.Draft, topic string) OutboxMessage {
	h := map[string]string{
		HeaderType:    d.Type,
		HeaderSchema:  strconv.Itoa(d.Schema),
		HeaderStream:  stream,
		HeaderVersion: strconv.FormatInt(version, 10),
	}
	for name, value := range map[string]string{
		HeaderCorrelation: d.Metadata.CorrelationID,
		HeaderCausation:   d.Metadata.CausationID,
		HeaderTraceparent: d.Metadata.Traceparent,
		HeaderActor:       d.Metadata.Actor,
	} {
		if value != "" {
			h[name] = value
		}
	}
	for k, v := range d.Metadata.Extra {
		h[HeaderExtra+k] = v
	}
	return OutboxMessage{ID: d.ID, Topic: topic, Key: stream, Payload: d.Data, Headers: h}
}
