package outbox

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// Headers of a published event. The payload is the data of the event, unchanged.
const (
	HeaderType        = provider.HeaderType        // the stored name; without it a message is not an event
	HeaderSchema      = provider.HeaderSchema      // its schema version
	HeaderStream      = provider.HeaderStream      // its stream
	HeaderVersion     = provider.HeaderVersion     // its version in the stream
	HeaderPosition    = provider.HeaderPosition    // its position in the log
	HeaderLog         = provider.HeaderLog         // identifies the log
	HeaderKey         = provider.HeaderKey         // the ordering key, as partition key for brokers
	HeaderRecordedAt  = provider.HeaderRecordedAt  // RFC 3339 with nanoseconds, UTC
	HeaderCorrelation = provider.HeaderCorrelation // as Watermill's own middleware names it
	HeaderCausation   = provider.HeaderCausation
	HeaderTraceparent = provider.HeaderTraceparent
	HeaderActor       = provider.HeaderActor
)

// ToWatermill returns the message of an entry as relays publish it: the same bytes each time.
func ToWatermill(e Entry) *message.Message {
	m := message.NewMessage(e.ID, e.Payload)
	maps.Copy(m.Metadata, e.Headers)
	m.Metadata[HeaderKey] = e.Key
	m.Metadata[HeaderRecordedAt] = e.CreatedAt.UTC().Format(time.RFC3339Nano)
	return m
}

// ParseWatermill returns the event of a message that a relay published. It ignores unknown
// headers. An empty or invalid UUID, a missing type, and an invalid number or time are
// ErrMalformed; then the fields that could be read are returned too.
func ParseWatermill(m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{
		ID: m.UUID, Stream: m.Metadata[HeaderStream], Type: m.Metadata[HeaderType], Schema: 1, Data: m.Payload,
		Metadata: eventstore.Metadata{
			CorrelationID: m.Metadata[HeaderCorrelation], CausationID: m.Metadata[HeaderCausation],
			Traceparent: m.Metadata[HeaderTraceparent], Actor: m.Metadata[HeaderActor],
		},
	}
	for k, v := range m.Metadata {
		if name, ok := strings.CutPrefix(k, provider.HeaderExtra); ok {
			if raw.Metadata.Extra == nil {
				raw.Metadata.Extra = map[string]string{}
			}
			raw.Metadata.Extra[name] = v
		}
	}
	var err error
	if s := m.Metadata[HeaderSchema]; s != "" {
		if raw.Schema, err = strconv.Atoi(s); err != nil || raw.Schema < 1 {
			return raw, fmt.Errorf("%w: header %s is not a schema version", ErrMalformed, HeaderSchema)
		}
	}
	if s := m.Metadata[HeaderVersion]; s != "" {
		if raw.Version, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Version < 1 {
			return raw, fmt.Errorf("%w: header %s is not a version", ErrMalformed, HeaderVersion)
		}
	}
	if s := m.Metadata[HeaderPosition]; s != "" {
		if raw.Position, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Position < 1 {
			return raw, fmt.Errorf("%w: header %s is not a position", ErrMalformed, HeaderPosition)
		}
	}
	if s := m.Metadata[HeaderRecordedAt]; s != "" {
		if raw.RecordedAt, err = check.ParseTime(s); err != nil {
			return raw, fmt.Errorf("%w: header %s is %w", ErrMalformed, HeaderRecordedAt, err)
		}
	}
	if err := provider.CheckText("message id", raw.ID, provider.MaxIDBytes); err != nil {
		return raw, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if raw.Type == "" {
		return raw, fmt.Errorf("%w: header %s is missing", ErrMalformed, HeaderType)
	}
	return raw, nil
}
