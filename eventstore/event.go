package eventstore

import (
	"context"
	"time"
)

// Event is a stored event with its data decoded into T.
type Event[T any] struct {
	ID         string // the message id: the same on every redelivery
	Stream     string // "review-42-ann"
	Version    int64  // 1-based, contiguous in the stream; 0 on a message that is no event of a stream
	Position   int64  // in the log; 0 where the event came through a broker
	Type       string // the stored name; the current one after Decode
	Schema     int    // schema version of Data, 1-based; the current one after Decode
	Data       T      // of a Raw: JSON, the same value that was appended; a store may write it in other bytes
	Metadata   Metadata
	RecordedAt time.Time // on the store's clock, UTC
}

// Raw is an event as stored: Data is JSON.
type Raw = Event[[]byte]

// Draft is an event that has no place in a stream yet. Types.Encode makes drafts.
type Draft struct {
	ID       string // a UUID in lower-case canonical form; Encode draws a version 7
	Type     string // stored name, 1 to 255 bytes
	Schema   int    // 1 to 32767
	Data     []byte // JSON, at most the provider's MaxPayload with its numbers in full: see CheckJSON
	Metadata Metadata
}

// Metadata travels with an event, and through a broker as headers.
// Each value is at most 1024 bytes of UTF-8 without control characters.
type Metadata struct {
	CorrelationID string            `json:"correlation_id,omitempty"` // of the business transaction
	CausationID   string            `json:"causation_id,omitempty"`   // of the message that caused this one
	Traceparent   string            `json:"traceparent,omitempty"`    // W3C trace context
	Actor         string            `json:"actor,omitempty"`          // who did it
	Extra         map[string]string `json:"extra,omitempty"`          // at most 48 keys of at most 240 bytes
}

type metadataKey struct{}

// WithMetadata makes Encode, and with it Repository.Update, put m on every draft.
func WithMetadata(ctx context.Context, m Metadata) context.Context {
	return context.WithValue(ctx, metadataKey{}, m)
}

// MetadataFrom returns what WithMetadata put there, or the zero value.
func MetadataFrom(ctx context.Context) Metadata {
	m, _ := ctx.Value(metadataKey{}).(Metadata)
	return m
}
