package model

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Receiver makes messages of what brokers deliver, now or before they were parked.
type Receiver struct {
	Host   *Host
	Decode Decode
	// Untrusted: a program that may publish can choose every part of a message: its id, its ordering key
	// and its position too. So the event is read from the log before the lane and the handlers of a delivery
	// are chosen.
	Untrusted bool
	Events    provider.Log // in which it looks; nil: there is none
}

// Receive returns a delivery that a number of projectors share. Without a decoder, messages of other software are malformed.
func (r *Receiver) Receive(topic string, m *message.Message, projectors int) *Received {
	d := &Received{Topic: topic, Msg: m, acked: m, ID: m.UUID}
	if d.IsForeign = r.Decode != nil && !isOwn(m.Metadata); d.IsForeign {
		d.decode(r.Decode)
	} else {
		d.Raw, d.Malformed = outbox.ParseWatermill(m)
		d.Key = cmp.Or(m.Metadata[outbox.HeaderKey], m.Metadata[provider.HeaderStream])
	}
	d.open.Store(int32(projectors))
	return d
}

// Take is take, which it repeats until ctx ends.
func (r *Receiver) Take(ctx context.Context, all []*Received) {
	for tries := 1; ctx.Err() == nil; tries++ {
		err := r.take(ctx, all)
		if err == nil {
			return
		}
		delay, _ := r.Host.Retry.Delay(tries)
		r.Host.Report(slog.LevelWarn, "events of deliveries not read", err, "messages", len(all), "tries", tries, "again_in", delay)
		Wait(ctx, delay)
	}
}

// take makes deliveries those of the events of the log that have their ids, and rejects the others. It may also
// be called with parked messages: then it rejects only those that were rejected before.
func (r *Receiver) take(ctx context.Context, all []*Received) error {
	ctx, cancel := r.Host.Limited(ctx)
	defer cancel()
	ids := make([]string, len(all))
	for i, d := range all {
		ids[i] = d.Msg.UUID
	}
	events, err := r.Events.LogEvents(ctx, ids)
	if err != nil {
		return err
	}
	id := r.Host.LogID.Load()
	if id == nil { // there is no reader
		one, err := r.Events.LogID(ctx)
		if err != nil {
			return err
		}
		id = &one
	}
	for _, d := range all {
		again := d.wasRejected()
		if raw, ok := events[d.Msg.UUID]; ok {
			d.take(raw, id.String())
		} else if !d.IsParked || again {
			d.reject()
		}
	}
	return nil
}

// Parked returns parked messages as they were delivered, or with their events of the log: with Untrusted,
// and if they were rejected.
func (r *Receiver) Parked(ctx context.Context, rows []provider.Parked) ([]*Received, error) {
	all, ask := make([]*Received, len(rows)), []*Received(nil)
	for i, row := range rows {
		m := message.NewMessage(row.MessageID, row.Payload)
		m.Metadata = row.Headers
		if id, ok := row.Headers[headerUUID]; ok {
			m.UUID = id
		}
		all[i] = r.Receive(row.Topic, m, 1)
		all[i].IsParked = true
		if rejected := all[i].wasRejected(); rejected && r.Events == nil {
			all[i].reject()
		} else if rejected || r.Untrusted {
			ask = append(ask, all[i])
		}
	}
	if len(ask) == 0 {
		return all, nil
	}
	return all, r.take(ctx, ask)
}

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
	h = maps.Collect(maps.All(h)) // not nil
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

func (d *Received) wasRejected() bool {
	_, rejected := d.Msg.Metadata[headerUnknown]
	return rejected
}

// FindPlaces sets the positions of deliveries in the log. Events of another log have none. For an event that was
// published without a position, or before this log was restored or moved, the log is asked. Those that the log
// no longer has are to be set aside.
func (h *Host) FindPlaces(ctx context.Context, msgs []*Message) error {
	own := *h.LogID.Load()
	named := own.String()
	var unknown []*Message
	var ids []string
	for _, m := range msgs {
		switch log := m.Msg.Metadata[provider.HeaderLog]; {
		case m.Malformed != nil, m.IsForeign, m.IsUnknown:
		case log == named:
			m.Position = m.Raw.Position
		default:
			if lineage, _, of := strings.Cut(log, "/"); !of || lineage == own.Lineage {
				unknown, ids = append(unknown, m), append(ids, m.ID)
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	places, err := h.Log.LogPlaces(ctx, ids)
	if err != nil {
		return err
	}
	for _, m := range unknown {
		place, ok := places[m.ID]
		m.Position = place.Position
		if !ok && m.Msg.Metadata[provider.HeaderLog] != "" && m.Aside == nil {
			m.Aside = &Aside{Cause: ErrNoEvent, Attempts: 1}
		}
	}
	return nil
}

// OfEarlierLog reports whether a message was published from this log before it was restored or moved.
func (h *Host) OfEarlierLog(m *Message) bool {
	own, log := *h.LogID.Load(), m.Msg.Metadata[provider.HeaderLog]
	lineage, _, named := strings.Cut(log, "/")
	return !m.IsForeign && !m.IsUnknown && named && lineage == own.Lineage && log != own.String()
}
