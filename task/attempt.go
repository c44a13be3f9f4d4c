package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
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

// attempt is one claim of a task.
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

// report logs an error of a task.
func (e *engine[Tx]) report(t Task, end ending, attempts int) {
	what, attrs := "task failed", []any{"kind", t.Kind, "id", t.ID}
	switch end.to {
	case Abandoned:
		what = "task abandoned"
	case Pending:
		what = "task released"
	case "":
		what = "task left to its lease"
	}
	if end.step != "" {
		attrs = append(attrs, "step", end.step)
	}
	e.log.Warn(what, e.attrs(end.err, append(attrs, "attempts", attempts, "code", end.code)...)...)
}

// confirm asks whether a refused change of a transaction was refused because of a change in the
// transaction itself, which was rolled back with it. Else it returns the task as it is stored.
func (e *engine[Tx]) confirm(t Task, got provider.TaskChanged) (own bool, stored provider.TaskChanged) {
	if !got.Late(t.Token) && !got.Now.Undo {
		return false, got
	}
	now, err := e.change(provider.TaskChange{ID: t.ID, Token: t.Token, To: Claimed, After: e.cfg.Lease})
	if err != nil || !now.Applied {
		return false, now
	}
	if now.Now.Undo { // canceled by another transaction
		got.Now.Status, got.Now.Token = Claimed, t.Token
		return false, got
	}
	return true, now
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
	known := false
	completed := t.Result != nil // by an operator, or before its end could be audited
	if a.def, known = a.kinds.handlers[t.Kind]; !known && !completed {
		return a.end(provider.TaskChange{To: Abandoned, Code: provider.CodeUnknown})
	}
	if _, ok := a.kinds.groups[t.GroupKind]; t.Group != "" && !ok {
		return a.end(provider.TaskChange{To: Abandoned, Code: codeUnknownGroup})
	}
	ctx, cancel := context.WithCancelCause(a.work)
	defer cancel(nil)
	a.mu.Lock()
	a.hold.lose = cancel
	a.mu.Unlock()
	if a.hold.isOver() { // the process may have been stopped
		began := now()
		got, err := a.change(provider.TaskChange{ID: t.ID, Token: t.Token, To: Claimed, After: a.cfg.Lease})
		switch {
		case err != nil:
			return ending{err: err}
		case !got.Applied:
			return a.refused(got)
		}
		a.hold.renewed(began)
	}
	switch {
	case t.Spent:
		return a.end(provider.TaskChange{To: Abandoned, Code: provider.CodeVanished})
	case completed:
		return a.finish(ctx, nil, t.Result)
	case a.def.tx != nil && t.Undo:
		return a.end(provider.TaskChange{To: Undone})
	}
	clock := newLimit(a.cfg.Timeout, cancel)
	defer clock.pause()
	if a.def.tx != nil {
		return a.runTx(ctx, clock)
	}
	r := &Run[Tx]{w: a.engine, hold: a.hold, task: *t, clock: clock, asked: map[string]bool{}, notes: map[string]Slot{}}
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

// hasBegun reports whether a handler has asked for a slot.
func hasBegun(state map[string]Slot) bool {
	for _, s := range state {
		if s.Call > 0 {
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
		c, err := r.fill(*r.waits, r.waits.Open, Slot{Call: r.calls})
		if err != nil {
			return a.failed(ctx, r, err)
		}
		return a.end(c)
	case err != nil:
		return a.failed(ctx, r, causeOf(ctx, err))
	}
	return a.finish(ctx, r, out)
}

// inDoubt reports whether a step may have begun that is not recorded: in this run, or in an earlier one
// that did not end in order.
func (a *attempt[Tx]) inDoubt(r *Run[Tx]) bool { return a.task.Doubt || r.open }

// knowsUndos reports whether a run in the direction of undo, which ended with err, has asked for every
// step that may have begun. An error of the handler itself ends such a run: without it, a task that
// always fails could not be undone.
func (a *attempt[Tx]) knowsUndos(r *Run[Tx], err error) bool {
	switch {
	case r.unasked() != nil, errors.Is(err, ErrChanged):
		return false
	case err == nil, errors.Is(err, errUndoing), isPermanent(err):
		return true
	}
	var decided *gaveUp
	return errors.As(err, &decided) || !isUncounted(err) && !a.task.Doubt
}

// failed is fail after a run of the handler.
func (a *attempt[Tx]) failed(ctx context.Context, r *Run[Tx], cause error) ending {
	a.task.Doubt = a.inDoubt(r)
	end := a.fail(ctx, cause)
	end.step = r.step
	return end
}

// guarded calls f in a goroutine of its own, so that runtime.Goexit and a handler that does not
// return end nothing else.
func (a *attempt[Tx]) guarded(ctx context.Context, clock *limit, f func() (json.RawMessage, error)) (json.RawMessage, error) {
	type result struct {
		out json.RawMessage
		err error
	}
	done := make(chan result, 1)
	a.live.Add(1)
	go func() {
		defer a.live.Add(-1)
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
			return nil, errStuck
		}
	}
}

// runTx runs the handler of DefineTx: its writes and the end of the task are committed together.
func (a *attempt[Tx]) runTx(ctx context.Context, clock *limit) ending {
	var got provider.TaskChanged
	_, err := a.guarded(ctx, clock, func() (json.RawMessage, error) {
		return nil, a.unit(ctx, clock, func(ctx context.Context, tx Tx) ([]outbox.Message, error) {
			out, ms, err := a.def.tx(ctx, tx, a.task.Input)
			clock.database()
			if err != nil {
				return nil, err
			}
			// In the transaction, so that there is no record of an end that the handler refused.
			if err := a.audit(ctx, Done, ""); err != nil {
				return nil, err
			}
			more, err := a.count(ctx, tx, provider.TaskChange{To: Done, Result: out}, &got)
			return append(ms, more...), err
		})
	})
	if errors.Is(err, errStuck) { // the handler may still write got
		return a.fail(ctx, err)
	}
	return a.finished(ctx, got, err)
}

// unitTries is how often a unit runs if it conflicts with other writers. The last conflict counts.
const unitTries = 20

// unit runs fn in a transaction. After a conflict it runs again at once: that is not the fault of
// the task. These runs take turns in this process, because units that conflicted once would do so
// again.
func (e *engine[Tx]) unit(ctx context.Context, clock *limit, fn func(ctx context.Context, tx Tx) ([]outbox.Message, error)) error {
	defer clock.start()
	err := e.unitOnce(ctx, clock, fn)
	if !errors.Is(err, eventstore.ErrConflict) {
		return err
	}
	clock.database()
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
		return err
	}
	for n := 1; n < unitTries && errors.Is(err, eventstore.ErrConflict) && ctx.Err() == nil; n++ {
		err = e.unitOnce(ctx, clock, fn)
	}
	return err
}

func (e *engine[Tx]) unitOnce(ctx context.Context, clock *limit, fn func(ctx context.Context, tx Tx) ([]outbox.Message, error)) error {
	clock.database()
	return e.db.Do(ctx, provider.Unit{}, func(ctx context.Context, tx Tx, _ provider.Found) (provider.Closing, error) {
		clock.start()
		ms, err := fn(ctx, tx)
		clock.database()
		return provider.Closing{Output: ms}, err
	})
}

// finish makes the task done. If it has a group, that is one transaction with the count of the group
// and, for the last task, the completion. r is nil if no handler ran.
func (a *attempt[Tx]) finish(ran context.Context, r *Run[Tx], out json.RawMessage) ending {
	c := provider.TaskChange{To: Done, Result: out}
	if r != nil {
		c.Slots = r.notes
	}
	end := a.finishGroup(c)
	if r != nil && end.again && a.task.Undo { // it was canceled: the handler need not run again
		r.task = a.task
		return a.undo(ran, r)
	}
	return end
}

func (a *attempt[Tx]) finishGroup(c provider.TaskChange) ending {
	if a.task.Group == "" {
		return a.end(c)
	}
	if err := a.audit(a.work, Done, ""); err != nil {
		return a.unrecorded(err, c.Result)
	}
	ctx, cancel := context.WithCancelCause(a.work)
	defer cancel(nil)
	clock := newLimit(a.cfg.Timeout, cancel)
	defer clock.pause()
	var got provider.TaskChanged
	_, err := a.guarded(ctx, clock, func() (json.RawMessage, error) {
		return nil, a.unit(ctx, clock, func(ctx context.Context, tx Tx) ([]outbox.Message, error) {
			return a.count(ctx, tx, c, &got)
		})
	})
	if errors.Is(err, errStuck) { // the handler may still write got
		return a.fail(ctx, err)
	}
	return a.finished(ctx, got, err)
}

// count makes the task done in tx. If it was the last one of its group, it completes the group.
func (a *attempt[Tx]) count(ctx context.Context, tx Tx, c provider.TaskChange, got *provider.TaskChanged) (ms []outbox.Message, err error) {
	c.ID, c.Token = a.task.ID, a.task.Token
	began := now()
	if *got, err = a.db.TasksIn(tx).Change(ctx, c); err != nil {
		return nil, err
	}
	if !got.Applied {
		return nil, errFenced
	}
	if got.Group == nil {
		return nil, nil
	}
	if observe := a.cfg.Observer.Counted; observe != nil {
		observe(got.Group.Kind, now().Sub(began))
	}
	if got.Group.Open > 0 {
		return nil, nil
	}
	crash.Point("group: before the completion")
	ms, err = a.kinds.groups[got.Group.Kind](ctx, tx, got.Group)
	if decided := (*gaveUp)(nil); errors.As(err, &decided) {
		err = &provider.Error{Code: codeMisuse, Err: errors.New("the completion of a group cannot give up")}
	}
	return ms, err
}

// finished returns the ending of a transaction that makes the task done.
func (a *attempt[Tx]) finished(ctx context.Context, got provider.TaskChanged, err error) ending {
	var decided *gaveUp
	var sink *auditError
	switch {
	case err == nil:
		return ending{to: Done}
	case errors.Is(err, errFenced):
		own, confirmed := a.confirm(a.task, got)
		if own {
			return a.fail(ctx, errOwnTask)
		}
		return a.refused(confirmed)
	case errors.As(err, &sink):
		return a.unrecorded(err, nil)
	case errors.As(err, &decided) && a.def.tx != nil && !errors.Is(context.Cause(ctx), errStopping): // nothing was written
		return a.end(provider.TaskChange{To: Undone, GiveUp: decided.code})
	}
	return a.fail(ctx, causeOf(ctx, err))
}

// giveUp turns the task to undo, and undoes its steps.
func (a *attempt[Tx]) giveUp(ctx context.Context, r *Run[Tx], code string) ending {
	c, err := r.fill(provider.TaskChange{To: Claimed, GiveUp: code, Doubt: a.inDoubt(r), Progress: true}, "", Slot{})
	if err != nil {
		return a.fail(ctx, err)
	}
	began := now()
	got, err := a.change(c)
	if err != nil {
		return ending{err: err}
	}
	r.stop = nil
	if err := r.changed(c, got, began); err != nil {
		return ending{}
	}
	r.task.Undo, r.task.Why, r.task.Doubt = true, code, c.Doubt
	if ctx.Err() != nil { // the undos need one that has not ended
		a.task = r.task
		return ending{again: true}
	}
	return a.undo(ctx, r)
}

// undo undoes the steps of the task, the last one first. If that fails for one, the earlier ones
// wait for it.
func (a *attempt[Tx]) undo(ctx context.Context, r *Run[Tx]) ending {
	r.stop = nil
	for i := len(r.undos) - 1; i >= 0; i-- {
		u := r.undos[i]
		name := provider.UndoSlot(u.step)
		if r.task.State[name].Filled() {
			continue
		}
		if a.stopping.Load() {
			a.task = r.task
			return a.end(provider.TaskChange{To: Pending})
		}
		_, err := a.guarded(ctx, r.clock, func() (json.RawMessage, error) {
			r.clock.start()
			if err := u.fn(ctx); err != nil {
				return nil, err
			}
			r.clock.pause()
			if r.task.State[name].Filled() { // recorded in its transaction
				return nil, nil
			}
			return nil, r.record(name, Slot{Out: json.RawMessage("true")})
		})
		if errors.Is(err, errStuck) {
			return a.fail(ctx, err)
		}
		a.task = r.task
		switch {
		case errors.Is(err, errLost):
			return ending{}
		case errors.Is(err, errFenced):
			continue // the slot is filled
		case err != nil:
			return a.fail(ctx, causeOf(ctx, err))
		}
	}
	a.task = r.task
	return a.end(provider.TaskChange{To: Undone})
}

// fail records a failure: the task is released, tried again, or abandoned.
func (a *attempt[Tx]) fail(ctx context.Context, cause error) ending {
	switch context.Cause(ctx) {
	case errLost: //nolint:errorlint // these are passed unwrapped
		return ending{}
	case errStopping:
		if errors.Is(cause, errStuck) { // the lease protects the task until the handler has returned
			return ending{err: cause}
		}
		return a.end(provider.TaskChange{To: Pending, Doubt: a.task.Doubt})
	}
	if provider.ClassOf(cause) == provider.ClassUnknown && !isPermanent(cause) {
		if e := provider.HandlerError(cause); e.Class == provider.ClassPermanent {
			cause = e
		}
	}
	c := provider.TaskChange{To: Failed, Code: codeOf(cause), Doubt: a.task.Doubt}
	if c.Code == provider.CodeUnknown || c.Code == codeUnknownGroup { // of a handler: those would be requeued
		c.Code = codePermanent
	}
	c.Code = strings.ReplaceAll(strings.ToValidUTF8(c.Code[:min(len(c.Code), provider.MaxIDBytes)], ""), "\x00", "")
	attempts := int(a.hold.attempts.Load())
	switch {
	case isPermanent(cause):
		c.To = Abandoned
	case isUncounted(cause) && !errors.Is(cause, errDeadline):
		c.To, c.After = Pending, uncountedPause
	case a.cfg.Backoff.Exhausted(attempts):
		c.To = Abandoned
	default:
		c.After, _ = a.cfg.Backoff.Delay(max(attempts, 1))
	}
	end := a.end(c)
	end.err = errors.Join(cause, end.err)
	return end
}

// uncountedPause is the pause after a failure that is not counted, for example an outage.
const uncountedPause = time.Second

// end ends the claim.
func (a *attempt[Tx]) end(c provider.TaskChange) ending {
	c.ID, c.Token = a.task.ID, a.task.Token
	if c.To == Done || c.To == Undone || c.To == Abandoned {
		if err := a.audit(a.work, c.To, c.Code); err != nil {
			return a.unrecorded(err, c.Result)
		}
	}
	crash.Point("task: before its end")
	if c.To == Done {
		a.recording(a.hold, true)
	}
	got, err := a.change(c)
	crash.Point("task: after its end")
	if err != nil {
		return ending{err: err}
	}
	if !got.Applied {
		a.recording(a.hold, false)
		return a.refused(got)
	}
	if open := c.To == Pending || c.To == Failed || c.To == Waiting; open && c.After < a.cfg.Poll && (c.After > 0 || c.To != Waiting) {
		time.AfterFunc(c.After, func() { signal(a.soon) })
	}
	return ending{to: c.To, code: c.Code}
}

// refused returns the ending after a change that was refused.
func (a *attempt[Tx]) refused(got provider.TaskChanged) ending {
	if got.Late(a.task.Token) {
		a.observeFenced(a.task.Kind)
		return ending{}
	}
	t, now := &a.task, got.Now
	t.State, t.Undo, t.Doubt, t.Why = now.State, now.Undo, now.Doubt, now.Why
	return ending{again: true}
}

// unrecorded releases a task that could not be audited for the length of a lease. If its claim were
// left to end, that would count as an attempt, and a long outage of the sink would abandon the task. The
// result of a handler is kept, so that the handler does not run again.
func (a *attempt[Tx]) unrecorded(cause error, result json.RawMessage) ending {
	if a.task.Spent { // released, it would be run again
		return ending{err: cause}
	}
	c := provider.TaskChange{ID: a.task.ID, Token: a.task.Token, To: Pending, After: a.cfg.Lease, Code: codeAudit, Doubt: a.task.Doubt, Result: result}
	if a.work.Err() != nil { // the worker stops
		c.After, c.Code = 0, ""
	}
	got, err := a.change(c)
	end := ending{err: errors.Join(cause, err)}
	if got.Applied {
		end.to, end.code = Pending, c.Code
	}
	return end
}

// auditError is an error of the audit sink.
type auditError struct{ error }

func (e *auditError) Unwrap() error { return e.error }

// audit passes a record to the audit sink.
func (a *attempt[Tx]) audit(ctx context.Context, to Status, code string) error {
	if a.cfg.Audit == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	t := &a.task
	id := t.ID + "/" + string(to)
	if !to.Final() { // it may be abandoned again after a requeue
		id += fmt.Sprintf("/%d", t.Version)
	}
	crash.Point("audit: before")
	done := make(chan error, 1)
	a.live.Add(1)
	go func() {
		err := errors.New("it panicked or ended its goroutine")
		defer func() {
			if p := recover(); p != nil {
				a.log.Error("audit sink panicked", "kind", t.Kind, "id", t.ID, "stack", string(debug.Stack()))
			}
			a.live.Add(-1)
			done <- err
		}()
		err = a.cfg.Audit.Append(ctx, Record{
			ID: id, Task: t.ID, Kind: t.Kind, Group: t.Group, What: string(to), Detail: code, By: a.cfg.Holder, At: now().UTC(),
		})
	}()
	var err error
	if !returns(ctx, done, &err) {
		err = errors.New("it did not return after its timeout")
	}
	crash.Point("audit: after")
	if err != nil {
		return &auditError{fmt.Errorf("audit sink: %w", err)}
	}
	return nil
}

// returns waits for the result of a call, until the grace after the end of ctx is over.
func returns(ctx context.Context, done <-chan error, err *error) bool {
	select {
	case *err = <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case *err = <-done:
		return true
	case <-time.After(grace):
		return false
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
