package model

import (
	"context"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill/message"
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

// Receive returns a delivery that a number of projectors share.
func (r *Receiver) Receive(topic string, m *message.Message, projectors int) *Received {
	return Receive(topic, m, r.Decode, projectors)
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
