package eventstore

import (
	"context"
	"errors"
	"reflect"
	"strings"
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

// JoinID joins parts to one aggregate id, such as "42" and "ann" to "42-ann". Different parts
// give different ids: a "-" inside a part becomes "~-", and a "~" becomes "~~". SplitID is the
// inverse.
func JoinID(parts ...string) string {
	var b strings.Builder
	for i, p := range parts {
		if i > 0 {
			b.WriteByte('-')
		}
		for j := range len(p) {
			if p[j] == '-' || p[j] == '~' {
				b.WriteByte('~')
			}
			b.WriteByte(p[j])
		}
	}
	return b.String()
}

// SplitID returns the parts of an id that JoinID made. Another id, with a "~" before something
// other than "-" or "~", is an error.
func SplitID(id string) ([]string, error) {
	var parts []string
	var b strings.Builder
	for i := 0; i < len(id); i++ {
		switch c := id[i]; c {
		case '-':
			parts = append(parts, b.String())
			b.Reset()
		case '~':
			i++
			if i == len(id) || id[i] != '-' && id[i] != '~' {
				return nil, errors.New(`split id: "~" must be followed by "-" or "~"`)
			}
			b.WriteByte(id[i])
		default:
			b.WriteByte(c)
		}
	}
	return append(parts, b.String()), nil
}

// StreamName returns "category-id". Stores check the category and the length when the name is
// used: the category must match ^[a-z][a-z0-9_]{0,40}$, and the name has at most 255 bytes.
func StreamName(category, id string) string { return category + "-" + id }

// TypeEnded is the stored name of Ended.
const TypeEnded = "kinora.ended"

// Ended is the last event of a stream, which ends it for ever. Return it last:
//
//		repo.Update(ctx, id, func(r *Review) ([]any, error) { return []any{Withdrawn{}, eventstore.Ended{}}, nil })
//
//	  - After it, every append to the stream is ErrStreamEnded, also a concurrent one.
//	  - Every table of types has it. The route publishes it like the other events of the stream.
//	  - A projector whose read model has rows of the stream handles it like any event, with
//	    projector.On of an Event[Ended], and deletes them. It gets the ends of all categories that it reads.
//	    Handlers of an interface do not get it.
//	  - Apply of an aggregate gets it too. Load of a stream that has ended still returns the aggregate; once
//	    the stream is archived, only Ended was applied to it.
//	  - Archive deletes the events before it. Then readers of the log, and so a rebuild, get only Ended: its
//	    handler must accept that there are no rows.
type Ended struct{}

var endedType = reflect.TypeFor[Ended]()

var (
	// ErrStreamEnded: the stream has ended, so nothing can be appended to it.
	ErrStreamEnded = errors.New("the stream has ended")
	// ErrNotEnded: only the events of a stream that has ended can be archived.
	ErrNotEnded = errors.New("the stream has not ended: append Ended first")
	// ErrNotPassed: projectors have not applied the events that are to be archived. The error names them.
	ErrNotPassed = errors.New("projectors have not applied the events of the stream")
)

// ArchiveOptions are the options of Archive. The zero value is the default.
type ArchiveOptions struct {
	// Ignore are projectors that need not have passed the stream: those that no longer run, and those
	// whose checkpoint is in another database, such as Redis. For these, ask Projector.Wait before.
	Ignore []string
}

// ends reports whether the last of the events is Ended.
func ends(events []any) bool {
	return len(events) > 0 && reflect.TypeOf(events[len(events)-1]) == endedType
}
