package projector

import (
	"cmp"
	"errors"
	"fmt"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
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

// headerUUID is a header of a parked message whose message id is not the UUID of the delivery. Its
// value is the UUID.
const headerUUID = "kinora_uuid"

// isOwn reports whether a message is in Kinora's wire form.
func isOwn(headers map[string]string) bool { return headers[outbox.HeaderType] != "" }

// decode sets the event of a message of other software, or why it has none.
func (d *received) decode(decoder Decoder) {
	raw, err := safely(decoder, d.topic, d.msg)
	raw.Position, raw.Schema = 0, cmp.Or(raw.Schema, 1)
	raw.Stream = cmp.Or(raw.Stream, d.msg.Metadata[outbox.HeaderKey])
	if raw.RecordedAt.IsZero() {
		raw.RecordedAt, _ = check.ParseTime(d.msg.Metadata[outbox.HeaderRecordedAt])
	}
	_, isTime := provider.StoredTime(raw.RecordedAt)
	invalid := provider.CheckText("message id", raw.ID, provider.MaxIDBytes)
	if invalid == nil {
		d.id = raw.ID
	}
	switch {
	case err != nil:
	case invalid != nil:
		err = fmt.Errorf("the decoder returned no id: %w", invalid)
	case raw.Type == "":
		err = errors.New("the decoder returned no type")
	case raw.Schema < 1:
		err = fmt.Errorf("the decoder returned schema version %d", raw.Schema)
	case !isTime:
		err = errors.New("the decoder returned a time outside the years 1 to 9999")
	}
	raw.ID = d.id
	d.raw, d.malformed, d.key = raw, err, raw.Stream
}

// safely calls a decoder with a copy of the message, which it cannot ack. A panic is an error.
func safely(decoder Decoder, topic string, m *message.Message) (raw eventstore.Raw, err error) {
	defer func() {
		if p := recover(); p != nil {
			raw, err = eventstore.Raw{}, fmt.Errorf("the decoder panicked: %v", p)
		}
	}()
	one := m.CopyWithContext()
	delete(one.Metadata, headerReplayed)
	delete(one.Metadata, headerUUID)
	delete(one.Metadata, headerUnknown)
	return decoder(topic, one)
}

// deliveredHeaders returns the headers of a delivery for its parked row. Headers with which this
// package marks parked messages are not kept.
func (d *received) deliveredHeaders() map[string]string {
	h := d.msg.Metadata
	_, replayed := h[headerReplayed]
	_, named := h[headerUUID]
	_, unknown := h[headerUnknown]
	if !replayed && !named && !unknown && d.id == d.msg.UUID {
		return h
	}
	h = maps.Clone(h)
	if h == nil {
		h = map[string]string{}
	}
	delete(h, headerReplayed)
	delete(h, headerUUID)
	delete(h, headerUnknown)
	if d.id != d.msg.UUID {
		h[headerUUID] = d.msg.UUID
	}
	if d.isUnknown {
		h[headerUnknown] = "true"
	}
	return h
}

// lacksDecoder reports whether a decoder has read a parked message before, and this runner has none.
// The message is then left to a runner that has it.
func (p *projection) lacksDecoder(parked *Parked) bool {
	if parked == nil || p.runner.cfg.Decode != nil || isOwn(parked.Headers) || parked.Type == "" && len(parked.Handlers) == 0 {
		return false
	}
	p.runner.undecoded.Store(true)
	return true
}
