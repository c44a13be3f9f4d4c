package eventstore

import (
	"context"
	"errors"
	"time"
)

// Event is a stored event with its data decoded into T.
type Event[T any] struct {
	ID         string // also the message id; the same on every redelivery
	Stream     string // such as "review-42-ann"; of a message of other software, its ordering key
	Version    int64  // from 1, contiguous in the stream; 0 if it is not an event of a stream
	Position   int64  // in the log; 0 if the event came through a broker
	Type       string // the stored name; the current one after Decode
	Schema     int    // the schema version of Data, from 1; the current one after Decode
	Data       T      // of a Raw: the JSON value that was appended, perhaps formatted differently
	Metadata   Metadata
	RecordedAt time.Time // on the store's clock, UTC
}

// Raw is an event as it is stored: Data is JSON. A projector.Decoder may return Data of another form,
// for a type that has a Codec.
type Raw = Event[[]byte]

// Draft is an event that is not in a stream yet. Types.Encode returns drafts.
type Draft struct {
	ID       string // a UUID in canonical lower case; Encode creates a version 7
	Type     string // the stored name, 1 to 255 bytes
	Schema   int    // the schema version of Data, 1 to 32767
	Data     []byte // JSON of at most the provider's MaxPayload bytes; see provider.CheckJSON
	Metadata Metadata
}

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

// Aggregate is state that is computed from the events of a stream. Apply is called with the data
// of each event, in order, as a value of a registered type. It cannot fail, and must depend only
// on its receiver and its argument: no clock, no I/O.
type Aggregate interface{ Apply(event any) }

// Expected is the version that a stream must have for an append. A value of 0 or more is exact.
type Expected int64

const (
	Any      Expected = -1 // any version
	NoStream Expected = 0  // the stream must have no events
)

// Appended is the result of an append. Pass it to projector.Projector.Wait to wait for a read
// model.
type Appended struct {
	Stream   string
	Version  int64  // of the last event
	Position int64  // of the last event, in the log
	Count    int    // number of events: versions Version-Count+1 to Version; 0: none
	Log      string // identifies the log of the store; a copy of the database has the same
	Replayed bool   // the same event ids were stored before, and nothing was written
}

// From says where reading of a log begins. The zero value is the beginning. Set at most one field.
type From struct {
	Position int64     // after this position
	Time     time.Time // at the first event that was recorded at this time or later; in the years 1 to 9999
	Now      bool      // after the events that exist now
}

// LogFilter selects events of a log. The zero value selects all.
type LogFilter struct {
	Categories []string // nil means all, empty means none
	Types      []string // stored names; nil means all, empty means none
}

// ErrUnsafeLog: a log cannot be read here without the risk to skip events, for example on a
// replica.
var ErrUnsafeLog = errors.New("the log cannot be read safely here")
