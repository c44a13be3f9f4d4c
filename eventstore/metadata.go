package eventstore

import "context"

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
