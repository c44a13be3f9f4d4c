package task

import "github.com/kinora-go/kinora/provider"

// Task is a stored task. Times are in UTC on the store's clock.
type Task = provider.Task

// Draft is a task to be added. Create it with Definition.New. Later and Due delay it.
type Draft = provider.TaskDraft

// Tx is the tasks in a transaction, as TasksIn of a database returns it: Enqueue, EnqueueGroup,
// Answer, Postpone and Cancel. It never ends the transaction. The methods: go doc provider.TaskTx.
type Tx = provider.TaskTx

// Answer fills the slot of the Wait that Task and Name identify. ID is that of the message, so that
// the same message is not a second answer. Out is JSON.
type Answer = provider.TaskAnswer

// Outcome is the result of Tx.Answer.
type Outcome = provider.AnswerOutcome

// The results of Tx.Answer.
const (
	Taken    = provider.AnswerTaken    // the task has the answer now, and continues if it waits for it
	Again    = provider.AnswerAgain    // the task had this answer before
	Late     = provider.AnswerLate     // the wait was over, had another answer, or the task has ended
	NotFound = provider.AnswerNotFound // no task has this id
)

// Status is the status of a task. It is a string, such as "pending".
type Status = provider.TaskStatus

// The statuses of a task. Done and Undone tasks never change again.
const (
	Pending   = provider.TaskPending   // can be claimed when it is due
	Claimed   = provider.TaskClaimed   // a worker has it until its lease ends
	Failed    = provider.TaskFailed    // the last attempt failed; waits for its backoff
	Waiting   = provider.TaskWaiting   // waits for an answer, or for a time
	Done      = provider.TaskDone      // it succeeded
	Undone    = provider.TaskUndone    // it was given up or canceled, and its steps are undone
	Abandoned = provider.TaskAbandoned // no retry is left, or none can help: an operator decides
)

// Inspector has the methods for operators: Tasks lists tasks, TaskCounts counts them by status,
// TaskTrail returns the records of one; RequeueTasks, CancelTasks, CompleteTask and PatchTask are
// decisions. Every provider with tasks implements it. The methods: go doc provider.TaskInspector.
type Inspector = provider.TaskInspector

// Filter selects tasks by IDs, Kind, Group, Status and Code. The zero Filter selects all.
type Filter = provider.TaskFilter

// Decision is who decided, and why. Both are required.
type Decision = provider.Decision

// Record is a record in the life of a task: What is a word such as "done" or "requeued".
type Record = provider.TaskRecord

// Retention is how long tasks are kept after they were Done (zero means 7 days) or Undone (30 days).
// For that long the id of a task is known, and adds no second one.
type Retention = provider.TaskRetention
