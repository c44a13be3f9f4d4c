package task

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

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

// runTx runs the handler of DefineTx: its writes and the end of the task are committed together.
func (a *attempt[Tx]) runTx(ctx context.Context, clock *limit) ending {
	return a.finishIn(ctx, clock, nil, func(ctx context.Context, tx Tx, got *provider.TaskChanged) ([]outbox.Message, error) {
		out, ms, err := a.def.tx(ctx, tx, a.task.Input)
		clock.database()
		if err != nil {
			return nil, err
		}
		// In the transaction, so that there is no record of an end that the handler refused.
		if err := a.audit(ctx, Done, ""); err != nil {
			return nil, err
		}
		more, err := a.count(ctx, tx, clock, provider.TaskChange{To: Done, Result: out}, got)
		return append(ms, more...), err
	})
}

// finishIn runs fn, which makes the task done, in a transaction. fn sets got. out is the result of a handler that
// ran before.
func (a *attempt[Tx]) finishIn(ctx context.Context, clock *limit, out json.RawMessage,
	fn func(ctx context.Context, tx Tx, got *provider.TaskChanged) ([]outbox.Message, error),
) ending {
	var got provider.TaskChanged
	_, err := a.guarded(ctx, clock, func() (json.RawMessage, error) {
		return nil, a.unit(ctx, clock, func(ctx context.Context, tx Tx) ([]outbox.Message, error) { return fn(ctx, tx, &got) })
	})
	if errors.Is(err, errStuck) { // the handler may still write got
		return a.fail(ctx, err)
	}
	return a.finished(ctx, got, out, err)
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
	case <-time.After(min(5*time.Second, e.cfg.Timeout/2)): // its unit may not return
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
	return a.finishIn(ctx, clock, c.Result, func(ctx context.Context, tx Tx, got *provider.TaskChanged) ([]outbox.Message, error) {
		return a.count(ctx, tx, clock, c, got)
	})
}

// count makes the task done in tx. If it was the last one of its group, it completes the group.
func (a *attempt[Tx]) count(ctx context.Context, tx Tx, clock *limit, c provider.TaskChange, got *provider.TaskChanged) (ms []outbox.Message, err error) {
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
	complete, ok := a.kinds.groups[got.Group.Kind]
	if !ok {
		return nil, errNoGroup
	}
	crash.Point("group: before the completion")
	clock.start()
	ms, err = complete(ctx, tx, got.Group)
	if decided := (*gaveUp)(nil); errors.As(err, &decided) {
		err = &provider.Error{Code: codeMisuse, Err: errors.New("the completion of a group cannot give up")}
	}
	if err == nil {
		clock.database()
		g, what := got.Group, provider.WhatGroupDone
		err = a.append(ctx, Record{ID: g.ID + "/" + what, Kind: g.Kind, Group: g.ID, What: what})
	}
	return ms, err
}

// finished returns the ending of a transaction that makes the task done. out is the result of a handler that ran
// outside of it.
func (a *attempt[Tx]) finished(ctx context.Context, got provider.TaskChanged, out json.RawMessage, err error) ending {
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
		return a.unrecorded(err, out)
	case errors.Is(err, errNoGroup):
		return a.leave(out)
	case errors.As(err, &decided) && a.def.tx != nil && !errors.Is(context.Cause(ctx), errStopping): // nothing was written
		return a.end(provider.TaskChange{To: Undone, GiveUp: decided.code})
	}
	return a.fail(ctx, causeOf(ctx, err))
}

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
