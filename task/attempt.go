package task

import (
	"context"
	"encoding/json"
	"errors"
	"runtime/debug"
	"sync"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/provider"
)

// ending is how a run of a handler has ended.
type ending struct {
	again bool   // run again under the same claim: a slot was filled, or the direction has changed
	to    Status // the new status; empty: unchanged, or unknown
	code  string // of a failure
	step  string // the last one that the handler asked for
	err   error  // to be logged
}

type attempt[Tx any] struct {
	*engine[Tx]
	hold *held
	task Task // as it is stored, as far as this worker knows
	def  handler[Tx]
}

// handle runs a claimed task until it ends, fails, or waits.
func (e *engine[Tx]) handle(h *held) {
	defer e.letGo(h)
	t := h.task
	a := &attempt[Tx]{engine: e, hold: h, task: t}
	if h.before != nil { // it has lost the task
		<-h.before.done
		h.before = nil
	}
	began := now()
	for {
		end := a.run()
		if end.err != nil {
			e.report(t, end, int(h.attempts.Load()))
		}
		if !end.again {
			if end.to != "" && e.cfg.Observer.Ended != nil {
				e.cfg.Observer.Ended(t.Kind, end.to, end.code, now().Sub(began))
			}
			return
		}
	}
}

// run runs the handler once, and records how far the task is.
func (a *attempt[Tx]) run() ending {
	t := &a.task
	if a.stopping.Load() && !t.Spent { // released, a spent task would be run again
		return a.end(provider.TaskChange{To: Pending, Doubt: t.Doubt})
	}
	if t.Undo && (t.Result != nil || !t.Doubt && !hasBegun(t.State)) {
		return a.end(provider.TaskChange{To: Undone})
	}
	a.def = a.kinds.handlers[t.Kind]
	ctx, cancel := context.WithCancelCause(eventstore.WithMetadata(a.work, t.Metadata))
	defer cancel(nil)
	a.mu.Lock()
	a.hold.lose = cancel
	a.mu.Unlock()
	if a.hold.isOver() { // the process may have been stopped
		if end, goesOn := a.renew(); !goesOn {
			return end
		}
	}
	switch {
	case t.Spent:
		return a.end(provider.TaskChange{To: Abandoned, Code: provider.CodeVanished, Doubt: t.Doubt})
	case t.Result != nil: // of an operator, or of a handler whose task could not end
		return a.finish(ctx, nil, t.Result)
	case a.def.tx != nil && t.Undo:
		return a.end(provider.TaskChange{To: Undone})
	}
	clock := newLimit(a.cfg.Timeout, cancel)
	defer clock.pause()
	if a.def.tx != nil {
		return a.runTx(ctx, clock)
	}
	return a.handle(ctx, clock)
}

// renew extends the claim of the task. It returns false if the task cannot go on.
func (a *attempt[Tx]) renew() (ending, bool) {
	t, began := &a.task, now()
	got, err := a.change(provider.TaskChange{ID: t.ID, Token: t.Token, To: Claimed, After: a.cfg.Lease})
	switch {
	case err != nil:
		return ending{err: err}, false
	case !got.Applied:
		return a.refused(got), false
	}
	a.hold.renewed(began)
	if got.Now.Undo && !t.Undo { // canceled since the claim
		t.Undo, t.Result = true, nil
		return ending{again: true}, false
	}
	return ending{}, true
}

// handle runs a handler with steps.
func (a *attempt[Tx]) handle(ctx context.Context, clock *limit) ending {
	t := &a.task
	r := &Run[Tx]{w: a.engine, hold: a.hold, task: *t, clock: clock, asked: map[string]bool{}, notes: map[string]provider.Slot{}}
	out, err := a.guarded(ctx, clock, func() (json.RawMessage, error) { return a.def.run(ctx, r, t.Input) })
	r.dead.Store(true)
	if errors.Is(err, errStuck) {
		t.Doubt = true
		return a.fail(ctx, err)
	}
	if r.busy.Load() { // in another goroutine
		t.Doubt = true
		return a.fail(ctx, ErrMisuse)
	}
	clock.pause()
	*t = r.task
	return a.ran(ctx, r, out, err)
}

// hasBegun reports whether a step is recorded. Waits, answers and timeouts did nothing.
func hasBegun(state map[string]provider.Slot) bool {
	for _, s := range state {
		if s.Call > 0 && s.Out != nil && s.By == "" {
			return true
		}
	}
	return false
}

// ran decides what to do after the handler has returned.
func (a *attempt[Tx]) ran(ctx context.Context, r *Run[Tx], out json.RawMessage, err error) ending {
	t := &a.task
	if a.hold.misused.Load() {
		t.Doubt = true
		return a.fail(ctx, ErrMisuse)
	}
	if r.inside && !errors.Is(err, errGoexit) { // the handler has recovered
		err = errPanic
	}
	if r.stop != nil && (err == nil || isEnd(r.stop) || isUncounted(r.stop)) {
		err = r.stop
	}
	if cause := context.Cause(ctx); errors.Is(cause, errLost) || err != nil && errors.Is(cause, errStopping) {
		err = cause
	}
	return a.decide(ctx, r, out, err)
}

// decide decides what follows an error of a handler, or its result.
func (a *attempt[Tx]) decide(ctx context.Context, r *Run[Tx], out json.RawMessage, err error) ending {
	t := &a.task
	var decided *gaveUp
	gives := errors.As(err, &decided)
	if err == nil || gives || errors.Is(err, errWaiting) || errors.Is(err, errUndoing) {
		if changed := r.unasked(); changed != nil {
			err, gives = changed, false
		}
	}
	switch {
	case errors.Is(err, errLost):
		return ending{}
	case errors.Is(err, errFenced):
		return ending{again: true}
	case errors.Is(err, errStopping):
		return a.end(provider.TaskChange{To: Pending, Doubt: a.inDoubt(r)})
	case t.Undo && a.knowsUndos(r, err):
		return a.undo(ctx, r)
	case isPermanent(err):
		return a.failed(ctx, r, err)
	case gives:
		return a.giveUp(ctx, r, decided.code)
	case errors.Is(err, errWaiting):
		c, err := r.fill(*r.waits, r.waits.Open, provider.Slot{Call: r.calls})
		if err != nil {
			return a.failed(ctx, r, err)
		}
		return a.end(c)
	case err != nil:
		return a.failed(ctx, r, causeOf(ctx, err))
	}
	return a.finish(ctx, r, out)
}

// guarded calls f in a goroutine of its own, so that runtime.Goexit and a handler that does not
// return end nothing else.
func (a *attempt[Tx]) guarded(ctx context.Context, clock *limit, f func() (json.RawMessage, error)) (json.RawMessage, error) {
	type result struct {
		out json.RawMessage
		err error
	}
	done := make(chan result, 1)
	call := &pulse.Loop{} // added if f does not return
	a.live.Add(1)
	go func() {
		defer a.live.Add(-1)
		defer a.loops.Remove(call)
		r := result{err: errGoexit}
		defer func() {
			if p := recover(); p != nil {
				attrs := []any{"kind", a.task.Kind, "id", a.task.ID, "stack", string(debug.Stack())}
				if a.cfg.LogErrors {
					attrs = append(attrs, "panic", p)
				}
				a.log.Error("handler panicked", attrs...)
				r = result{err: errPanic}
			}
			done <- r
		}()
		crash.Point("task: before the handler")
		out, err := f()
		crash.Point("task: after the handler")
		r = result{out, err}
	}()
	ended := ctx.Done()
	for {
		select {
		case r := <-done:
			return r.out, r.err
		case <-ended: // also by a lost lease, or by the end of the drain
			ended = nil
			time.AfterFunc(grace, clock.abandon)
		case <-clock.stuck:
			a.loops.AddStuck(call, "task "+a.task.Kind, now(), func() bool { return len(done) > 0 })
			return nil, errStuck
		}
	}
}

func (e *engine[Tx]) observeStep(kind, step string, began time.Time, err error) {
	if e.cfg.Observer.Step != nil {
		e.cfg.Observer.Step(kind, step, now().Sub(began), err)
	}
}

func (e *engine[Tx]) observeFenced(kind string) {
	if e.cfg.Observer.Fenced != nil {
		e.cfg.Observer.Fenced(kind)
	}
}

// grace is how long a handler may take to return after its context has ended.
const grace = 2 * time.Second

// limit ends the context of a handler that takes too long. The time between two calls of start or
// pause counts, not that of the whole run.
type limit struct {
	timeout time.Duration
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	stuck   chan struct{} // closed if the handler does not return
	once    sync.Once     // closes stuck

	mu      sync.Mutex
	due     time.Time // zero while paused
	handler bool      // the time is that of the handler, not of the database
	ended   bool
}

func newLimit(timeout time.Duration, cancel context.CancelCauseFunc) *limit {
	l := &limit{timeout: timeout, cancel: cancel, stuck: make(chan struct{}), handler: true, due: now().Add(timeout)}
	l.timer = time.AfterFunc(timeout, l.end)
	return l
}

// end ends the context, unless the limit was paused or started again while its timer fired.
func (l *limit) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.due.IsZero() || now().Before(l.due) {
		return
	}
	l.ended = true
	if l.handler {
		l.cancel(errDeadline)
	} else {
		l.cancel(context.Canceled)
	}
	time.AfterFunc(grace, l.abandon)
}

func (l *limit) abandon() { l.once.Do(func() { close(l.stuck) }) }

// start gives the handler the whole timeout from now on.
func (l *limit) start() { l.again(true) }

// database gives the database the whole timeout from now on.
func (l *limit) database() { l.again(false) }

func (l *limit) again(handler bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handler, l.due = handler, now().Add(l.timeout)
	l.timer.Reset(l.timeout)
}

// pause stops the time. The context does not end after it has returned.
func (l *limit) pause() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Time{}
	l.timer.Stop()
}

// now measures durations.
func now() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times
