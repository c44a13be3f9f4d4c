package task

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/kinora-go/kinora/provider"
)

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
	return errors.As(err, &decided) || !a.task.Doubt
}

// giveUp turns the task to undo, and undoes its steps.
func (a *attempt[Tx]) giveUp(ctx context.Context, r *Run[Tx], code string) ending {
	c, err := r.fill(provider.TaskChange{To: Claimed, GiveUp: code, Doubt: a.inDoubt(r), Progress: true}, "", provider.Slot{})
	if err != nil {
		return a.failed(ctx, r, err)
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
	// Before the first undo: one that does not return may write r.task.
	a.task = r.task
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errLost) { // the handler took too long
		fresh, cancel := context.WithCancelCause(a.work)
		defer cancel(nil)
		a.mu.Lock()
		a.hold.lose = cancel
		a.mu.Unlock()
		ctx, r.clock = fresh, newLimit(a.cfg.Timeout, cancel)
		defer r.clock.pause()
	}
	for i := len(r.undos) - 1; i >= 0; i-- {
		u := r.undos[i]
		name := provider.UndoSlot(u.step)
		if r.task.State[name].Filled() {
			continue
		}
		if a.stopping.Load() {
			a.task = r.task
			return a.end(provider.TaskChange{To: Pending, Doubt: a.task.Doubt})
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
			return nil, r.record(name, provider.Slot{Out: json.RawMessage("true")})
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
