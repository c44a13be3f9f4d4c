package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Run is one run of a handler. Do not use it after the handler has returned, nor from two goroutines
// at the same time.
type Run[Tx any] struct {
	w      *engine[Tx]
	hold   *held
	task   Task // as it is stored, so far as this run knows
	clock  *limit
	dead   atomic.Bool // the run has ended, but its handler has not returned
	busy   atomic.Bool // a step or a wait is in progress
	calls  int         // of Step, StepTx and Wait
	asked  map[string]bool
	notes  map[string]provider.Slot // slots of answers that were asked for; stored with the next change
	stop   error                    // ends the run: every later step returns it
	open   bool                     // a step has begun that is not recorded
	inside bool                     // a step has neither returned an error nor a result
	step   string                   // the last one that was asked for
	waits  *provider.TaskChange
	undos  []undoStep
}

// undoStep undoes a step, with the timeout of a step.
type undoStep struct {
	step string
	fn   func(ctx context.Context) error
}

// ID returns the id of the task.
func (r *Run[Tx]) ID() string { return r.task.ID }

// Key returns the idempotency key for the call of a handler without steps: the id of the task. A
// step has its own key. If the task is being undone, and has no recorded steps, Key does not return:
// it ends the handler with runtime.Goexit, because the call must not be made any more. So a handler
// with steps uses ID instead: a first step that may have begun would not be undone.
func (r *Run[Tx]) Key() string {
	if r.task.Undo && !hasBegun(r.task.State) && !r.dead.Load() {
		_ = r.halt(errUndoing)
		runtime.Goexit()
	}
	return r.task.ID
}

// Attempt returns the number of claims since the task last made progress, this one included. A handler
// that gives up because of it does so behind the step that fails: a step that it did not ask for is not
// undone.
func (r *Run[Tx]) Attempt() int { return r.task.Attempts }

// Step does something outside of the database, at least once. Its result is recorded, and returned
// whenever the handler runs again. name must match ^[a-z][a-z0-9_-]{0,60}$.
//
//   - key is the idempotency key for the call of do. It is the same on every try: the task's id, "/"
//     and name.
//   - An error of do is not recorded: the handler returns it, and the step is tried again. If the
//     process must know that a call was refused, return that as a result.
//   - undo runs if the task is given up or canceled, in reverse order of the steps. done is the
//     result, or nil if it is not known whether the step was done. undo gets the key of the step: for
//     a call of its own it needs another one, such as key + "/undo". It may run several times. A nil
//     undo means that there is nothing to undo.
//   - The handler must return the error of a step.
func Step[T, Tx any](ctx context.Context, r *Run[Tx], name string,
	do func(ctx context.Context, key string) (T, error),
	undo func(ctx context.Context, key string, done *T) error,
) (T, error) {
	var out, none T
	slot, err := r.ask(name)
	if err != nil {
		return out, err
	}
	defer r.busy.Store(false)
	key := r.task.ID + "/" + name
	var done *T
	if undo != nil {
		r.undos = append(r.undos, undoStep{name, func(ctx context.Context) error { return undo(ctx, key, done) }})
	}
	if slot.Filled() {
		if err := r.recorded(name, slot, &out); err != nil {
			return none, err
		}
		done = &out
		return out, nil
	}
	if err := r.begins(ctx); err != nil {
		if !r.task.Doubt && undo != nil { // it has never begun
			r.undos = r.undos[:len(r.undos)-1]
		}
		return out, err
	}
	began := now()
	r.open = true
	crash.Point("step: before")
	err = r.abrupt(func() error {
		r.clock.start()
		defer r.clock.start()
		ctx, cancel := context.WithTimeout(ctx, r.w.cfg.Timeout)
		defer cancel()
		out, err = do(ctx, key)
		return err
	})
	crash.Point("step: after")
	r.w.observeStep(r.task.Kind, name, began, err)
	if err != nil {
		return none, r.halt(causeOf(ctx, err))
	}
	data, err := encode(out)
	if err != nil {
		return none, r.halt(err)
	}
	if err := r.record(name, provider.Slot{Call: r.calls, Out: data}); err != nil {
		return none, err
	}
	stored := none // not out: fields that are not in the JSON would keep their values
	if err := r.recorded(name, r.task.State[name], &stored); err != nil {
		return none, err
	}
	done = &stored
	return stored, nil
}

// StepTx does something in the database, once: the writes of do through tx, the messages that it
// returns, and its recorded result are committed together. do may run again after it was rolled
// back. undo runs as that of Step, in such a transaction, and only if the step was done: once. Use
// only tx in do and undo: on SQLite a write through the database itself is
// provider.ErrInTransaction.
func StepTx[T, Tx any](ctx context.Context, r *Run[Tx], name string,
	do func(ctx context.Context, tx Tx) (T, []outbox.Message, error),
	undo func(ctx context.Context, tx Tx, done T) ([]outbox.Message, error),
) (T, error) {
	var out, none T
	slot, err := r.ask(name)
	if err != nil {
		return out, err
	}
	defer r.busy.Store(false)
	done := false
	if undo != nil {
		r.undos = append(r.undos, undoStep{name, func(ctx context.Context) error {
			if !done {
				return nil
			}
			return r.unit(ctx, provider.UndoSlot(name), 0, func(ctx context.Context, tx Tx) (any, []outbox.Message, error) {
				ms, err := undo(ctx, tx, out)
				return true, ms, err
			})
		}})
	}
	if !slot.Filled() {
		if err := r.begins(ctx); err != nil {
			return out, err
		}
		began := now()
		err = r.abrupt(func() error {
			return r.unit(ctx, name, r.calls, func(ctx context.Context, tx Tx) (any, []outbox.Message, error) {
				result, ms, err := do(ctx, tx)
				return result, ms, err
			})
		})
		r.w.observeStep(r.task.Kind, name, began, err)
		if err != nil {
			return none, r.halt(err)
		}
		slot = r.task.State[name]
	}
	if err := r.recorded(name, slot, &out); err != nil {
		return none, err
	}
	done = true
	return out, nil
}

// Wait returns the answer that Tx.Answer gives to the task under this name, before or after the call
// of Wait. ErrTimeout: there was none within d of the first call, on the store's clock. A d ≤ 0
// means no limit. A task that waits is only a row. name must match ^[a-z][a-z0-9_-]{0,60}$. JSON's null is
// an answer only if T is a pointer, a map, a slice or an interface, has no fields, or decodes it itself.
func Wait[T, Tx any](ctx context.Context, r *Run[Tx], name string, d time.Duration) (T, error) {
	var out T
	slot, err := r.ask(name)
	if err != nil {
		return out, err
	}
	defer r.busy.Store(false)
	if !slot.Filled() && !r.task.Undo && r.task.TimedOut && r.task.Waits == name {
		// An answer may come at the same moment. The first one fills the slot.
		if err := r.record(name, provider.Slot{Call: r.calls, Timeout: true}); err != nil {
			return out, err
		}
		slot = r.task.State[name]
	}
	switch {
	case slot.Timeout:
		return out, ErrTimeout
	case slot.Filled():
		if slot.Call == 0 {
			slot.Call = r.calls
			r.notes[name] = slot
		}
		return out, r.decode(name, slot, &out)
	case r.task.Undo:
		return out, r.halt(errUndoing)
	}
	r.waits = &provider.TaskChange{To: Waiting, After: d, Open: name}
	return out, r.halt(errWaiting)
}

// Sleep waits for d, on the store's clock, or until the name is answered.
func (r *Run[Tx]) Sleep(ctx context.Context, name string, d time.Duration) error {
	_, err := Wait[json.RawMessage](ctx, r, name, max(d, time.Microsecond))
	if errors.Is(err, ErrTimeout) {
		return nil
	}
	return err
}

// abrupt calls f. If f panics or ends its goroutine, the run ends with that, also if the handler
// recovers.
func (r *Run[Tx]) abrupt(f func() error) error {
	r.inside = true
	err := f()
	r.inside = false
	return err
}

// halt ends the run with err: every later step returns it too.
func (r *Run[Tx]) halt(err error) error {
	if r.stop == nil {
		r.stop = err
	}
	return r.stop
}

// ask returns the slot of the next call. On success the run is busy.
func (r *Run[Tx]) ask(name string) (provider.Slot, error) {
	if r.dead.Load() {
		return provider.Slot{}, errDead
	}
	if !r.busy.CompareAndSwap(false, true) {
		r.hold.misused.Store(true) // the run ends with ErrMisuse, whichever goroutine returns first
		return provider.Slot{}, fmt.Errorf("step %q began while another one was in progress: %w", name, ErrMisuse)
	}
	slot, err := provider.Slot{}, errDead
	if !r.dead.Load() { // again, now that it is busy
		slot, err = r.next(name)
	}
	if err != nil {
		r.busy.Store(false)
	}
	return slot, err
}

// next checks that this call is the one that the task had before. Nothing new begins while a
// recorded step has not been asked for.
func (r *Run[Tx]) next(name string) (provider.Slot, error) {
	if r.inside {
		return provider.Slot{}, r.halt(errPanic)
	}
	if r.stop != nil {
		return provider.Slot{}, r.stop
	}
	if err := provider.CheckSlot(fmt.Sprintf("name %q of a step", name), name); err != nil {
		return provider.Slot{}, r.halt(Permanent(err))
	}
	if r.asked[name] {
		return provider.Slot{}, r.halt(fmt.Errorf("step %q was taken twice: %w", name, ErrMisuse))
	}
	r.asked[name], r.step = true, name
	r.calls++
	slot := r.task.State[name]
	before := r.first(func(_ string, s provider.Slot) bool { return s.Call == r.calls })
	switch {
	case before != "" && before != name:
		return provider.Slot{}, r.halt(fmt.Errorf("call %d was step %q when it ran, and is %q now: %w", r.calls, before, name, ErrChanged))
	case slot.Call != 0 && slot.Call != r.calls:
		return provider.Slot{}, r.halt(fmt.Errorf("step %q was call %d when it ran, and is call %d now: %w", name, slot.Call, r.calls, ErrChanged))
	case slot.Call == 0:
		// Answers and timeouts did nothing, so they may be behind it.
		if behind := r.first(func(_ string, s provider.Slot) bool { return s.Call > r.calls && s.Out != nil && s.By == "" }); behind != "" {
			return provider.Slot{}, r.halt(fmt.Errorf("step %q is new, and before step %q, which has run: %w", name, behind, ErrChanged))
		}
	}
	return slot, nil
}

func (r *Run[Tx]) unasked() error {
	if name := r.first(func(name string, s provider.Slot) bool { return s.Call > 0 && !r.asked[name] }); name != "" {
		return fmt.Errorf("step %q has run, and the handler does not ask for it: %w", name, ErrChanged)
	}
	return nil
}

// first returns the earliest of the slots that is selects, or "".
func (r *Run[Tx]) first(is func(name string, s provider.Slot) bool) (first string) {
	for name, s := range r.task.State {
		if is(name, s) && (first == "" || s.Call < r.task.State[first].Call) {
			first = name
		}
	}
	return first
}

func (r *Run[Tx]) begins(ctx context.Context) error {
	switch {
	case r.task.Undo:
		return r.halt(errUndoing)
	case r.w.stopping.Load():
		return r.halt(errStopping)
	case ctx.Err() != nil:
		return r.halt(causeOf(ctx, ctx.Err()))
	case r.hold.isOver(): // the process may have been stopped
		if err := r.change(provider.TaskChange{To: Claimed}, "", provider.Slot{}); err != nil {
			return err
		}
		if r.task.Undo {
			return r.halt(errUndoing)
		}
	}
	return nil
}

func (r *Run[Tx]) recorded(name string, s provider.Slot, into any) error {
	if s.By != "" || s.Timeout {
		return r.halt(fmt.Errorf("step %q was answered, like a wait: %w", name, ErrMisuse))
	}
	return r.decode(name, s, into)
}

func (r *Run[Tx]) decode(name string, s provider.Slot, into any) error {
	if err := decode(s.Out, into); err != nil {
		return r.halt(permanent(codeUndecodable, fmt.Errorf("step %q: %w", name, err)))
	}
	return nil
}

// record fills a slot. If it is filled already, the run continues with that value.
func (r *Run[Tx]) record(name string, s provider.Slot) error {
	return r.change(provider.TaskChange{To: Claimed, Open: name, Progress: true}, name, s)
}

// change applies a change of the claimed task that fills a slot, unless name is empty.
func (r *Run[Tx]) change(c provider.TaskChange, name string, s provider.Slot) error {
	c, err := r.fill(c, name, s)
	if err != nil {
		return r.halt(err)
	}
	r.clock.pause()
	defer r.clock.start()
	began := now()
	got, err := r.w.change(c)
	if err != nil {
		return r.halt(err)
	}
	return r.changed(c, got, began)
}

// fill completes a change of this run with its slots.
func (r *Run[Tx]) fill(c provider.TaskChange, name string, s provider.Slot) (provider.TaskChange, error) {
	c.ID, c.Token = r.task.ID, r.task.Token
	if c.To == Claimed {
		c.After = r.w.cfg.Lease
	}
	if len(r.notes) == 0 && name == "" {
		return c, nil
	}
	size := len(r.task.Input) + len(s.Out)
	for name, s := range r.task.State {
		size += len(name) + len(s.Out) + 64 // about what a slot has besides its name and result
	}
	if size > provider.MaxTaskState && !r.task.Undo { // a task that is too large can still be undone
		return c, permanent(codeTooLarge, fmt.Errorf("the state would have %d bytes: at most %d are allowed; use a group", size, provider.MaxTaskState))
	}
	c.Slots = maps.Clone(r.notes)
	if name != "" {
		c.Slots[name] = s
	}
	return c, nil
}

// changed takes over the result of a change.
func (r *Run[Tx]) changed(c provider.TaskChange, got provider.TaskChanged, began time.Time) error {
	switch {
	case got.Applied:
		if r.task.State == nil {
			r.task.State = map[string]provider.Slot{}
		}
		maps.Copy(r.task.State, c.Slots)
		clear(r.notes)
		r.task.Undo = got.Now.Undo
		if c.Slots[c.Open].Call > 0 { // the step in doubt, if there was one, is recorded now
			r.task.Doubt, r.open = false, false
		}
		if c.Progress {
			r.task.Attempts, r.task.TimedOut = 1, false
			r.hold.attempts.Store(1)
		}
		r.hold.renewed(began)
		return nil
	case got.Late(r.task.Token):
		r.w.observeFenced(r.task.Kind)
		return r.halt(errLost)
	}
	r.task.State, r.task.Undo, r.task.Why = got.Now.State, got.Now.Undo, got.Now.Why // Doubt was set by the claim
	return nil
}

// unit runs fn and fills a slot with its result, in one transaction. The task's row is changed last,
// so that it is locked only until the commit: renewals, answers and cancellations do not wait for fn.
func (r *Run[Tx]) unit(ctx context.Context, name string, call int,
	fn func(ctx context.Context, tx Tx) (any, []outbox.Message, error),
) error {
	var c provider.TaskChange
	var got provider.TaskChanged
	began := now()
	crash.Point("step in transaction: before")
	err := r.w.unit(ctx, r.clock, func(ctx context.Context, tx Tx) ([]outbox.Message, error) {
		out, ms, err := fn(ctx, tx)
		r.clock.database()
		if err != nil {
			return nil, err
		}
		data, err := encode(out)
		if err != nil {
			return nil, err
		}
		c, err = r.fill(provider.TaskChange{To: Claimed, Open: name, Progress: true}, name, provider.Slot{Call: call, Out: data})
		if err != nil {
			return nil, err
		}
		if got, err = r.w.db.TasksIn(tx).Change(ctx, c); err == nil && !got.Applied {
			err = errFenced
		}
		return ms, err
	})
	crash.Point("step in transaction: after")
	switch {
	case errors.Is(err, errFenced):
		own, confirmed := r.w.confirm(r.task, got)
		if own {
			return r.halt(errOwnTask)
		}
		if err := r.changed(c, confirmed, began); err != nil {
			return err
		}
		return errFenced // the slot is filled: the unit was rolled back, and the next run has that value
	case err != nil:
		return causeOf(ctx, err)
	}
	return r.changed(c, got, began)
}
