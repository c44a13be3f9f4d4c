package eventstore

import "context"

// Metadata is stored with an event, and published as headers of its message.
// Each value has at most 1024 bytes of UTF-8 without control characters.
type Metadata struct {
	CorrelationID string `json:"correlation_id,omitempty"` // of the business transaction
	CausationID   string `json:"causation_id,omitempty"`   // of the message that caused this one
	Traceparent   string `json:"traceparent,omitempty"`    // W3C trace context
	Actor         string `json:"actor,omitempty"`          // who caused the event
	// Extra has at most 48 keys of at most 240 bytes each.
	Extra map[string]string `json:"extra,omitempty"`
}

type metadataKey struct{}

// WithMetadata returns a context with m. Types.Encode, and so Repository.Update, copies m to each
// draft. Messages and tasks that are added with the context get its correlation id, causation id and
// traceparent. A handler of a projector has a context with those of its event, and a task's handler with
// those of the context that the task was added with.
func WithMetadata(ctx context.Context, m Metadata) context.Context {
	return context.WithValue(ctx, metadataKey{}, m)
}

// MetadataFrom returns the Metadata of ctx (WithMetadata), or the zero value.
func MetadataFrom(ctx context.Context) Metadata {
	m, _ := ctx.Value(metadataKey{}).(Metadata)
	return m
}
