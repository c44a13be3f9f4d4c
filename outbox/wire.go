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

// HeaderKey is the header with the ordering key of a published message, for brokers with partitions. The
// payload of an event is its data, unchanged. Its other headers, such as provider.HeaderType, have what
// ParseWatermill returns.
const HeaderKey = provider.HeaderKey

// ToWatermill returns the message of an entry as relays publish it: the same bytes each time.
func ToWatermill(e Entry) *message.Message {
	m := message.NewMessage(e.ID, e.Payload)
	maps.Copy(m.Metadata, e.Headers)
	m.Metadata[HeaderKey] = e.Key
	m.Metadata[provider.HeaderRecordedAt] = e.CreatedAt.UTC().Format(time.RFC3339Nano)
	return m
}

// ParseWatermill returns the event of a message that a relay published. It ignores unknown
// headers. An empty or invalid UUID, a missing type, and an invalid number or time are
// ErrMalformed; then the fields that could be read are returned too.
func ParseWatermill(m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{
		ID: m.UUID, Stream: m.Metadata[provider.HeaderStream], Type: m.Metadata[provider.HeaderType], Schema: 1, Data: m.Payload,
		Metadata: eventstore.Metadata{
			CorrelationID: m.Metadata[provider.HeaderCorrelation], CausationID: m.Metadata[provider.HeaderCausation],
			Traceparent: m.Metadata[provider.HeaderTraceparent], Actor: m.Metadata[provider.HeaderActor],
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
	if s := m.Metadata[provider.HeaderSchema]; s != "" {
		if raw.Schema, err = strconv.Atoi(s); err != nil || raw.Schema < 1 {
			return raw, fmt.Errorf("%w: header %s is not a schema version", ErrMalformed, provider.HeaderSchema)
		}
	}
	if s := m.Metadata[provider.HeaderVersion]; s != "" {
		if raw.Version, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Version < 1 {
			return raw, fmt.Errorf("%w: header %s is not a version", ErrMalformed, provider.HeaderVersion)
		}
	}
	if s := m.Metadata[provider.HeaderPosition]; s != "" {
		if raw.Position, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Position < 1 {
			return raw, fmt.Errorf("%w: header %s is not a position", ErrMalformed, provider.HeaderPosition)
		}
	}
	if s := m.Metadata[provider.HeaderRecordedAt]; s != "" {
		if raw.RecordedAt, err = check.ParseTime(s); err != nil {
			return raw, fmt.Errorf("%w: header %s is %w", ErrMalformed, provider.HeaderRecordedAt, err)
		}
	}
	if err := provider.CheckText("message id", raw.ID, provider.MaxIDBytes); err != nil {
		return raw, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if raw.Type == "" {
		return raw, fmt.Errorf("%w: header %s is missing", ErrMalformed, provider.HeaderType)
	}
	return raw, nil
}
