package provider

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
)

// TaskStatus is the status of a task.
//
//	pending ─claim─▶ claimed ─▶ done
//	   ▲  ▲            │ │ ├──▶ undone
//	   │  └──release───┘ │ ├──▶ failed ─(backoff over)─▶ claimed …
//	   │                 │ └──▶ abandoned ─requeue or complete─▶ pending, ─cancel─▶ pending, to be undone
//	   └──answer─ waiting◀┘    (waiting ─(its time is over)─▶ claimed)
//
// Done and undone tasks never change again, and abandoned ones only by a decision of an operator. A task
// also has a direction: forward, or undo (Task.Undo). Claims and lost leases do not change it.
type TaskStatus string

// The statuses of a task.
const (
	TaskPending   TaskStatus = "pending"   // can be claimed when it is due
	TaskClaimed   TaskStatus = "claimed"   // a worker has it until its lease ends
	TaskFailed    TaskStatus = "failed"    // the last attempt failed; waits for its backoff
	TaskWaiting   TaskStatus = "waiting"   // waits for an answer, or for a time
	TaskDone      TaskStatus = "done"      // it succeeded
	TaskUndone    TaskStatus = "undone"    // it was given up or canceled, and its steps are undone
	TaskAbandoned TaskStatus = "abandoned" // no retry is left, or none can help: an operator decides
)

// TaskStatuses lists every status.
func TaskStatuses() []TaskStatus {
	return []TaskStatus{TaskPending, TaskClaimed, TaskFailed, TaskWaiting, TaskDone, TaskUndone, TaskAbandoned}
}

// Final reports whether a task in this status never changes again.
func (s TaskStatus) Final() bool { return s == TaskDone || s == TaskUndone }

// Open reports whether claims may look at a task in this status: pending, claimed, failed, waiting.
func (s TaskStatus) Open() bool { return !s.Final() && s != TaskAbandoned }

// Task is a stored task. Times are on the store's clock, UTC.
type Task struct {
	ID        string          `json:"id"`
	Kind      string          `json:"kind"`            // "orders/fulfil"
	Group     string          `json:"group,omitempty"` // id of its group; empty: none
	GroupKind string          `json:"group_kind,omitempty"`
	Input     json.RawMessage `json:"input,omitempty"`
	State     map[string]Slot `json:"state,omitempty"`  // by name of the step, the wait, or "undo:" and the name of the step
	Result    json.RawMessage `json:"result,omitempty"` // of a done task
	Status    TaskStatus      `json:"status"`
	Undo      bool            `json:"undo,omitempty"` // direction: its steps are being undone
	Why       string          `json:"why,omitempty"`  // with Undo: the code of GiveUp, or WhyCanceled
	// Doubt: a step that is not recorded may have begun. A claim, which returns the value from before, sets it
	// unless the direction is undo, TaskWaiting clears it, and the end of a claim sets it to TaskChange.Doubt.
	Doubt     bool        `json:"doubt,omitempty"`
	Version   int64       `json:"version"`              // one more after every change except claims and renewals
	Attempts  int         `json:"attempts"`             // claims since its last progress, the live one included
	Vanished  int         `json:"vanished,omitempty"`   // leases in a row that ended without a change
	Suspect   bool        `json:"suspect,omitempty"`    // Vanished was 2: it is claimed alone
	Waits     string      `json:"waits,omitempty"`      // the name that it waits for, or waited for when it was claimed
	TimedOut  bool        `json:"timed_out,omitempty"`  // claimed: its wait was over at the time of the claim
	Spent     bool        `json:"spent,omitempty"`      // claimed: its last lease ended at the limit of attempts; do not run it
	Token     claim.Token `json:"token,omitzero"`       // of the last claim
	ClaimedBy string      `json:"claimed_by,omitempty"` // the holder of the last claim
	Code      string      `json:"code,omitempty"`       // of the last failure; a word or a class, never a text
	// Metadata is what it inherited from the context that it was added with (Inherited). Its handlers run with it.
	Metadata eventstore.Metadata `json:"metadata,omitzero"`
	// NextAt is the end of the lease of a claimed task, and of the time of a waiting one; zero if
	// that has no end. Any other open task cannot be claimed before it.
	NextAt    time.Time `json:"next_at,omitzero"`
	CreatedAt time.Time `json:"created_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"` // when it was done, undone or abandoned; else zero
	// LastAttemptedAt is when a worker last claimed it to run it; zero: none has, or perhaps in a claim with Spent.
	LastAttemptedAt time.Time `json:"last_attempted_at,omitzero"`
}

// WhyCanceled is Task.Why of a canceled task.
const WhyCanceled = "canceled"

// Slot is one name of a task's state. It is filled once: by the step, the answer, the timeout or an
// operator's patch, whichever is first. The second changes nothing.
type Slot struct {
	// Call is which call of the handler asked for the name, from 1; 0: none has.
	Call    int             `json:"n,omitempty"`
	Out     json.RawMessage `json:"out,omitempty"`     // the result or the answer; null is a value
	By      string          `json:"by,omitempty"`      // the id of the answer
	Until   string          `json:"until,omitempty"`   // the end of the wait, as the store writes it
	Timeout bool            `json:"timeout,omitempty"` // there was no answer in time
	At      string          `json:"at,omitempty"`      // when it was answered, as the store writes it
}

// Filled reports whether the slot has its value.
func (s Slot) Filled() bool { return s.Out != nil || s.Timeout }

// TaskDraft is a task to be added.
type TaskDraft struct {
	ID    string // 1 to 255 bytes; a task is added once under its id
	Kind  string // "domain/name"; both match ^[a-z][a-z0-9_-]{0,40}$
	Input json.RawMessage
	// After and At, on the store's clock, delay it: it is not claimed before both. Zero means at once.
	After time.Duration
	At    time.Time
	Err   error // why Input could not be encoded; the draft is then refused
}

// Later returns d, delayed by a duration from when it is added.
func (d TaskDraft) Later(after time.Duration) TaskDraft { d.After = after; return d }

// Due returns d, due at a time on the store's clock.
func (d TaskDraft) Due(at time.Time) TaskDraft { d.At = at; return d }

// TaskGroupDraft is a group to be added with all its tasks.
type TaskGroupDraft struct {
	ID, Kind string
	Data     json.RawMessage
	Tasks    []TaskDraft // at least one
	Err      error       // why Data could not be encoded; the draft is then refused
}

// TaskGroup is a stored group.
type TaskGroup struct {
	ID, Kind string
	Data     json.RawMessage
	Total    int
	Open     int // tasks that are not done, undone and abandoned ones included
}

// TaskAnswer fills the slot of a wait.
type TaskAnswer struct {
	Task string // the id of the task
	Name string // of the wait
	ID   string // of the message; the same id again is not a second answer
	Out  json.RawMessage
}

// AnswerOutcome is the result of an answer.
type AnswerOutcome string

// The results of an answer.
const (
	AnswerTaken    AnswerOutcome = "taken"     // it fills the slot; a task that waits for it continues
	AnswerAgain    AnswerOutcome = "again"     // the slot has this answer already
	AnswerLate     AnswerOutcome = "late"      // the slot has another value, or the task has ended: nothing is changed
	AnswerNotFound AnswerOutcome = "not_found" // no task has this id
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

	// ClaimTasks is the function ClaimTasks in one transaction (claim.Portable). t is complete (WithDefaults).
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

	// EnqueueGroup adds a group with its tasks, unless it exists with the same kind, data and tasks; else ErrTaskIDReused.
	EnqueueGroup(ctx context.Context, g TaskGroupDraft) error

	// Answer fills the slot of a wait, now or before the task waits. A task that waits for it becomes pending.
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
	// To is the new status: TaskClaimed renews the lease, TaskPending releases the task and gives its attempt back.
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
// live claim. The tasks are as they are after the claim. With an error, there are none.
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
	// PatchTask changes the state of a task as PatchState does. A null removes a slot, so its step runs again. If it
	// fills the slot that a task waits for, the task becomes pending. ErrTaskVersion: the task has another version, or
	// a worker has it. ErrTaskEnded: it is done or undone.
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
