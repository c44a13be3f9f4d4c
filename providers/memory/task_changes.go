package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
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

// change applies c to the task if nothing refuses the change.
func (w *work) change(c *provider.TaskChange, now time.Time) provider.TaskChanged {
	was, _ := w.tasks.get(c.ID)
	switch {
	case was.Status != provider.TaskClaimed || was.Token != c.Token,
		c.Open != "" && was.State[c.Open].Filled(),
		was.Undo && (c.To == provider.TaskDone || c.To == provider.TaskWaiting):
		return provider.TaskChanged{Now: ownTask(was.Task)}
	}
	is := was
	is.Status = c.To
	is.Version++
	is.Vanished = 0
	is.NextAt = now.Add(c.After)
	if c.To != provider.TaskClaimed {
		is.Token = claim.Token{}
	}
	is.State = ownState(was.State)
	if is.State == nil {
		is.State = map[string]provider.Slot{}
	}
	maps.Copy(is.State, ownState(c.Slots))
	if c.Result != nil {
		is.Result = bytes.Clone(c.Result)
	}
	if c.GiveUp != "" {
		is.Undo, is.Why, is.Doubt = true, c.GiveUp, c.Doubt
		w.record(is, provider.WhatGaveUp, c.GiveUp, provider.Decision{By: is.ClaimedBy}, now)
	}
	if c.Progress {
		is.Attempts, is.Suspect, is.Waits, is.waitEnds = 1, false, "", time.Time{}
	}
	switch c.To {
	case provider.TaskPending:
		is.Attempts, is.Code = max(is.Attempts-1, 0), cmp.Or(c.Code, is.Code)
	case provider.TaskFailed:
		is.Code = cmp.Or(c.Code, is.Code)
	case provider.TaskWaiting:
		is.wait(c, was.State[c.Open].Until, now)
	case provider.TaskDone:
		is.Code = ""
		w.end(&is, provider.WhatDone, now)
	case provider.TaskUndone:
		w.end(&is, provider.WhatUndone, now)
	case provider.TaskAbandoned:
		is.Code = cmp.Or(c.Code, is.Code)
		w.end(&is, provider.WhatAbandoned, now)
	}
	w.put(was, is)
	return provider.TaskChanged{
		Applied: true, Now: provider.Task{ID: is.ID, Undo: is.Undo, Version: is.Version, Group: is.Group},
	}
}

// wait makes t wait for c.Open. until is the end of an earlier wait for it, as its slot has it.
func (t *task) wait(c *provider.TaskChange, until string, now time.Time) {
	ends, err := time.Parse(time.RFC3339Nano, until)
	if _, ok := provider.StoredTime(ends); err != nil || !ok {
		if ends = (time.Time{}); c.After > 0 {
			ends = now.Add(c.After)
		}
	}
	slot := t.State[c.Open]
	if slot.Until = ""; !ends.IsZero() {
		slot.Until = ends.Format(time.RFC3339Nano)
	}
	t.State[c.Open] = slot
	t.Attempts, t.Suspect, t.Waits, t.waitEnds, t.NextAt = 0, false, c.Open, ends, ends
}

// end ends t with its new status.
func (w *work) end(t *task, what string, now time.Time) {
	detail := t.Code
	t.Suspect, t.Waits, t.waitEnds, t.EndedAt = false, "", time.Time{}, now
	if t.Status.Final() {
		t.Attempts, detail = 0, ""
	}
	w.record(*t, what, detail, provider.Decision{By: t.ClaimedBy}, now)
}

// restart makes a task pending now, with no attempts counted.
func (t *task) restart(now time.Time) {
	t.Status, t.NextAt, t.EndedAt = provider.TaskPending, now, time.Time{}
	t.Attempts, t.Vanished, t.Suspect, t.Token = 0, 0, false, claim.Token{}
}

// cancel gives a task up, and returns false if it is being undone already or is final. A claimed
// task stays claimed. A step may have begun even if no attempt is counted, because a release gives
// the attempt back.
func (w *work) cancel(was task, d provider.Decision, now time.Time) bool {
	if was.ID == "" || was.Undo || was.Status.Final() {
		return false
	}
	is := was
	is.Undo, is.Why, is.Version = true, provider.WhyCanceled, was.Version+1
	is.Doubt = was.Attempts > 0 || was.ClaimedBy != "" && was.Status != provider.TaskWaiting
	if is.Status != provider.TaskClaimed {
		is.restart(now)
		is.Suspect = was.Suspect && was.Status != provider.TaskAbandoned
	}
	w.put(was, is)
	w.record(is, provider.WhatCanceled, "", d, now)
	return true
}
