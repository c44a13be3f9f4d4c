package model

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

// Decode is projector.Decoder.
type Decode func(topic string, m *message.Message) (eventstore.Raw, error)

// headerUUID is a header of a parked message whose message id is not the UUID of the delivery. Its
// value is the UUID.
const headerUUID = "kinora_uuid"

// isOwn reports whether a message is in Kinora's wire form.
func isOwn(headers map[string]string) bool { return headers[provider.HeaderType] != "" }

// decode sets the event of a message of other software, or why it has none.
func (d *Received) decode(decode Decode) {
	raw, err := safely(decode, d.Topic, d.Msg)
	raw.Position, raw.Schema = 0, cmp.Or(raw.Schema, 1)
	raw.Stream = cmp.Or(raw.Stream, d.Msg.Metadata[outbox.HeaderKey])
	if raw.RecordedAt.IsZero() {
		raw.RecordedAt, _ = check.ParseTime(d.Msg.Metadata[provider.HeaderRecordedAt])
	}
	_, isTime := provider.StoredTime(raw.RecordedAt)
	invalid := provider.CheckText("message id", raw.ID, provider.MaxIDBytes)
	if invalid == nil {
		d.ID = raw.ID
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
	raw.ID = d.ID
	d.Raw, d.Malformed, d.Key = raw, err, raw.Stream
}

// safely calls a decoder with a copy of the message, which it cannot ack. A panic is an error.
func safely(decode Decode, topic string, m *message.Message) (raw eventstore.Raw, err error) {
	defer func() {
		if p := recover(); p != nil {
			raw, err = eventstore.Raw{}, fmt.Errorf("the decoder panicked: %v", p)
		}
	}()
	one := m.CopyWithContext()
	delete(one.Metadata, headerReplayed)
	delete(one.Metadata, headerUUID)
	delete(one.Metadata, headerUnknown)
	return decode(topic, one)
}

// deliveredHeaders returns the headers of a delivery for its parked row. Headers with which this
// package marks parked messages are not kept.
func (d *Received) deliveredHeaders() map[string]string {
	h := d.Msg.Metadata
	_, replayed := h[headerReplayed]
	_, named := h[headerUUID]
	_, unknown := h[headerUnknown]
	if !replayed && !named && !unknown && d.ID == d.Msg.UUID {
		return h
	}
	h = maps.Clone(h)
	if h == nil {
		h = map[string]string{}
	}
	delete(h, headerReplayed)
	delete(h, headerUUID)
	delete(h, headerUnknown)
	if d.ID != d.Msg.UUID {
		h[headerUUID] = d.Msg.UUID
	}
	if d.IsUnknown {
		h[headerUnknown] = "true"
	}
	return h
}

// headerUnknown is a header of a parked message whose id was not that of an event of the log. Runners without Untrusted,
// and tools, look for its event too before they apply it.
const headerUnknown = "kinora_unknown"

// unknownID precedes the id of such a message: if an event with the same id is appended later, it is another message.
const unknownID = "unknown "

// take makes d a delivery of an event as a relay publishes it.
func (d *Received) take(raw eventstore.Raw, log string) {
	m := message.NewMessage(raw.ID, message.Payload(raw.Data))
	m.Metadata = relayed(&raw, log)
	m.SetContext(d.Msg.Context())
	d.Msg, d.ID, d.Key, d.Raw, d.Malformed, d.IsForeign = m, raw.ID, raw.Stream, raw, nil, false
}

// reject makes d a message that is set aside, and holds no key.
func (d *Received) reject() {
	d.IsUnknown, d.Key = true, ""
	if d.ID = unknownID + d.Msg.UUID; provider.CheckText("message id", d.ID, provider.MaxIDBytes) != nil {
		d.ID = ""
	}
}

// wasRejected reports whether a message was rejected when it was parked.
func (d *Received) wasRejected() bool {
	_, rejected := d.Msg.Metadata[headerUnknown]
	return rejected
}
