package outbox

import (
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
)

// Header names: the wire form, in both directions. The payload is the event's data as it is.
const (
	HeaderType        = "kinora_type"        // the event's stored name; a message without it is no event
	HeaderSchema      = "kinora_schema"      // its schema version
	HeaderStream      = "kinora_stream"      // its stream
	HeaderVersion     = "kinora_version"     // its version in the stream
	HeaderKey         = "kinora_key"         // the ordering key: for brokers, the partition key
	HeaderRecordedAt  = "kinora_recorded_at" // RFC 3339 with nanoseconds, UTC
	HeaderCorrelation = "correlation_id"     // as Watermill's own middleware names it
	HeaderCausation   = "causation_id"
	HeaderTraceparent = "traceparent"
	HeaderActor       = "actor"
	headerExtra       = "extra_" // before each key of Metadata.Extra
)

// ErrMalformed: a message that is not in the wire form. It can never be understood, however often it comes.
var ErrMalformed = errors.New("malformed message")

// FromEvent is the message of an event that gets this version in stream.
func FromEvent(stream string, version int64, d eventstore.Draft, topic string) Message {
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
		h[headerExtra+k] = v
	}
	return Message{ID: d.ID, Topic: topic, Key: stream, Payload: d.Data, Headers: h}
}

// Watermill returns the entry as it is published: the same bytes every time.
func (e Entry) Watermill() *message.Message {
	m := message.NewMessage(e.ID, e.Payload)
	maps.Copy(m.Metadata, e.Headers)
	m.Metadata[HeaderKey] = e.Key
	m.Metadata[HeaderRecordedAt] = e.CreatedAt.UTC().Format(time.RFC3339Nano)
	return m
}

// ParseWatermill reads what Entry.Watermill made. Headers that it does not know are left alone.
// An empty UUID, no type, or a number or time that is none is ErrMalformed; what could be read is returned.
func ParseWatermill(m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{
		ID: m.UUID, Stream: m.Metadata[HeaderStream], Type: m.Metadata[HeaderType], Schema: 1, Data: m.Payload,
		Metadata: eventstore.Metadata{
			CorrelationID: m.Metadata[HeaderCorrelation], CausationID: m.Metadata[HeaderCausation],
			Traceparent: m.Metadata[HeaderTraceparent], Actor: m.Metadata[HeaderActor],
		},
	}
	for k, v := range m.Metadata {
		if name, ok := strings.CutPrefix(k, headerExtra); ok {
			if raw.Metadata.Extra == nil {
				raw.Metadata.Extra = map[string]string{}
			}
			raw.Metadata.Extra[name] = v
		}
	}
	var err error
	if s := m.Metadata[HeaderSchema]; s != "" {
		if raw.Schema, err = strconv.Atoi(s); err != nil || raw.Schema < 1 {
			return raw, fmt.Errorf("%w: %s is not a schema version", ErrMalformed, HeaderSchema)
		}
	}
	if s := m.Metadata[HeaderVersion]; s != "" {
		if raw.Version, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Version < 1 {
			return raw, fmt.Errorf("%w: %s is not a version", ErrMalformed, HeaderVersion)
		}
	}
	if s := m.Metadata[HeaderRecordedAt]; s != "" {
		if raw.RecordedAt, err = time.Parse(time.RFC3339Nano, s); err != nil {
			return raw, fmt.Errorf("%w: %s is not a time", ErrMalformed, HeaderRecordedAt)
		}
	}
	if err := eventstore.CheckText("message id", raw.ID, eventstore.MaxIDBytes); err != nil {
		return raw, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if raw.Type == "" {
		return raw, fmt.Errorf("%w: no %s", ErrMalformed, HeaderType)
	}
	return raw, nil
}
