package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// taskTx implements provider.TaskTx.
type taskTx struct{ *Tx }

// TasksIn implements provider.TaskProvider: the tasks in a transaction that Transact or Do began.
func (db *DB) TasksIn(tx *Model) provider.TaskTx { return taskTx{db.InTx(tx)} }

// updateTasks runs change on a copy of the tasks, which replaces them if change returns no error.
func updateTasks[R any](ctx context.Context, t taskTx, doing string, invalid error, change func(w *work, now time.Time) (R, error)) (R, error) {
	var r R
	err := cmp.Or(t.usable(ctx), invalid)
	if err == nil {
		w := t.tx.staged.work
		if r, err = change(&w, t.db.now()); err == nil {
			t.tx.staged.work = w
		}
	}
	return result(r, doing, err)
}

// Enqueue implements provider.TaskTx.
func (t taskTx) Enqueue(ctx context.Context, tasks ...provider.TaskDraft) error {
	_, err := updateTasks(ctx, t, "enqueue tasks", provider.CheckTaskDrafts(tasks), func(w *work, now time.Time) (bool, error) {
		for _, d := range tasks {
			is, known := w.tasks.get(d.ID)
			if known && !is.IsOf(&d) {
				return false, fmt.Errorf("task %s: %w", d.ID, provider.ErrTaskIDReused)
			}
			if !known {
				w.add(ctx, d, provider.TaskGroup{}, now)
			}
		}
		return true, nil
	})
	return err
}

func (w *work) add(ctx context.Context, d provider.TaskDraft, of provider.TaskGroup, now time.Time) {
	due := now.Add(d.After)
	if at := d.At.UTC().Round(0); at.After(due) {
		due = at
	}
	w.put(task{}, task{Task: provider.Task{
		ID: d.ID, Kind: d.Kind, Group: of.ID, GroupKind: of.Kind, Input: bytes.Clone(d.Input), State: map[string]provider.Slot{},
		Status: provider.TaskPending, Version: 1, Metadata: provider.Inherited(eventstore.MetadataFrom(ctx)), NextAt: due, CreatedAt: now,
	}})
}

// EnqueueGroup implements provider.TaskTx.
func (t taskTx) EnqueueGroup(ctx context.Context, g provider.TaskGroupDraft) error {
	_, err := updateTasks(ctx, t, "enqueue a group of tasks", provider.CheckTaskGroup(g), func(w *work, now time.Time) (bool, error) {
		if is, ok := w.groups.get(g.ID); ok {
			if !taskrow.IsGroup(is.TaskGroup, is.digest, g) {
				return false, fmt.Errorf("group %s: %w", g.ID, provider.ErrTaskIDReused)
			}
			return true, nil
		}
		added := group{digest: taskrow.Digest(g.Tasks), TaskGroup: provider.TaskGroup{
			ID: g.ID, Kind: g.Kind, Data: bytes.Clone(g.Data), Total: len(g.Tasks), Open: len(g.Tasks),
		}}
		for _, d := range g.Tasks {
			if w.tasks.has(d.ID) {
				return false, fmt.Errorf("task %s: %w", d.ID, provider.ErrTaskIDReused)
			}
			w.add(ctx, d, added.TaskGroup, now)
		}
		w.groups = w.groups.put(g.ID, added)
		return true, nil
	})
	return err
}

// Answer implements provider.TaskTx.
func (t taskTx) Answer(ctx context.Context, a provider.TaskAnswer) (provider.AnswerOutcome, error) {
	return updateTasks(ctx, t, "answer a task", provider.CheckTaskAnswer(a), func(w *work, now time.Time) (provider.AnswerOutcome, error) {
		was, known := w.tasks.get(a.Task)
		if !known {
			return provider.AnswerNotFound, nil
		}
		is, outcome := was.Answer(&a, now)
		if outcome == provider.AnswerTaken {
			w.put(was, is)
			w.record(is, now, taskrow.Record{What: provider.WhatAnswered, Detail: a.Name, Decision: provider.Decision{By: a.ID}})
		}
		return outcome, nil
	})
}

// Postpone implements provider.TaskTx.
func (t taskTx) Postpone(ctx context.Context, id string, at time.Time) (bool, error) {
	return t.decide(ctx, "postpone a task", provider.CheckPostpone(id, at), id, taskrow.Postpone(at))
}

// Cancel implements provider.TaskTx.
func (t taskTx) Cancel(ctx context.Context, id string) (bool, error) {
	return t.decide(ctx, "cancel a task", provider.CheckStorable("task id", id), id, taskrow.Cancel)
}

func (t taskTx) decide(ctx context.Context, doing string, invalid error, id string, d taskrow.Decision) (bool, error) {
	return updateTasks(ctx, t, doing, invalid, func(w *work, now time.Time) (bool, error) {
		was, _ := w.tasks.get(id)
		return w.decide(was, d, provider.Decision{}, now), nil
	})
}

// Change implements provider.TaskTx. The transaction has the write lock, and so the group's row.
func (t taskTx) Change(ctx context.Context, c provider.TaskChange) (provider.TaskChanged, error) {
	invalid := provider.CheckTaskChanges([]provider.TaskChange{c})
	return updateTasks(ctx, t, "change a task", invalid, func(w *work, now time.Time) (provider.TaskChanged, error) {
		changed := w.change(&c, now)
		g, ok := w.groups.get(changed.Now.Group)
		if !ok || !changed.Applied || c.To != provider.TaskDone {
			return changed, nil
		}
		if g.Open--; g.Open == 0 {
			g.completed = now
			w.completed = w.completed.put(timeKey(now, g.ID), g.ID)
		}
		w.groups = w.groups.put(g.ID, g)
		changed.Group = new(ownGroup(g))
		return changed, nil
	})
}

func ownGroup(g group) provider.TaskGroup {
	g.Data = bytes.Clone(g.Data)
	return g.TaskGroup
}
