package projector

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
)

// delivery is one message on its way through one projector.
type delivery struct {
	*Runner
	ctx       context.Context // ends when the runner is told to stop: no new attempt begins
	hard      context.Context // ends when the drain is over: what runs is broken off
	member    *member
	topic     string
	msg       *message.Message
	raw       eventstore.Raw
	malformed error       // why there is no raw
	halt      func(error) // ends the runner
}

// at is the delivery's attempt at a handler.
func (d *delivery) at(h *bound) Attempt {
	a := Attempt{Projector: d.member.name, MessageID: d.msg.UUID}
	if h != nil {
		a.Handler, a.Was, a.Takes = h.name, h.was, h.types
	}
	if d.member.parking == ParkKey {
		a.Key = laneOf(d.msg)
	}
	return a
}

// handle brings the message through one handler, by effect or by parking. It returns false where the runner
// stopped first: the message must not be acked.
func (d *delivery) handle(h *bound) bool {
	a := d.at(h)
	run := tries{delivery: d, handler: h, attempt: a}
	defer run.release()
	for n := 1; ; n++ { // of any outcome: how long to wait
		v, err := run.once(nil)
		class := ClassOf(err)
		switch {
		case err == nil && v == Clear:
			return true
		case err == nil && v == Settled:
			return d.settled(h)
		case err == nil: // held
			if err = d.parkBehind(a); err == nil {
				return true
			} else if errors.Is(err, ErrNotHeld) { // not any more
				n--
				continue
			}
		case d.hard.Err() != nil, class == Shutdown:
			return false
		case v == Suspect: // it has ended as many processes as it may
			return run.park(run.attempts, err)
		case class == PermanentClass:
			return run.park(run.attempts+1, err)
		case class == UnknownClass:
			if counted := run.count(); counted != nil {
				err = counted // away just now: it counts the next time
			} else if d.cfg.Retry.Spent(run.attempts) {
				return run.park(run.attempts, err)
			}
		}
		run.release()
		if !d.pause(h.name, run.attempts, n, err) {
			return false
		}
	}
}

// setAside parks a message that did not get as far as a handler. Where that halts the runner, one that was skipped meanwhile is
// settled.
func (d *delivery) setAside(cause error) bool {
	for n := 1; d.member.parking == Halt && d.msg.UUID != ""; n++ {
		a := d.at(nil)
		v, err := d.names.begin(d.hard, a)
		if err == nil && v == Settled {
			return d.settled(nil)
		}
		if err == nil {
			if v == Clear {
				d.names.end(a, true)
			}
			break
		}
		if d.hard.Err() != nil || !d.pause("", 0, n, err) {
			return false
		}
	}
	_, acked := d.park(nil, 1, cause)
	return acked
}

// settled is for a message that has been set aside before; h is nil where it did not get as far as a handler.
func (d *delivery) settled(h *bound) bool {
	name := ""
	if h != nil {
		name = h.name
	}
	if d.member.parking != Halt {
		return true
	}
	for n := 1; ; n++ {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(d.msg.Context()), d.cfg.Timeout)
		parked, err := d.member.parkedCount(ctx, d.member.name)
		cancel()
		switch {
		case err == nil && parked > 0:
			d.halt(fmt.Errorf("runner: %w: %s", ErrHalted, d.member.name))
			return false
		case err == nil:
			return true
		case !d.pause(name, 0, n, err):
			return false
		}
	}
}

// pause waits before the next try. It returns false where the runner stopped meanwhile.
func (d *delivery) pause(handler string, counted, tries int, err error) bool {
	delay, _ := d.cfg.Retry.Delay(tries) // never fails: tries ≥ 1, and NewRunner checked the schedule
	if d.cfg.Observer.Retried != nil {
		d.cfg.Observer.Retried(handler, ClassOf(err), counted, delay)
	}
	d.report("again", handler, err, "tries", tries, "again_in", delay)
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-d.ctx.Done():
		return false
	}
}

// parked is the message as it is set aside.
func (d *delivery) parked(h *bound, attempts int, class Class, code string) Parked {
	p := Parked{
		Projector: d.member.name, MessageID: d.msg.UUID, Topic: d.topic, Key: laneOf(d.msg), Type: d.msg.Metadata[outbox.HeaderType],
		Holds: d.member.parking == ParkKey, Payload: d.msg.Payload, Headers: d.msg.Metadata,
		Class: class, Code: code, Attempts: attempts, Version: d.cfg.Version,
	}
	if h != nil {
		p.Handler = h.name
	}
	return p
}

// park sets the message aside, with all that came with it, and tries that until it succeeds; h is nil where it did
// not get as far as a handler. It is not parked where the runner stopped first. It is not acked then, nor where the runner stops for
// it: it comes again after somebody has resolved it, which only its id can tell, so that one without is acked.
func (d *delivery) park(h *bound, attempts int, cause error) (parked, acked bool) {
	p := d.parked(h, attempts, ClassOf(cause), codeOf(cause))
	for tries := 1; ; tries++ {
		err := d.unit(Work{Projector: p.Projector, Park: []Parked{p}, Forget: []Attempt{d.at(h)}, Done: []Attempt{d.at(h)}, Runner: d.names.runner})
		if err == nil {
			break
		}
		if d.hard.Err() != nil || !d.pause(p.Handler, attempts, tries, err) {
			return false, false
		}
	}
	d.report("parked", p.Handler, cause, "attempts", attempts)
	if d.cfg.Observer.Parked != nil {
		d.cfg.Observer.Parked(p.Projector, p.Handler, p.Class, p.Code)
	}
	if d.member.parking == Halt {
		d.halt(fmt.Errorf("runner: %w: %s: %w", ErrHalted, p.Projector, cause))
		return true, p.MessageID == ""
	}
	return true, true
}

// parkBehind sets the message aside behind an earlier one of its key.
func (d *delivery) parkBehind(a Attempt) error {
	p := d.parked(nil, 0, HeldClass, "")
	p.Handler = a.Handler
	err := d.unit(Work{Projector: p.Projector, Park: []Parked{p}, Behind: &a})
	if err == nil && d.cfg.Observer.Parked != nil {
		d.cfg.Observer.Parked(p.Projector, p.Handler, p.Class, p.Code)
	}
	return err
}

// unit records w, and no handler's effect.
func (d *delivery) unit(w Work) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.msg.Context()), d.cfg.Timeout)
	defer cancel()
	defer context.AfterFunc(d.hard, cancel)()
	crash.Point("park: before")
	err := d.member.record(ctx, w)
	crash.Point("park: after")
	return err
}

func (d *delivery) report(what, handler string, err error, more ...any) {
	attrs := []any{"projector", d.member.name, "handler", handler, "topic", d.topic, "message_id", d.msg.UUID,
		"type", d.raw.Type, "class", ClassOf(err).String(), "code", codeOf(err)}
	attrs = append(attrs, more...)
	if d.cfg.LogErrors {
		attrs = append(attrs, "err", err)
	}
	d.log.Warn(what, attrs...)
}

// outputs is the name space of the ids of handlers' output.
var outputs = uuid.MustParse("8f0e0f6c-0f57-5a5e-9c53-2d7e0a4b9a11")

// caused completes a handler's output: stable ids, the cause's key, the cause itself, as far as these can be told: a message of
// anybody's may have come with what is no key and no header. What the handler returned stays as it is, as that may be its own.
func caused(out []outbox.Message, handler string, cause eventstore.Raw) []outbox.Message {
	out = slices.Clone(out)
	for i := range out {
		m := &out[i]
		if m.ID == "" {
			m.ID = uuid.NewSHA1(outputs, []byte(handler+"\x00"+cause.ID+"\x00"+strconv.Itoa(i))).String()
		}
		if m.Key == "" && eventstore.CheckText("key", cause.Stream, eventstore.MaxIDBytes) == nil {
			m.Key = cause.Stream
		}
		h := maps.Clone(m.Headers)
		if h == nil {
			h = map[string]string{}
		}
		for name, value := range map[string]string{
			outbox.HeaderCausation:   cause.ID,
			outbox.HeaderCorrelation: cause.Metadata.CorrelationID,
			outbox.HeaderTraceparent: cause.Metadata.Traceparent,
		} {
			if _, ok := h[name]; ok || value == "" {
				continue
			}
			if h[name] = value; eventstore.CheckHeaders("headers", h) != nil {
				delete(h, name)
			}
		}
		m.Headers = h
	}
	return out
}
