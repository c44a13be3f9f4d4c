package projector

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// unit is one transaction over messages of a worker.
type unit struct {
	*worker
	msgs    []*inbound
	intent  provider.Unit
	timer   *time.Timer                      // ends it; see run
	over    atomic.Bool                      // a handler runs, or took too long
	at      atomic.Int64                     // the message whose handler runs; -1: none
	handler atomic.Pointer[provider.Handler] // that runs; nil: none

	// What the last run of the handlers did.
	ran     bool   // a handler ran
	live    []bool // parked messages that are still there
	output  []outbox.Message
	parked  []*provider.Aside // by message; nil: not set aside
	behind  []provider.Lane   // lanes of deliveries that were parked behind others
	reports []func()          // for the observer, once it is committed
}

func (w *worker) newUnit(msgs []*inbound) *unit {
	u := &unit{worker: w, msgs: msgs, intent: provider.Unit{Projector: w.name, Messages: make([]provider.Message, len(msgs))}}
	u.at.Store(-1)
	for i, m := range msgs {
		u.intent.Messages[i] = provider.Message{ID: m.msg.UUID, Lane: m.lane, Handlers: m.handlers, Mark: m.mark, Parked: m.parked}
	}
	return u
}

// attempt runs the unit. alone: the caller holds the process.
func (u *unit) attempt(hard context.Context, alone bool) error {
	until := u.serial.Load()
	u.intent.Serial = until > 0 && len(u.msgs) > 1 && u.runner.cfg.Clock().UnixNano() < until
	if !alone {
		u.runner.process.RLock()
		defer u.runner.process.RUnlock()
		if u.intent.DryRun == nil && u.runner.suspicious(u.msgs) {
			u.intent.Careful = &provider.Worker{Runner: u.runner.id, Number: u.number}
			if err := u.nameThem(hard, *u.intent.Careful, u.msgs); err != nil {
				return err
			}
		}
	}
	return u.transact(hard)
}

// transact runs the unit in another goroutine, so that a handler that panics or calls runtime.Goexit ends its unit and
// nothing else, and one that does not return is left behind.
func (u *unit) transact(hard context.Context) error {
	ctx, cancel := context.WithCancel(hard)
	u.timer = time.AfterFunc(u.runner.cfg.Timeout, cancel)
	ended, err := false, error(errGoexit)
	done := make(chan struct{})
	u.inOther(func() {
		defer close(done)
		defer cancel()
		defer u.timer.Stop()
		defer func() {
			if p := recover(); p != nil {
				err = &Error{Class: ClassUnknown, Code: codePanic, Err: fmt.Errorf("panic: %v", p)}
			}
		}()
		err = u.do(ctx, u.intent, u.handle)
		ended = ctx.Err() != nil
	})
	if !returns(ctx, done) {
		u.leaveOther()
		if u.handler.Load() == nil { // it is the store that does not answer
			return errBegin
		}
		return errStuck
	}
	if err == errGoexit { //nolint:errorlint // nobody wraps it
		u.leaveOther()
	}
	if err == nil {
		return nil
	}
	if ended && hard.Err() == nil && !u.over.Load() && (provider.ClassOf(err) != ClassUnknown || provider.CodeOf(err) != provider.CodeDeadline) {
		return &Error{Class: ClassTransient, Code: "begin", Err: fmt.Errorf("the unit did not begin or commit within %s: %w", u.runner.cfg.Timeout, err)}
	}
	return u.classified(err)
}

// inOther runs f in the worker's other goroutine. There is one for all units: a new one would have to grow its stack each
// time, which was a tenth of the program's CPU.
func (w *worker) inOther(f func()) {
	if w.other == nil {
		w.other = make(chan func())
		go func(jobs <-chan func()) {
			for f := range jobs {
				f()
			}
		}(w.other)
	}
	w.other <- f
}

// leaveOther lets the other goroutine end, once what it runs returns.
func (w *worker) leaveOther() {
	if w.other != nil {
		close(w.other)
		w.other = nil
	}
}

// classified returns err with a class that says something about its message: a handler, or RunnerConfig.Classify, may
// have chosen another one.
func (u *unit) classified(err error) error {
	was, code := provider.ClassOf(err), provider.CodeOf(err)
	class := was
	if class == ClassUnknown && u.runner.cfg.Classify != nil {
		class = u.runner.cfg.Classify(err)
	}
	if class == ClassShutdown { // the runner has not stopped: the unit met its own deadline
		class, code = ClassUnknown, provider.CodeDeadline
	} else if class < ClassUnknown || class > ClassAmbiguous {
		class = ClassUnknown
	}
	if class == was {
		return err
	}
	return &Error{Class: class, Code: code, Err: err}
}

// handle runs the handlers, and says what is set aside. It may run again: then it begins from nothing.
func (u *unit) handle(ctx context.Context, call caller, found provider.Found) (c provider.Closing, err error) {
	u.ran, u.live, u.behind, u.reports, u.parked = false, found.Live, nil, nil, make([]*provider.Aside, len(u.msgs))
	stopped := map[provider.Lane]bool{} // lanes in which this unit has set a message aside
	for i, m := range u.msgs {
		var row *provider.Aside
		switch {
		case m.parked != nil && !found.Live[i]: // it is not as it was listed: somebody else has it
		case m.parked == nil && len(m.handlers) > 0 && !slices.Contains(found.Fresh[i], true):
			for j := range m.handlers {
				u.note(m, j, true, 0)
			}
		case m.parked == nil && found.Held[i] || stopped[m.lane]:
			row = u.row(i, found.Fresh[i], ClassHeld, "")
			if m.parked == nil && !stopped[m.lane] {
				u.behind = append(u.behind, m.lane)
			}
		case found.Suspect != nil && found.Suspect[i]:
			row = u.row(i, found.Fresh[i], ClassUnknown, codeCrashed)
			if m.parked != nil && m.parked.Class != ClassHeld {
				row.Parked.Attempts-- // it was counted, and has not run
			}
			row.Parked.Attempts = max(row.Parked.Attempts, 1)
		case m.aside != nil:
			row = u.failure(i, m, found.Fresh[i])
		default:
			found.Begin(i)
			out, err := u.run(ctx, call, i, m, found.Fresh[i])
			if err != nil {
				return c, err
			}
			c.Output = append(c.Output, out...)
		}
		if row != nil {
			stopped[m.lane] = true
			u.parked[i] = row
			c.Park = append(c.Park, *row)
		}
	}
	u.output = c.Output
	return c, nil
}

// run runs the handlers of a message that have not applied it yet.
//
// Each part of a unit has a limit of its own: the opening, each handler, and the commit. So a handler that had to wait for
// its turn has all of its own time, and a wait is never held against it.
func (u *unit) run(ctx context.Context, call caller, i int, m *inbound, fresh []bool) (out []outbox.Message, err error) {
	u.at.Store(int64(i))
	for j := range m.handlers {
		if !fresh[j] {
			u.note(m, j, true, 0)
			continue
		}
		each, began := u.runner.cfg.Timeout, u.runner.cfg.Clock()
		if !u.timer.Reset(sum(each, each)) { // the end of the unit, if the handler does not heed its own
			return nil, errBegin
		}
		u.ran = true
		u.handler.Store(&m.handlers[j])
		u.over.Store(true)
		crash.Point("handler: before")
		parent := ctx
		if values := m.msg.Context(); values != context.Background() {
			parent = handlerContext{ctx, context.WithoutCancel(values)}
		}
		inner, cancel := context.WithTimeout(parent, each)
		some, err := call(inner, m.handlers[j].Name, m.raw)
		u.over.Store(inner.Err() != nil) // a handler that returned in time is not to blame for the rest
		cancel()
		u.timer.Reset(each)
		crash.Point("handler: after")
		if err != nil {
			return nil, err
		}
		u.note(m, j, false, u.runner.cfg.Clock().Sub(began))
		out = append(out, some...)
	}
	u.at.Store(-1)
	u.handler.Store(nil)
	return out, nil
}

// note keeps for the observer that a handler has applied a message, now or before.
func (u *unit) note(m *inbound, handler int, before bool, took time.Duration) {
	cfg, name := &u.runner.cfg, m.handlers[handler].Name
	if cfg.Observer.Handled != nil {
		u.reports = append(u.reports, func() { cfg.Observer.Handled(name, before, m.waited(cfg.Clock()), took, nil) })
	}
	if cfg.Observer.Unmarked != nil && !before && u.opts.Markers && !u.marks {
		u.reports = append(u.reports, func() { cfg.Observer.Unmarked(name) })
	}
}

// failure describes a message that has failed alone.
func (u *unit) failure(i int, m *inbound, fresh []bool) *provider.Aside {
	row := u.row(i, fresh, provider.ClassOf(m.aside.cause), provider.CodeOf(m.aside.cause))
	p, retry := &row.Parked, u.runner.cfg.Retry
	p.Attempts, p.Handler, row.After = m.aside.attempts, m.aside.handler, -1
	if p.Class == ClassTransient && m.parked != nil && m.parked.Code == codeCrashed {
		p.Code = codeCrashed // the next attempt runs alone too
	}
	switch {
	case p.Class == ClassTransient: // not counted, so it waits as long again as it has been parked
		row.After = min(max(u.runner.cfg.Clock().Sub(p.At), retry.Base), retry.Max)
	case p.Class == ClassUnknown && !retry.Exhausted(p.Attempts):
		row.After, _ = retry.Delay(max(p.Attempts, 1))
	}
	return row
}

// row describes a message as it is set aside.
func (u *unit) row(i int, fresh []bool, class Class, code string) *provider.Aside {
	m := u.msgs[i]
	row := Parked{
		Projector: u.name, MessageID: m.msg.UUID, Topic: m.topic, Key: m.key, Lane: m.lane, Type: m.msg.Metadata[outbox.HeaderType],
		Payload: m.msg.Payload, Headers: m.msg.Metadata,
	}
	if m.parked != nil {
		row = *m.parked
	}
	row.Class, row.Code, row.Version = class, code, u.runner.cfg.Version
	named := len(row.Handlers) > 0
	for j, h := range m.handlers {
		if !named && fresh[j] { // the unit leaves its marker, so nothing but this says that it is to run
			row.Handlers = append(row.Handlers, h.Name)
		}
	}
	return &provider.Aside{Message: i, Parked: row}
}

// culprit is the index of the message that made the unit fail with err, or -1.
func (u *unit) culprit(err error) int {
	if e, ok := errors.AsType[*provider.MessageError](err); ok {
		return e.Message
	}
	return int(u.at.Load())
}

// grace is how long a handler may take to return after its context has ended, before it is left to itself.
const grace = 2 * time.Second

// returns waits until done is closed, and after the end of ctx no longer than the grace.
func returns(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	case <-time.After(grace):
		return false
	}
}

// sum is a + b, or as long as a duration can be.
func sum(a, b time.Duration) time.Duration { return a + min(b, math.MaxInt64-a) }
