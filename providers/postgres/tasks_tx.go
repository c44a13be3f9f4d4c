package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// taskTx is the tasks in a transaction.
type taskTx struct {
	db *Provider
	in within
}

// TasksIn returns the tasks in tx, which must be at READ COMMITTED. After the commit of a
// transaction that you began yourself, call Wake.
func (db *DB) TasksIn(tx pgx.Tx) provider.TaskTx { return &taskTx{db: db.Provider, in: db.in(tx)} }

const (
	// One task, the usual case.
	enqueueTaskSQL = `
insert into kinora.tasks (id, kind, input, metadata, next_at, created_at)
select $1::text, $2::text, $3::jsonb, $6::jsonb, greatest(ck.t + $4::bigint * interval '1 microsecond', $5::timestamptz), ck.t
from (select clock_timestamp() t) ck
on conflict on constraint tasks_pkey do nothing`

	enqueueTasksSQL = `select kinora.enqueue_tasks($1::text[], $2::text[], $3::jsonb[], $4::bigint[], $5::timestamptz[], $6::jsonb)`

	enqueueTaskGroupSQL = `
select kinora.enqueue_task_group($1::text, $2::text, $3::jsonb, $4::text[], $5::text[], $6::jsonb[], $7::bigint[], $8::timestamptz[], $9::jsonb)`
)

// Enqueue implements provider.TaskTx.
func (t *taskTx) Enqueue(ctx context.Context, tasks ...provider.TaskDraft) error {
	if err := provider.CheckTaskDrafts(tasks); err != nil || len(tasks) == 0 {
		return wrap("enqueue tasks", err)
	}
	defer t.db.tasked.Add(1)
	if d := &tasks[0]; len(tasks) == 1 {
		crash.Point("enqueue task: before")
		var tag pgconn.CommandTag
		err := t.in(ctx, func(q session) (err error) {
			tag, err = q.Exec(ctx, t.db.q(enqueueTaskSQL), d.ID, d.Kind, string(d.Input), d.After.Microseconds(), dueAt(d), provider.TaskMetadata(ctx))
			return err
		})
		crash.Point("enqueue task: after")
		if err != nil || tag.RowsAffected() == 1 {
			return wrap("enqueue tasks", explain(err))
		}
	}
	return t.add(ctx, "enqueue tasks", enqueueTasksSQL, draftArgs(ctx, tasks)...)
}

// EnqueueGroup implements provider.TaskTx.
func (t *taskTx) EnqueueGroup(ctx context.Context, g provider.TaskGroupDraft) error {
	if err := provider.CheckTaskGroup(g); err != nil {
		return wrap("enqueue a group of tasks", err)
	}
	defer t.db.tasked.Add(1)
	args := append([]any{g.ID, g.Kind, string(g.Data)}, draftArgs(ctx, g.Tasks)...)
	return t.add(ctx, "enqueue a group of tasks", enqueueTaskGroupSQL, args...)
}

// add runs a statement that returns false if an id is used.
func (t *taskTx) add(ctx context.Context, what, sql string, args ...any) error {
	var same bool
	crash.Point("enqueue tasks: before")
	err := t.row(ctx, what, sql, t.db.described(args), &same)
	crash.Point("enqueue tasks: after")
	if err == nil && !same {
		return wrap(what, provider.ErrTaskIDReused)
	}
	return err
}

// row runs a statement that returns one row.
func (t *taskTx) row(ctx context.Context, doing, sql string, args []any, into ...any) error {
	return wrap(doing, explain(t.in(ctx, func(q session) error { return q.QueryRow(ctx, t.db.q(sql), args...).Scan(into...) })))
}

// dueAt rounds up, so that a task is never due too early. The zero time is null.
func dueAt(d *provider.TaskDraft) *time.Time {
	if d.At.IsZero() {
		return nil
	}
	return new(roundUp(d.At))
}

func draftArgs(ctx context.Context, tasks []provider.TaskDraft) []any {
	return []any{
		mapSlice(tasks, func(d *provider.TaskDraft) string { return d.ID }),
		mapSlice(tasks, func(d *provider.TaskDraft) string { return d.Kind }),
		mapSlice(tasks, func(d *provider.TaskDraft) string { return string(d.Input) }),
		mapSlice(tasks, func(d *provider.TaskDraft) int64 { return d.After.Microseconds() }),
		mapSlice(tasks, dueAt),
		provider.TaskMetadata(ctx),
	}
}

const (
	answerTaskSQL   = `select kinora.answer_task($1::text, $2::text, $3::text, $4::jsonb)`
	postponeTaskSQL = `select kinora.postpone_task($1::text, $2::timestamptz)`
)

// Answer implements provider.TaskTx.
func (t *taskTx) Answer(ctx context.Context, a provider.TaskAnswer) (outcome provider.AnswerOutcome, err error) {
	if err := provider.CheckTaskAnswer(a); err != nil {
		return "", wrap("answer a task", err)
	}
	defer t.db.tasked.Add(1)
	crash.Point("answer task: before")
	err = t.row(ctx, "answer a task", answerTaskSQL, []any{a.Task, a.Name, a.ID, string(a.Out)}, &outcome)
	crash.Point("answer task: after")
	return outcome, err
}

// Postpone implements provider.TaskTx.
func (t *taskTx) Postpone(ctx context.Context, id string, at time.Time) (done bool, err error) {
	if err := provider.CheckPostpone(id, at); err != nil {
		return false, wrap("postpone a task", err)
	}
	defer t.db.tasked.Add(1)
	crash.Point("postpone task: before")
	err = t.row(ctx, "postpone a task", postponeTaskSQL, []any{id, roundUp(at)}, &done)
	crash.Point("postpone task: after")
	return done, err
}

// Cancel implements provider.TaskTx.
func (t *taskTx) Cancel(ctx context.Context, id string) (bool, error) {
	f := provider.TaskFilter{IDs: []string{id}}
	if err := provider.CheckTaskFilter(f); err != nil {
		return false, wrap("cancel a task", err)
	}
	defer t.db.tasked.Add(1)
	var n int
	err := t.in(ctx, func(q session) (err error) {
		n, err = t.db.decideTasks(ctx, q, cancelTasksSQL, taskrow.Cancel, f, provider.Decision{})
		return err
	})
	return n > 0, wrap("cancel a task", err)
}

// Change implements provider.TaskTx. The row of the group is the only lock that the tasks of a
// group share: each locks its own row first, and then that row.
func (t *taskTx) Change(ctx context.Context, c provider.TaskChange) (provider.TaskChanged, error) {
	crash.Point("change task: before")
	var all []provider.TaskChanged
	err := t.in(ctx, func(q session) (err error) {
		all, err = t.db.changeTasks(ctx, q, []provider.TaskChange{c})
		return err
	})
	crash.Point("change task: after")
	if err != nil {
		return provider.TaskChanged{}, err
	}
	changed := all[0]
	if c.To != provider.TaskDone || !changed.Applied || changed.Now.Group == "" {
		return changed, nil
	}
	g := provider.TaskGroup{ID: changed.Now.Group}
	crash.Point("count task: before")
	err = t.row(ctx, "count the group of a task", countTaskSQL, []any{planned, g.ID}, &g.Kind, &g.Data, &g.Total, &g.Open)
	crash.Point("count task: after")
	changed.Group = &g
	return changed, err
}
