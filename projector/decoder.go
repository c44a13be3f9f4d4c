package projector

import (
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
)

// Decoder returns the event in a message of other software. Package decode has decoders for common
// forms. A runner calls its decoder (RunnerConfig.Decode) for each message that has no header
// kinora_type, and again when the message was parked and is applied later.
//
// Of the event, a decoder sets:
//   - ID: the same on each delivery of the message, and on no other message of the projector. It has
//     1 to 255 bytes of UTF-8 without control characters. m.UUID is such an id only if the producer
//     sets it: some subscribers make a new one per delivery.
//   - Type: a stored name of the projector's types.
//   - Data: what the codec of the type decodes. That is JSON unless the type has its own codec.
//   - Stream: the ordering key. Empty means that of the header kinora_key, or none.
//   - Schema, Version, Metadata, RecordedAt: optional. A zero Schema means 1, a zero RecordedAt the
//     time in the header kinora_recorded_at, or none. RecordedAt is in the years 1 to 9999.
//
// Position is ignored: the event is in no log, so only its marker shows that it was applied, and it
// is not part of a rebuild.
//
// If the decoder returns an error or panics, or one of these is missing or invalid, the message is
// parked with the code malformed. A decoder must not retain m, must not change its payload, and must
// return soon: later messages of the topic wait. It may be called by several goroutines at once.
type Decoder func(topic string, m *message.Message) (eventstore.Raw, error)
