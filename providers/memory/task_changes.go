package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// ChangeTasks implements provider.Tasks.
func (db *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if err := provider.CheckTaskChanges(changes); err != nil {
		return nil, fmt.Errorf("change tasks: %w", err)
	}
	return update(ctx, db, "change tasks", func(s *state, now time.Time) []provider.TaskChanged {
		changed := make([]provider.TaskChanged, len(changes))
		for i := range changes {
			changed[i] = s.work.change(&changes[i], now)
		}
		return changed
	})
}

// change applies c to its task if the task does not refuse it.
func (w *work) change(c *provider.TaskChange, now time.Time) provider.TaskChanged {
	was, known := w.tasks.get(c.ID)
	if !known {
		return provider.TaskChanged{}
	}
	is, records, ok := was.Change(c, now)
	if !ok {
		return provider.TaskChanged{Now: ownTask(was.Task)}
	}
	w.put(was, is)
	for _, r := range records {
		w.record(is, r.What, r.Detail, provider.Decision{By: r.By}, now)
	}
	return provider.TaskChanged{
		Applied: true, Now: provider.Task{ID: is.ID, Undo: is.Undo, Version: is.Version, Group: is.Group},
	}
}

// restart makes a task pending now, with no attempts counted.
func restart(t *task, now time.Time) {
	t.Status, t.NextAt, t.EndedAt = provider.TaskPending, now, time.Time{}
	t.Attempts, t.Vanished, t.Suspect, t.Token = 0, 0, false, claim.Token{}
}

// cancel gives a task up, and returns false if it is being undone already or is final. A claimed
// task stays claimed.
func (w *work) cancel(was task, d provider.Decision, now time.Time) bool {
	if was.ID == "" || was.Undo || was.Status.Final() {
		return false
	}
	is := was
	is.Undo, is.Why, is.Result, is.Version = true, provider.WhyCanceled, nil, was.Version+1
	if is.Status != provider.TaskClaimed {
		restart(&is, now)
		is.Suspect = was.Suspect && was.Status != provider.TaskAbandoned
	}
	w.put(was, is)
	w.record(is, provider.WhatCanceled, "", d, now)
	return true
}
