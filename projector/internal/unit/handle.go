package unit

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// handle runs the handlers, and returns their output and the messages to set aside. It may run
// again for the same unit.
func (a *attempt) handle(ctx context.Context, call model.Call, found provider.Found) (c provider.Closing, err error) {
	msgs := a.unit.Messages
	*a.done = Done{Unit: a.unit, At: -1, Fates: make([]Fate, len(msgs)), Rows: make([]*provider.Aside, len(msgs))}
	a.batches, a.begin = nil, found.Begin
	if err := a.setup(ctx, call); err != nil {
		return c, err
	}
	decided := fates{found: found}
	for i, m := range msgs {
		fate := decided.of(i, m)
		if fate == Run {
			if fate, err = a.decode(ctx, i, m, found.Fresh[i]); err != nil {
				return c, err
			}
		}
		if a.done.Fates[i] = fate; fate != Run {
			if row := a.pass(i, m, fate, found.Fresh[i], decided.stopped[m.Lane]); row != nil {
				decided.stop(m.Lane)
				c.Park = append(c.Park, *row)
			}
			continue
		}
		found.Begin(i)
		out, err := a.run(ctx, call, i, m, found.Fresh[i])
		if err != nil {
			return c, err
		}
		c.Output = append(c.Output, out...)
	}
	if err := a.flush(ctx, call); err != nil {
		return c, err
	}
	if a.unit.Intent.Switch != nil && len(c.Park) > 0 {
		for i := range c.Park {
			a.done.Parks = append(a.done.Parks, c.Park[i].Parked.Lane)
		}
		return c, ErrParks
	}
	a.done.Output = c.Output
	return c, nil
}

func (a *attempt) setup(ctx context.Context, call model.Call) error {
	if a.unit.Setup == "" {
		return nil
	}
	a.timer.Reset(a.limit())
	crash.Point("handler: before")
	s := model.Scope{Suffix: a.unit.Suffix}
	if a.unit.Setup == model.Created {
		s.Long = &atomic.Pointer[string]{}
	}
	_, err := call(model.WithScope(ctx, s), a.unit.Setup, nil, nil)
	crash.Point("handler: after")
	if s.Long != nil && s.Long.Load() != nil {
		err = &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: model.CheckSuffixed(*s.Long.Load())}
	}
	return err
}

// pass does what the fate of a message says whose handlers do not run. It returns the row of a message that
// is set aside. stopped: this unit has set another one of its lane aside.
func (a *attempt) pass(i int, m *model.Message, fate Fate, fresh []bool, stopped bool) *provider.Aside {
	switch fate {
	case Left, Unread:
		a.done.Left = true
	case Applied:
		for j := range m.Handlers {
			a.note(m, j, true, 0)
		}
	case Partly:
		m.Aside = &model.Aside{Cause: errPartly, Attempts: 1}
	case Behind:
		if m.Parked == nil && !stopped {
			a.done.Behind = append(a.done.Behind, m.Lane)
		}
	}
	if !fate.HasRow() {
		return nil
	}
	a.done.Rows[i] = a.row(i, m, fate, fresh)
	return a.done.Rows[i]
}

// unableAfter is when a message that this program is unable to apply is tried again if the database, whose schema is that of the
// version before, cannot store what the message needs.
const unableAfter = 10 * time.Second

func (a *attempt) row(i int, m *model.Message, fate Fate, fresh []bool) *provider.Aside {
	class, code := provider.ClassHeld, ""
	switch {
	case fate == Suspect:
		class, code = provider.ClassUnknown, model.CodeCrashed
	case fate != Behind:
		class, code = provider.ClassOf(m.Aside.Cause), provider.CodeOf(m.Aside.Cause)
	}
	b := provider.Build{Projector: a.unit.Intent.Projector, Generation: a.unit.Intent.Generation}
	row := &provider.Aside{Message: i, Parked: m.Row(b, fresh, class, code, a.Host.Version)}
	p := &row.Parked
	switch fate {
	case Behind:
		return row
	case Suspect:
		if m.Parked != nil && m.Parked.Class != provider.ClassHeld {
			p.Attempts-- // it was counted, but has not run
		}
		p.Attempts = max(p.Attempts, 1)
		return row
	case Unread:
		p.Lane = provider.LaneOfMessage(m.ID) // earlier events of its stream follow
	}
	retry := a.Host.Retry
	p.Attempts, p.Handler, p.Error, row.After = m.Aside.Attempts, m.Aside.Handler, TextOf(m.Aside.Cause), -1
	if class == provider.ClassTransient && m.Parked != nil && m.Parked.Code == model.CodeCrashed {
		p.Code = model.CodeCrashed // the next attempt runs alone too
	}
	switch {
	case class == provider.ClassTransient: // not counted: it waits as long again as it has been parked
		row.After = min(max(a.Host.Clock().Sub(p.At), retry.Base), retry.Max)
	case class == provider.ClassUnable:
		p.Needs, row.After = m.Aside.Needs, unableAfter
	case class == provider.ClassUnknown && !retry.Exhausted(p.Attempts):
		row.After, _ = retry.Delay(max(p.Attempts, 1))
	}
	return row
}

// decode decodes the event of message i before its handlers run. If that fails, the message is set aside: none
// of its handlers has run, so the unit goes on.
func (a *attempt) decode(ctx context.Context, i int, m *model.Message, fresh []bool) (Fate, error) {
	first := slices.Index(fresh, true)
	if first < 0 || m.IsDecoded() {
		return Run, nil
	}
	failed, err := a.decoding(ctx, i, &m.Handlers[first], func() error { return m.Decode(a.Projector.Types) })
	if err != nil { // the worker may have given this unit up
		return Run, err
	}
	fate := Run
	if failed != nil {
		fate, m.Aside = Failed, &model.Aside{Cause: failed, Handler: m.Handlers[first].Name, Attempts: 1}
		if m.Parked != nil {
			m.Aside.Attempts = max(m.Parked.Attempts, 1)
		}
	}
	a.at.Store(-1)
	a.handler.Store(nil)
	return fate, nil
}

// decoding calls a decoder for message i. One that panics or does not return is the fault of the message. It returns the
// error of the decoder, and that of the unit.
func (a *attempt) decoding(ctx context.Context, i int, h *provider.Handler, decode func() error) (failed, err error) {
	if each := a.Host.Timeout; !a.timer.Reset(Sum(each, each)) {
		return nil, errBegin
	}
	a.at.Store(int64(i))
	a.handler.Store(h)
	a.over.Store(true)
	failed = decode()
	a.over.Store(ctx.Err() != nil)
	a.timer.Reset(a.limit())
	return failed, ctx.Err()
}

// run runs the handlers of a message that have not applied it yet. Handlers of OnBatch run later.
func (a *attempt) run(ctx context.Context, call model.Call, i int, m *model.Message, fresh []bool) (out []outbox.Message, err error) {
	a.at.Store(int64(i))
	for j := range m.Handlers {
		if !fresh[j] {
			a.note(m, j, true, 0)
			continue
		}
		if err := a.flushBefore(ctx, call, i, m, &m.Handlers[j]); err != nil {
			return nil, err
		}
		if take := a.Projector.Batches[m.Handlers[j].Name]; take != nil {
			if err := a.collect(ctx, i, m, j, take); err != nil {
				return nil, err
			}
			continue
		}
		some, took, err := a.call(ctx, call, &m.Handlers[j], m.Replayed, m, nil)
		if err != nil {
			return nil, err
		}
		a.note(m, j, false, took)
		out = append(out, some...)
	}
	a.at.Store(-1)
	a.handler.Store(nil)
	if slices.Contains(fresh, true) {
		a.done.Applied = append(a.done.Applied, m)
		if !slices.Contains(fresh, false) {
			a.done.First = append(a.done.First, m)
		}
	}
	return out, nil
}

// contextOf returns a context of a message: with it as the cause, with the values of its delivery, and before them those of
// the observer.
func (a *attempt) contextOf(ctx context.Context, m *model.Message) context.Context {
	if values := m.Values(); values != nil {
		ctx = handlerContext{ctx, values}
		if a.values != nil {
			ctx = handlerContext{ctx, a.values}
		}
	}
	return model.WithCause(ctx, m.Raw)
}

// call runs one handler, and returns how long it took.
//
// The opening, each handler, and the commit have separate timeouts. So the time that a unit waits
// for others does not count for a handler.
func (a *attempt) call(
	ctx context.Context, call model.Call, h *provider.Handler, replayed bool, m *model.Message, events []any,
) (out []outbox.Message, took time.Duration, err error) {
	each, began := a.Host.Timeout, a.Host.Clock()
	if !a.timer.Reset(Sum(each, each)) { // ends the unit if the handler ignores its context
		return nil, 0, errBegin
	}
	a.Loop.Within(began, Sum(Sum(each, each), grace))
	a.done.Ran = true
	a.handler.Store(h)
	a.over.Store(true)
	crash.Point("handler: before")
	if m != nil {
		ctx = a.contextOf(ctx, m)
	}
	limited := withDeadline(model.WithScope(ctx, model.Scope{Suffix: a.unit.Suffix, Replayed: replayed}), each)
	out, err = call(limited, h.Name, m, events)
	a.over.Store(limited.end() != nil) // a handler that returned in time is not at fault
	a.timer.Reset(a.limit())
	crash.Point("handler: after")
	return out, a.Host.Clock().Sub(began), err
}

// note records for the observer that a handler has applied a message, now or before.
func (a *attempt) note(m *model.Message, handler int, before bool, took time.Duration) {
	h, name := a.Host, m.Handlers[handler].Name
	if h.Observer.Handled != nil {
		a.done.Reports = append(a.done.Reports, func() {
			h.Observer.Handled(name, before, m.Waited(h.Clock()), took, nil)
		})
	}
	if h.Observer.Unmarked != nil && !before && a.Projector.Rules.Markers && !a.Projector.Marks {
		a.done.Reports = append(a.done.Reports, func() { h.Observer.Unmarked(name) })
	}
}

// batch has the events that a handler of OnBatch gets in its next call.
type batch struct {
	handler  *provider.Handler
	replayed bool
	events   []any
	messages []int           // of each event: its message in the unit
	handlers []int           // of each event: the index of the handler in its message
	keys     map[string]bool // of the messages
}

// flushBefore runs the handlers of OnBatch that wait, if one of them has an event with the key of message
// i, and h is another one, or one of them has been replayed and the other has not.
func (a *attempt) flushBefore(ctx context.Context, call model.Call, i int, m *model.Message, h *provider.Handler) error {
	for _, b := range a.batches {
		if b.keys[m.OrderedBy()] && (b.handler.Name != h.Name || b.replayed != m.Replayed) {
			if err := a.flush(ctx, call); err != nil {
				return err
			}
			a.at.Store(int64(i))
			a.begin(i)
			return nil
		}
	}
	return nil
}

func (a *attempt) collect(ctx context.Context, i int, m *model.Message, j int, take model.Take) error {
	var e any
	failed, err := a.decoding(ctx, i, &m.Handlers[j], func() (err error) { e, err = take(a.Projector.Types, m); return err })
	if err = cmp.Or(failed, err); err != nil {
		return err
	}
	k := slices.IndexFunc(a.batches, func(b *batch) bool { return b.handler.Name == m.Handlers[j].Name && b.replayed == m.Replayed })
	if k < 0 {
		k = len(a.batches)
		a.batches = append(a.batches, &batch{handler: &m.Handlers[j], replayed: m.Replayed, keys: map[string]bool{}})
	}
	b := a.batches[k]
	b.events, b.messages, b.handlers = append(b.events, e), append(b.messages, i), append(b.handlers, j)
	b.keys[m.OrderedBy()] = true
	return nil
}

// noMessage is the argument of Found.Begin for statements that belong to several messages.
const noMessage = -1

// flush runs the handlers of OnBatch that wait, in the order of their first events.
func (a *attempt) flush(ctx context.Context, call model.Call) error {
	for _, b := range a.batches {
		at := noMessage
		if len(b.messages) == 1 {
			at = b.messages[0]
		}
		a.at.Store(int64(at))
		a.begin(at)
		_, took, err := a.call(ctx, call, b.handler, b.replayed, nil, b.events)
		if err != nil {
			return err
		}
		for k, i := range b.messages {
			a.note(a.unit.Messages[i], b.handlers[k], false, took)
		}
	}
	a.batches = nil
	a.at.Store(-1)
	a.handler.Store(nil)
	return nil
}

// Fate is what becomes of a message in a unit.
type Fate int

// The fates.
const (
	Run     Fate = iota // its handlers run
	Changed             // a parked message that has changed since it was listed: nothing
	Left                // to the reader of the log: nothing
	Unread              // left, but the reader does not read its type: set aside alone
	Applied             // its handlers have applied it before
	Skipped             // an operator has skipped it
	Partly              // a part of it was applied, and cannot be undone: set aside
	Behind              // parked behind others of its lane
	Suspect             // it may have crashed a process: set aside, and tried alone
	Failed              // set aside
)

// HasRow reports whether a message with this fate is set aside.
func (f Fate) HasRow() bool {
	return f == Unread || f == Partly || f == Behind || f == Suspect || f == Failed
}

// fates decides about the messages of a unit, in their order. No fate depends on a handler: one that
// fails ends the unit.
type fates struct {
	found   provider.Found
	stopped map[provider.Lane]bool // lanes in which this unit has set a message aside
}

func (f *fates) of(i int, m *model.Message) Fate {
	reports := func(all []bool) bool { return all != nil && all[i] }
	switch {
	case m.Parked != nil && !f.found.Live[i]:
		return Changed
	case reports(f.found.Left) && m.Aside != nil && len(m.Handlers) == 0:
		return Unread
	case reports(f.found.Left):
		return Left
	case m.Parked == nil && len(m.Handlers) > 0 && !slices.Contains(f.found.Fresh[i], true):
		return Applied
	case m.Skipped:
		return Skipped
	case reports(f.found.Partly):
		return Partly // it must not wait: what waits is applied again
	case m.Parked == nil && f.found.Held[i], f.stopped[m.Lane]:
		return Behind
	case reports(f.found.Suspect):
		return Suspect
	case m.Aside != nil:
		return Failed
	}
	return Run
}

func (f *fates) stop(lane provider.Lane) {
	if f.stopped == nil {
		f.stopped = map[provider.Lane]bool{}
	}
	f.stopped[lane] = true
}
