package eventstore

import (
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
