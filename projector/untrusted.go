package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// With RunnerConfig.Untrusted, a program that may publish can choose every part of a message: its id, its ordering key
// and its position too. So the event is read from the log before the lane and the handlers of a delivery are chosen.

// headerUnknown is a header of a parked message whose id was not that of an event of the log. Runners without Untrusted,
// and tools, look for its event too before they apply it.
const headerUnknown = "kinora_unknown"

// unknownID precedes the id of such a message: if an event with the same id is appended later, it is another message.
const unknownID = "unknown "

func (r *Runner) checkUntrusted() error {
	switch {
	case !r.cfg.Untrusted || r.src.log != nil:
		return nil
	case r.events == nil:
		return errors.New("option Untrusted requires a log: set RunnerConfig.Log")
	case r.cfg.Decode != nil:
		return errors.New("option Untrusted takes events of the log only: give the topics that need Decode to another runner")
	}
	for _, p := range r.projections {
		if p.opts.Parking == Halt {
			return fmt.Errorf("projector %s: with Untrusted, every program that may publish could halt it: use ParkKey", p.name)
		}
	}
	return nil
}

// takeAhead takes the events of the deliveries that it receives from the log, all that wait with one read, and dispatches
// them. end ends it.
func (r *Runner) takeAhead(ctx context.Context, projections []*projection) (in chan *received, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	in = make(chan *received, min(cmp.Or(r.cfg.Batch, deliveryBatch), logBatch))
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			var all []*received
			select {
			case <-ctx.Done():
				return
			case d := <-in:
				all = append(all, d)
			}
			for range len(in) {
				all = append(all, <-in)
			}
			r.takeDelivered(ctx, all)
			for _, d := range all {
				if !dispatch(ctx, nil, d, projections) {
					return
				}
			}
		}
	})
	return in, func() { cancel(); taking.Wait() }
}

// takeDelivered is takeEvents, which it repeats until ctx ends.
func (r *Runner) takeDelivered(ctx context.Context, all []*received) {
	for tries := 1; ctx.Err() == nil; tries++ {
		err := r.takeEvents(ctx, all)
		if err == nil {
			return
		}
		delay, _ := r.cfg.Retry.Delay(tries)
		r.report(slog.LevelWarn, "events of deliveries not read", err, "messages", len(all), "tries", tries, "again_in", delay)
		wait(ctx, delay)
	}
}

// takeEvents makes deliveries those of the events of the log that have their ids, and rejects the others. It may also
// be called with parked messages: then it rejects only those that were rejected before.
func (r *Runner) takeEvents(ctx context.Context, all []*received) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	ids := make([]string, len(all))
	for i, d := range all {
		ids[i] = d.msg.UUID
	}
	events, err := r.events.LogEvents(ctx, ids)
	if err != nil {
		return err
	}
	id := r.logID.Load()
	if id == nil { // there is no reader
		one, err := r.events.LogID(ctx)
		if err != nil {
			return err
		}
		id = &one
	}
	for _, d := range all {
		_, again := d.msg.Metadata[headerUnknown]
		if raw, ok := events[d.msg.UUID]; ok {
			d.take(raw, id.String())
		} else if !d.isParked || again {
			d.reject()
		}
	}
	return nil
}

// take makes d a delivery of an event as a relay publishes it.
func (d *received) take(raw eventstore.Raw, log string) {
	m := message.NewMessage(raw.ID, message.Payload(raw.Data))
	m.Metadata = relayed(&raw, log)
	m.SetContext(d.msg.Context())
	d.msg, d.id, d.key, d.raw, d.malformed, d.isForeign = m, raw.ID, raw.Stream, raw, nil, false
}

// reject makes d a message that is set aside, and holds no key.
func (d *received) reject() {
	d.isUnknown, d.key = true, ""
	if d.id = unknownID + d.msg.UUID; provider.CheckText("message id", d.id, provider.MaxIDBytes) != nil {
		d.id = ""
	}
}

// receiveParked returns parked messages as they were delivered, or with their events of the log: with Untrusted, and
// if they were rejected.
func (r *Runner) receiveParked(ctx context.Context, rows []Parked) ([]*received, error) {
	all, ask := make([]*received, len(rows)), []*received(nil)
	for i, row := range rows {
		m := message.NewMessage(row.MessageID, row.Payload)
		m.Metadata = row.Headers
		if id, ok := row.Headers[headerUUID]; ok {
			m.UUID = id
		}
		all[i] = r.receive(row.Topic, m, 1)
		all[i].isParked = true
		if _, rejected := row.Headers[headerUnknown]; rejected && r.events == nil {
			all[i].reject()
		} else if rejected || r.cfg.Untrusted {
			ask = append(ask, all[i])
		}
	}
	if len(ask) == 0 {
		return all, nil
	}
	return all, r.takeEvents(ctx, ask)
}
