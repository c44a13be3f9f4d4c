package taskrow

import (
	"bytes"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// Decision is a change that somebody other than the worker makes.
type Decision struct {
	What string // of the record
	// Of are the statuses of the tasks that it can change.
	Of []provider.TaskStatus
	// apply changes a task in one of these statuses, or returns false.
	apply func(r *Row, now time.Time) bool
}

// Decide returns r after d, and false if d does not change it.
func (r Row) Decide(d Decision, now time.Time) (Row, bool) {
	is := r
	if !slices.Contains(d.Of, r.Status) || !d.apply(&is, now) {
		return r, false
	}
	is.raise()
	return is, true
}

// Narrow returns f without the tasks that d cannot change because of their status. It returns false if none is left.
func (d Decision) Narrow(f provider.TaskFilter) (provider.TaskFilter, bool) {
	of := d.Of
	if len(f.Status) > 0 {
		of = slices.DeleteFunc(slices.Clone(of), func(s provider.TaskStatus) bool { return !slices.Contains(f.Status, s) })
	}
	f.Status = of
	return f, len(of) > 0
}

// restart makes a task pending at a time, with no attempts counted.
func (r *Row) restart(at time.Time) {
	r.Status, r.NextAt, r.EndedAt = provider.TaskPending, at, time.Time{}
	r.Attempts, r.Vanished, r.Suspect, r.Token = 0, 0, false, claim.Token{}
}

// Requeue is TaskInspector.RequeueTasks.
var Requeue = Decision{provider.WhatRequeued, []provider.TaskStatus{provider.TaskFailed, provider.TaskAbandoned}, func(r *Row, now time.Time) bool {
	r.restart(now)
	return true
}}

// Cancel is TaskTx.Cancel. A claimed task stays claimed.
var Cancel = Decision{provider.WhatCanceled, notFinal(), func(r *Row, now time.Time) bool {
	if r.Undo {
		return false
	}
	r.Undo, r.Why, r.Result = true, provider.WhyCanceled, nil
	if r.Status != provider.TaskClaimed {
		suspect := r.Suspect && r.Status != provider.TaskAbandoned
		r.restart(now)
		r.Suspect = suspect
	}
	return true
}}

func notFinal() []provider.TaskStatus {
	return slices.DeleteFunc(provider.TaskStatuses(), provider.TaskStatus.Final)
}

// Complete is TaskInspector.CompleteTask.
func Complete(result []byte) Decision {
	return Decision{provider.WhatCompleted, []provider.TaskStatus{provider.TaskAbandoned}, func(r *Row, now time.Time) bool {
		r.restart(now)
		r.Result = bytes.Clone(result)
		return true
	}}
}

// Postpone is TaskTx.Postpone. Only a task that nothing is recorded of can be postponed.
func Postpone(at time.Time) Decision {
	of := []provider.TaskStatus{provider.TaskPending, provider.TaskFailed, provider.TaskClaimed}
	return Decision{provider.WhatPostponed, of, func(r *Row, _ time.Time) bool {
		if r.Undo || r.State == nil || len(r.State) > 0 || r.Result != nil {
			return false
		}
		r.restart(at.UTC().Round(0))
		return true
	}}
}
