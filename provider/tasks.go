package provider

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// TaskProvider is a store for workers. Tx is the transaction type of its handlers.
type TaskProvider[Tx any] interface {
	Tasks
	Units[Tx]
	// TasksIn returns the tasks in a transaction: one that the caller owns, or that of a handler.
	TasksIn(tx Tx) TaskTx
}

// Tasks is a store of tasks for workers.
//
// A task is due while its status is open and its NextAt is not in the future on the store's clock, which
// is read once per statement. A claimed task that is due has vanished: its lease has ended without a change.
type Tasks interface {
	// TaskCandidates returns at most limit due tasks of q.Kinds without taking them: the first of each
	// kind in order of NextAt and ID, then the second of each kind, and so on. So no kind delays another.
	// With q.Alone it returns only suspect tasks, else none of them.
	TaskCandidates(ctx context.Context, q TaskQuery, limit int) ([]Task, error)

	// ClaimTasks does what the function ClaimTasks does, in one transaction: see claim.Portable. t is
	// complete (claim.Terms.WithDefaults).
	ClaimTasks(ctx context.Context, q TaskQuery, t claim.Terms) ([]Task, error)

	// ChangeTasks applies changes in one transaction, each on its own, and returns their results in
	// the same order. If CheckTaskChanges refuses one, nothing is changed.
	ChangeTasks(ctx context.Context, changes []TaskChange) ([]TaskChanged, error)

	// RenewTasks renews the leases of claimed tasks, and returns the ids of those that are no longer
	// claimed with their token. A task that another transaction has locked is not renewed and not
	// reported. A store with a single writer waits for it instead, until ctx ends.
	RenewTasks(ctx context.Context, tasks []Task, lease time.Duration) (late []string, err error)

	// TaskKinds returns the kinds of the open tasks of a domain, sorted, at a cost that grows with the kinds, not the tasks.
	TaskKinds(ctx context.Context, domain string) ([]string, error)

	// DeleteTasks deletes at most limit tasks that were done or undone longer ago than keep says, with
	// their trails, and returns their number. Tasks of a group are kept until it is complete, and groups
	// for keep.Done after that. keep is complete (TaskRetention.WithDefaults).
	DeleteTasks(ctx context.Context, keep TaskRetention, limit int) (int, error)
}

// TaskTx is the tasks in a transaction. It never ends the transaction, and nothing can be claimed
// through it. An *eventstore.InvalidError and ErrTaskIDReused leave the transaction usable.
type TaskTx interface {
	// Enqueue adds tasks, in order of their ids. A task is ignored if one with the same id, kind,
	// input and group exists; ErrTaskIDReused if it exists with another one of these.
	Enqueue(ctx context.Context, tasks ...TaskDraft) error

	// EnqueueGroup adds a group with all its tasks. It is ignored if the group exists with the same
	// kind, data and tasks; else ErrTaskIDReused.
	EnqueueGroup(ctx context.Context, g TaskGroupDraft) error

	// Answer fills the slot of a wait, now or before the task waits. A task that waits for it
	// becomes pending.
	Answer(ctx context.Context, a TaskAnswer) (AnswerOutcome, error)

	// Postpone makes a pending, failed or claimed task that goes forward, without slots and result, due at
	// this time of the store's clock, with no attempts counted. Else it returns false, and changes nothing.
	// The result of a run that is going on does not count: the transaction of DefineTx is rolled back, and
	// a call may have been made. A handler must not postpone its own task.
	Postpone(ctx context.Context, id string, at time.Time) (bool, error)

	// Cancel gives a task up, with WhyCanceled: what its steps did is undone. It returns false if the task is being undone,
	// is final, or does not exist. A worker that runs it notices at its next change.
	Cancel(ctx context.Context, id string) (bool, error)

	// Change is ChangeTasks for one change. If it is to TaskDone and the task has a group, it counts
	// the group down, and keeps the group's row locked until the transaction ends. Workers call it.
	Change(ctx context.Context, c TaskChange) (TaskChanged, error)
}

// TaskWaker is a capability of Tasks: a hint that tasks became due.
type TaskWaker interface {
	// TasksDue returns a channel that is closed when tasks are next added, answered or released through
	// this value, after its commit. There may be no hint for a transaction that the caller commits.
	TasksDue() <-chan struct{}
}

// TaskQuery selects tasks to claim.
type TaskQuery struct {
	Kinds    []string // only these
	Attempts int      // the limit; ≤ 0 means none
	Alone    bool     // one suspect task, and no other
}

// TaskChange is a change of a claimed task. It is applied only if the task is claimed with Token.
type TaskChange struct {
	ID    string
	Token claim.Token
	// To is the new status. TaskClaimed keeps the claim and renews its lease, TaskPending releases
	// the task and gives its attempt back.
	To TaskStatus
	// After is the lease of a claimed task, the backoff of a failed one, the delay of a pending one, and
	// the time of a waiting one, ≤ 0 without end. A task that waits again for Open keeps its first end.
	After time.Duration
	Slots map[string]Slot // to be set; may be nil
	// Open is a slot. The change is refused if it is filled. TaskWaiting requires it, and waits for it.
	Open string
	// Progress: attempts begin again with this claim as the first one, Vanished and Suspect end, and
	// the wait is over. TaskWaiting is progress too, with no attempts counted.
	Progress bool
	GiveUp   string // not empty: the direction becomes undo, with this Why
	// Doubt is the new Task.Doubt if the change gives up, or ends the claim with TaskPending,
	// TaskFailed or TaskAbandoned: a step may have begun that is not recorded.
	Doubt  bool
	Result json.RawMessage // ignored if the direction is undo
	Code   string          // of TaskFailed, TaskAbandoned and TaskPending; empty keeps the last one
}

// TaskChanged is the result of a TaskChange. TaskDone and TaskWaiting are also refused if the direction is undo.
type TaskChanged struct {
	Applied bool
	// Now is the task after the change: only ID, Undo, Version and Group if it was applied. If it was
	// refused, it is the stored task, or its zero value if there is none.
	Now   Task
	Group *TaskGroup // of TaskTx.Change to TaskDone: the group after it was counted
}

// Late reports whether the change was refused because the claim with token has ended.
func (c TaskChanged) Late(token claim.Token) bool {
	return !c.Applied && (c.Now.Status != TaskClaimed || c.Now.Token != token)
}

// TaskRetention is how long ended tasks are kept, and with them the ids under which tasks are added
// once. Abandoned tasks are kept until an operator decides.
type TaskRetention struct {
	Done   time.Duration // zero means 7 days
	Undone time.Duration // zero means 30 days
}

// ClaimTasks claims due tasks as TaskCandidates lists them; with q.Alone, one. A task has at most one
// live claim. The tasks are as they are after the claim. With an error, they are those taken before it.
//   - Claiming sets the token and the holder of t, counts an attempt, leases the task for t.Lease, and
//     sets the stored Doubt unless the direction is undo. Direction, slots and wait stay.
//   - A task that has vanished gets CodeVanished. At q.Attempts it is claimed with Spent, and no attempt
//     is counted. Else, the second time in a row, it becomes failed and Suspect, stays due, and is not claimed.
//   - If its time to wait is over, it is claimed with TimedOut.
func ClaimTasks(ctx context.Context, s Tasks, q TaskQuery, t claim.Terms) ([]Task, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	if q.Alone {
		t.Limit = 1
	}
	return s.ClaimTasks(ctx, q, t)
}

// TaskInspector lists tasks, and has the decisions of operators. Each decision is one transaction, and adds a row to the
// trail of each task that it changes. A Decision that Decision.Validate refuses changes nothing.
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
	// CancelTasks does what TaskTx.Cancel does for the tasks that f selects, and returns their number. A
	// result of CompleteTask is dropped. A zero filter is ErrInput.
	//
	// To find what to undo, the handler of a task with recorded steps, or whose worker crashed, runs again.
	// A call outside of a step is not made if the handler asks for Run.Key.
	CancelTasks(ctx context.Context, f TaskFilter, d Decision) (int, error)
	// CompleteTask makes an abandoned task pending with a result. A worker ends it without running it: as
	// done, and counts its group; or as undone if it was being undone. ErrTaskVersion: it is not abandoned.
	CompleteTask(ctx context.Context, id string, result json.RawMessage, d Decision) error
	// PatchTask changes the state of a task that is pending, failed, waiting or abandoned, as PatchState
	// does. A null removes a slot, so its step runs again. A task that waits for a slot that the patch
	// fills becomes pending. ErrTaskVersion: the task has another version, or a worker has it.
	// ErrTaskEnded: it is done or undone.
	PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, d Decision) error
}

// TaskFilter selects tasks. The zero filter selects all. CheckTaskFilter says what is invalid.
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
	// ID: for a task.AuditSink, the same if a worker reports the same end of a task again. Those of a trail are others.
	ID     string    `json:"id,omitempty"`
	Task   string    `json:"task,omitempty"` // empty with WhatGroupDone
	Kind   string    `json:"kind,omitempty"`
	Group  string    `json:"group,omitempty"`
	What   string    `json:"what"`             // one of the What constants
	Detail string    `json:"detail,omitempty"` // a slot or a code; never a text
	By     string    `json:"by,omitempty"`     // the operator, the worker, or the id of the answer
	Reason string    `json:"reason,omitempty"` // of the operator
	At     time.Time `json:"at"`
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
