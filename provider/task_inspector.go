package provider

import (
	"context"
	"encoding/json"
	"slices"
	"time"
)

// TaskInspector lists tasks, and has the decisions of operators. Each decision is one transaction,
// and adds a row to the trail of each task that it changes. A Decision that Decision.Validate
// refuses is ErrInput, and nothing is changed.
type TaskInspector interface {
	// Tasks lists the tasks that f selects in order of ID.
	Tasks(ctx context.Context, f TaskFilter) ([]Task, error)
	// TaskCounts counts tasks by status; kind empty means all kinds. Each status is in the result.
	TaskCounts(ctx context.Context, kind string) (map[TaskStatus]int64, error)
	// TaskGroup returns a group, and false if there is none.
	TaskGroup(ctx context.Context, id string) (TaskGroup, bool, error)
	// TaskTrail returns the records of a task in order.
	TaskTrail(ctx context.Context, id string) ([]TaskRecord, error)
	// RequeueTasks makes the abandoned and failed tasks that f selects pending at once, resets their
	// attempts, and returns their number. Slots and direction stay.
	RequeueTasks(ctx context.Context, f TaskFilter, d Decision) (int, error)
	// CancelTasks does what TaskTx.Cancel does for the tasks that f selects, and returns their number.
	// The result of CompleteTask, if there is one, is dropped. A zero filter is ErrInput.
	//
	// To find what to undo, the handler of a task with recorded steps runs again, and so does that of
	// a task whose worker crashed. A call outside of a step is not made if the handler asks for Run.Key.
	CancelTasks(ctx context.Context, f TaskFilter, d Decision) (int, error)
	// CompleteTask makes an abandoned task pending with a result. A worker ends it without running it:
	// as done, and counts its group; or as undone if the task was being undone. ErrTaskVersion: it is
	// not abandoned. Invalid JSON is an *eventstore.InvalidError.
	CompleteTask(ctx context.Context, id string, result json.RawMessage, d Decision) error
	// PatchTask changes the state of a task that is pending, failed, waiting or abandoned, by a JSON
	// merge patch (RFC 7386). A null removes a slot, so its step runs again. A task that waits for a
	// slot that the patch fills becomes pending. ErrTaskVersion: the task has another version, or a
	// worker has it. ErrTaskEnded: it is done or undone. A result that is not a state is an
	// *eventstore.InvalidError. See PatchState.
	PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, d Decision) error
}

// TaskFilter selects tasks. The zero filter selects all. Text that is longer than 255 bytes, is not
// UTF-8 or has a NUL is an *eventstore.InvalidError.
type TaskFilter struct {
	IDs       []string // only these; nil means all, empty means none
	Kind      string
	Group     string // the id of the group
	GroupKind string
	Status    []TaskStatus // any of these; empty means all
	Code      string
	After     string // only greater ids; for the next page, the last ID of this one
	Limit     int    // zero means 100 for Tasks, and no limit for decisions
}

// OnlyStuck reports whether f selects only failed and abandoned tasks. Providers find these without reading others.
func (f TaskFilter) OnlyStuck() bool {
	return len(f.Status) > 0 && !slices.ContainsFunc(f.Status, func(s TaskStatus) bool { return s != TaskFailed && s != TaskAbandoned })
}

// TaskRecord is a record of what happened to a task.
type TaskRecord struct {
	// ID of a record for a task.AuditSink is the same if a worker reports the same end of a task
	// again. The ids of a trail are others.
	ID     string
	Task   string // empty with WhatGroupDone
	Kind   string
	Group  string
	What   string // one of the What constants
	Detail string // a slot or a code; never a text
	By     string // the operator, the worker, or the id of the answer
	Reason string // of the operator
	At     time.Time
}

// What a TaskRecord reports.
const (
	WhatAnswered  = "answered" // Detail is the slot
	WhatGaveUp    = "gave_up"  // Detail is the code
	WhatPostponed = "postponed"
	WhatDone      = "done"
	WhatUndone    = "undone"
	WhatFailed    = "failed"    // an attempt: Detail is the code, or CodeVanished; By is its worker
	WhatAbandoned = "abandoned" // Detail is the code
	WhatRequeued  = "requeued"
	WhatCanceled  = "canceled"
	WhatCompleted = "completed"
	WhatPatched   = "patched"
	// WhatGroupDone: of a group, for a task.AuditSink only. Group and Kind are its own, and Task is empty.
	WhatGroupDone = "group_done"
)
