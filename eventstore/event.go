package eventstore

import "time"

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
