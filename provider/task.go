package provider

import (
	"encoding/json"
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
// Done and undone tasks never change again. An abandoned task changes only by a decision of an
// operator. Separately from its status, a task has a direction: forward, or undo (Task.Undo). Claims
// and lost leases do not change the direction.
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
	// Doubt: a step that is not recorded may have begun. A claim sets it unless the direction is undo,
	// TaskWaiting clears it, and the end of a claim sets it to TaskChange.Doubt. The result of a claim
	// has the value from before the claim.
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
	// Metadata has the correlation id, the causation id and the traceparent of the context that it was
	// added with. Its handlers run with it.
	Metadata eventstore.Metadata `json:"metadata,omitzero"`
	// NextAt is the end of the lease of a claimed task, and of the time of a waiting one; zero if
	// that has no end. Any other open task cannot be claimed before it.
	NextAt    time.Time `json:"next_at,omitzero"`
	CreatedAt time.Time `json:"created_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"` // when it was done, undone or abandoned; else zero
	// LastAttemptedAt is when a worker last claimed it to run it; zero: none has. It may be zero in the
	// result of a claim with Spent.
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
	// After and At delay it: it is not claimed before both. At is on the store's clock, for example
	// the time of an event plus 90 days. Zero means at once.
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
