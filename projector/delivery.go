package projector

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// delivery is one message on its way through one projector.
type delivery struct {
	*Runner
	ctx    context.Context // ends when the runner is told to stop: no new attempt begins
	hard   context.Context // ends when the drain is over: what runs is broken off
	member *member
	topic  string
	msg    *message.Message
	raw    eventstore.Raw
}

// handle brings the message through one handler, by effect or by parking. It returns false where the runner
// stopped first: the message must not be acked.
func (d *delivery) handle(h bound) bool {
	tries := 0 // of any outcome: how long to wait
	for counted := 0; ; {
		err := d.attempt(h)
		if err == nil {
			return true
		}
		tries++
		class := ClassOf(err)
		switch {
		case d.hard.Err() != nil, class == Shutdown && d.ctx.Err() != nil:
			return false
		case class == PermanentClass:
			return d.park(h.name, counted+1, err)
		case class == UnknownClass, class == Shutdown: // of something else than this runner
			counted++
			if d.cfg.Retry.Spent(counted) {
				return d.park(h.name, counted, err)
			}
		}
		if !d.pause(h.name, counted, tries, err) {
			return false
		}
	}
}

// attempt runs the handler's unit of work once, in a goroutine of its own, so that a handler that panics or
// calls runtime.Goexit ends its own attempt and nothing else. Its context knows the message's values but not
// the end of the message's context, which some subscribers cancel at once when they close.
func (d *delivery) attempt(h bound) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(d.msg.Context()))
	defer cancel()
	defer context.AfterFunc(d.hard, cancel)()
	limit := newDeadline(d.cfg.Timeout, cancel)
	defer limit.stop()
	told := d.cfg.Observer.Handled
	var begin time.Time
	if told != nil {
		begin = d.cfg.Clock()
	}
	skipped, err := false, error(&Error{Class: UnknownClass, Code: "goexit", Err: errors.New("the handler called runtime.Goexit")})
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = &Error{Class: UnknownClass, Code: "panic", Err: fmt.Errorf("panic: %v", p)}
			}
		}()
		skipped, err = h.unit(ctx, d.raw, limit)
		if err != nil && d.cfg.Classify != nil && ClassOf(err) == UnknownClass {
			err = &Error{Class: d.cfg.Classify(err), Code: codeOf(err), Err: err}
		}
	}()
	<-done
	if err != nil && ctx.Err() != nil && d.hard.Err() == nil && !limit.began() {
		err = &Error{Class: Transient, Code: "begin", Err: fmt.Errorf("no transaction in %s: %w", d.cfg.Timeout, err)}
	}
	if told != nil {
		now := d.cfg.Clock()
		var waited time.Duration
		if !d.raw.RecordedAt.IsZero() {
			waited = now.Sub(d.raw.RecordedAt)
		}
		told(h.name, skipped, waited, now.Sub(begin), err)
	}
	if h.noop && err == nil && d.cfg.Observer.Unmarked != nil {
		d.cfg.Observer.Unmarked(h.name)
	}
	return err
}

// deadline limits each part of a unit of work by itself: waiting for the transaction, the handler, the commit.
// So a handler that had to wait for its turn has all of its own time, and a wait is never held against it.
type deadline struct {
	each  time.Duration
	timer *time.Timer // to the end of the unit's context
	begun atomic.Bool // the handler was reached
}

func newDeadline(each time.Duration, end func()) *deadline {
	return &deadline{each: each, timer: time.AfterFunc(each, end)}
}

// handler is the handler's context. One that does not heed its end meets the end of the whole unit later.
func (l *deadline) handler(ctx context.Context) (context.Context, func()) {
	l.begun.Store(true)
	l.timer.Reset(2 * l.each)
	ctx, cancel := context.WithTimeout(ctx, l.each)
	return ctx, func() {
		cancel()
		l.timer.Reset(l.each)
	}
}

func (l *deadline) began() bool { return l.begun.Load() }

func (l *deadline) stop() { l.timer.Stop() }

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

// park sets the message aside, with all that came with it, and tries that until it succeeds. It returns
// false where the runner stopped first.
func (d *delivery) park(handler string, attempts int, cause error) bool {
	m := Parked{
		Projector: d.member.name, Handler: handler, MessageID: d.msg.UUID, Topic: d.topic,
		Key: d.msg.Metadata[outbox.HeaderKey], Payload: d.msg.Payload, Headers: d.msg.Metadata,
		Class: ClassOf(cause), Code: codeOf(cause), Attempts: attempts,
	}
	for tries := 1; ; tries++ {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(d.msg.Context()), d.cfg.Timeout)
		unhook := context.AfterFunc(d.hard, cancel)
		err := d.member.park(ctx, m)
		unhook()
		cancel()
		if err == nil {
			d.report("parked", handler, cause, "attempts", attempts)
			if d.cfg.Observer.Parked != nil {
				d.cfg.Observer.Parked(d.member.name, handler, m.Class, m.Code)
			}
			return true
		}
		if d.hard.Err() != nil || !d.pause(handler, attempts, tries, err) {
			return false
		}
	}
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

// caused completes a handler's output: stable ids, the cause's key, the cause itself.
func caused(out []outbox.Message, handler string, cause eventstore.Raw) []outbox.Message {
	for i := range out {
		m := &out[i]
		if m.ID == "" {
			m.ID = uuid.NewSHA1(outputs, []byte(handler+"\x00"+cause.ID+"\x00"+strconv.Itoa(i))).String()
		}
		if m.Key == "" {
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
			if _, ok := h[name]; !ok && value != "" {
				h[name] = value
			}
		}
		m.Headers = h
	}
	return out
}
