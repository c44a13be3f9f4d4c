package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
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

// TasksIn returns the tasks in tx, at READ COMMITTED. After the commit of a transaction that you began, call Wake.
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
	return t.add(ctx, "enqueue tasks", nil, enqueueTasksSQL, draftArgs(ctx, tasks)...)
}

// EnqueueGroup implements provider.TaskTx.
func (t *taskTx) EnqueueGroup(ctx context.Context, g provider.TaskGroupDraft) error {
	defer t.db.tasked.Add(1)
	args := append([]any{g.ID, g.Kind, string(g.Data)}, draftArgs(ctx, g.Tasks)...)
	return t.add(ctx, "enqueue a group of tasks", provider.CheckTaskGroup(g), enqueueTaskGroupSQL, args...)
}

// add runs a statement that returns false if an id is used.
func (t *taskTx) add(ctx context.Context, what string, invalid error, sql string, args ...any) error {
	var same bool
	crash.Point("enqueue tasks: before")
	err := t.row(ctx, what, invalid, sql, t.db.described(args), &same)
	crash.Point("enqueue tasks: after")
	if err == nil && !same {
		return wrap(what, provider.ErrTaskIDReused)
	}
	return err
}

// row runs a statement that returns one row. doing and invalid are those of read.
func (t *taskTx) row(ctx context.Context, doing string, invalid error, sql string, args []any, into ...any) error {
	if invalid != nil {
		return wrap(doing, invalid)
	}
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
	defer t.db.tasked.Add(1)
	crash.Point("answer task: before")
	err = t.row(ctx, "answer a task", provider.CheckTaskAnswer(a), answerTaskSQL, []any{a.Task, a.Name, a.ID, string(a.Out)}, &outcome)
	crash.Point("answer task: after")
	return outcome, err
}

// Postpone implements provider.TaskTx.
func (t *taskTx) Postpone(ctx context.Context, id string, at time.Time) (done bool, err error) {
	defer t.db.tasked.Add(1)
	crash.Point("postpone task: before")
	err = t.row(ctx, "postpone a task", provider.CheckPostpone(id, at), postponeTaskSQL, []any{id, roundUp(at)}, &done)
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

// Change implements provider.TaskTx. Tasks of a group share only the lock of its row, which each takes after its own.
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
	err = t.row(ctx, "count the group of a task", nil, countTaskSQL, []any{planned, g.ID}, &g.Kind, &g.Data, &g.Total, &g.Open)
	crash.Point("count task: after")
	changed.Group = &g
	return changed, err
}

// The condition of a filter. $1 to $7 are its arguments in all statements, and $8 is the limit. The
// group's comparison with the empty text selects an index.
const taskFiltered = `
	($1::text[] is null or o.id = any($1::text[])) and ($2::text = '' or o.kind = $2::text)
	and ($3::text = '' or o.group_id = $3::text and o.group_id <> '') and ($4::text = '' or o.group_kind = $4::text)
	and ($5::text[] is null or o.status = any($5::text[])) and ($6::text = '' or o.code = $6::text) and o.id > $7::text`

const (
	tasksSQL = `select ` + taskColumns + ` from kinora.tasks o where ` + taskFiltered + ` order by o.id limit $8::bigint`

	// Failed and abandoned tasks have an index, whatever order the planner prefers.
	stuckTasksSQL = `
with f as materialized (select o.id from kinora.tasks o where o.status in ('failed', 'abandoned') and ` + taskFiltered + `)
select ` + taskColumns + `
from (select id from f order by id limit $8::bigint) f, lateral (select * from kinora.tasks where id = f.id limit 1) o order by o.id`

	taskCountsSQL = `select status, count(*) from kinora.tasks where $1::text = '' or kind = $1::text group by status`

	taskGroupSQL = `select id, kind, data, total, open from kinora.task_groups where id = $1::text`

	// The last record of a done or undone task is its row.
	taskTrailSQL = `
select r.record_id, o.id, o.kind, o.group_id, r.what, r.detail, r.by, r.reason, r.at
from kinora.tasks o, lateral (
	select t.task || '/' || t.seq as record_id, t.seq, t.what, t.detail, t.by, t.reason, t.at from kinora.task_trail t where t.task = o.id
	union all
	select o.id || '/' || o.status, null, o.status, '', o.claimed_by, '', o.ended_at where o.status in ('done', 'undone')) r
where o.id = $1::text order by r.seq nulls last`
)

func taskArgs(f provider.TaskFilter, limit int64) []any {
	return []any{planned, f.IDs, f.Kind, f.Group, f.GroupKind, texts(f.Status), f.Code, f.After, cmp.Or(int64(f.Limit), limit)}
}

// Tasks implements provider.TaskInspector. The State of a task that another program wrote is nil if
// it is not an object of slots.
func (db *DB) Tasks(ctx context.Context, f provider.TaskFilter) ([]provider.Task, error) {
	sql := tasksSQL
	if f.OnlyStuck() {
		sql = stuckTasksSQL
	}
	return read(ctx, db.Provider, "list tasks", provider.CheckTaskFilter(f), scanTask, sql, taskArgs(f, 100)...)
}

// TaskCounts implements provider.TaskInspector. It reads all tasks.
func (db *DB) TaskCounts(ctx context.Context, kind string) (map[provider.TaskStatus]int64, error) {
	return counted(ctx, db, "count tasks", provider.CheckStorable("kind", kind), provider.ZeroTaskCounts(), taskCountsSQL, planned, kind)
}

// TaskGroup implements provider.TaskInspector.
func (db *DB) TaskGroup(ctx context.Context, id string) (provider.TaskGroup, bool, error) {
	var g provider.TaskGroup
	columns := []any{&g.ID, &g.Kind, &g.Data, &g.Total, &g.Open}
	found, err := db.row(ctx, "read a group of tasks", provider.CheckStorable("group", id), columns, taskGroupSQL, planned, id)
	return g, found, err
}

// TaskTrail implements provider.TaskInspector.
func (db *DB) TaskTrail(ctx context.Context, id string) ([]provider.TaskRecord, error) {
	columns := func(r *provider.TaskRecord) []any {
		return []any{&r.ID, &r.Task, &r.Kind, &r.Group, &r.What, &r.Detail, &r.By, &r.Reason, scanTime(&r.At)}
	}
	return read(ctx, db.Provider, "read the trail of a task", provider.CheckStorable("task id", id), into(columns), taskTrailSQL, planned, id)
}

// A decision locks the tasks in order of id, as changes do. The status of a task counts as it is
// after a wait for its lock. The filter has only statuses that the decision can change.
const (
	requeueTasksSQL = decideTasksHead + taskFiltered + decideTasksLock + `
	status = 'pending', open = true, suspect = false, attempts = 0, vanished = 0, next_at = ck.t, ended_at = null
from ck, locked where o.id = locked.id and o.status = any($5::text[])` + decideTasksTail + `'requeued'` + decideTasksEnd

	// A worker notices at its next change.
	cancelTasksSQL = decideTasksHead + `not o.undo and` + taskFiltered + decideTasksLock + `
	undo = true, why = 'canceled', open = true, ended_at = null, result = null,
	status     = case when o.status = 'claimed' then 'claimed' else 'pending' end,
	attempts   = case when o.status = 'claimed' then o.attempts else 0 end,
	next_at    = case when o.status = 'claimed' then o.next_at else ck.t end
from ck, locked where o.id = locked.id and o.status = any($5::text[]) and not o.undo` + decideTasksTail + `'canceled'` + decideTasksEnd

	decideTasksHead = `
with ck as materialized (select clock_timestamp() t),
locked as materialized (
	select o.id from kinora.tasks o where `
	decideTasksLock = `
	order by o.id limit $8::bigint for update),
changed as (
	update kinora.tasks o set version = o.version + 1,`
	decideTasksTail = `
	returning o.id)
insert into kinora.task_trail (task, what, by, reason) select id, `
	decideTasksEnd = `, $9::text, $10::text from changed`

	completeTaskSQL = `
with changed as (
	update kinora.tasks o set status = 'pending', open = true, suspect = false, attempts = 0, vanished = 0, next_at = clock_timestamp(),
		ended_at = null, result = $2::jsonb, version = o.version + 1
	where o.id = $1::text and o.status = 'abandoned'
	returning o.id)
insert into kinora.task_trail (task, what, by, reason) select id, 'completed', $3::text, $4::text from changed`

	lockTaskSQL = `
select state, status in ('done', 'undone') from kinora.tasks
where id = $1::text and (status in ('done', 'undone') or version = $2::bigint and status <> 'claimed') for update`

	patchTaskSQL = `
with changed as (
	update kinora.tasks o set state = $2::jsonb, version = o.version + 1,
		status  = case when o.status = 'waiting' and o.waits = any($5::text[]) then 'pending' else o.status end,
		next_at = case when o.status = 'waiting' and o.waits = any($5::text[]) then clock_timestamp() else o.next_at end
	where o.id = $1::text returning o.id)
insert into kinora.task_trail (task, what, by, reason) select id, 'patched', $3::text, $4::text from changed`
)

// decideTasks runs a decision and returns the number of changed tasks.
func (db *Provider) decideTasks(ctx context.Context, on querier, sql string, what taskrow.Decision, f provider.TaskFilter, d provider.Decision) (int, error) {
	f, found := what.Narrow(f)
	if !found {
		return 0, nil
	}
	crash.Point("decide tasks: before")
	tag, err := on.Exec(ctx, db.q(sql), append(taskArgs(f, noLimit), d.By, d.Reason)...)
	crash.Point("decide tasks: after")
	return int(tag.RowsAffected()), explain(err)
}

// RequeueTasks implements provider.TaskInspector.
func (db *DB) RequeueTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	return db.decide(ctx, "requeue tasks", provider.CheckTaskDecision(f, d), requeueTasksSQL, taskrow.Requeue, f, d)
}

// CancelTasks implements provider.TaskInspector.
func (db *DB) CancelTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	return db.decide(ctx, "cancel tasks", provider.CheckTaskCancel(f, d), cancelTasksSQL, taskrow.Cancel, f, d)
}

func (db *DB) decide(ctx context.Context, doing string, invalid error, sql string, what taskrow.Decision, f provider.TaskFilter, d provider.Decision) (int, error) {
	if invalid != nil {
		return 0, wrap(doing, invalid)
	}
	n, err := db.decideTasks(ctx, db.pool, sql, what, f, d)
	if n > 0 {
		db.tasksDue()
	}
	return n, wrap(doing, err)
}

// CompleteTask implements provider.TaskInspector.
func (db *DB) CompleteTask(ctx context.Context, id string, result json.RawMessage, d provider.Decision) error {
	invalid := cmp.Or(provider.CheckTaskDecision(provider.TaskFilter{IDs: []string{id}}, d), provider.CheckTaskResult(result))
	crash.Point("complete task: before")
	n, err := db.exec(ctx, "complete a task", invalid, completeTaskSQL, planned, id, string(result), d.By, d.Reason)
	crash.Point("complete task: after")
	if err == nil && n == 0 {
		return wrap("complete a task", provider.ErrTaskVersion)
	}
	if err == nil {
		db.tasksDue()
	}
	return err
}

// PatchTask implements provider.TaskInspector. A task that waits for a slot that the patch fills becomes pending.
func (db *DB) PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, d provider.Decision) error {
	invalid := cmp.Or(provider.CheckTaskDecision(provider.TaskFilter{IDs: []string{id}}, d),
		provider.CheckJSON("patch", patch, provider.MaxTaskState))
	if invalid != nil {
		return wrap("patch a task", invalid)
	}
	err := db.inTx(ctx, func(tx pgx.Tx) error {
		var before []byte
		var ended bool
		err := tx.QueryRow(ctx, db.q(lockTaskSQL), planned, id, version).Scan(&before, &ended)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return provider.ErrTaskVersion
		case err != nil:
			return err
		case ended:
			return provider.ErrTaskEnded
		}
		var state map[string]provider.Slot
		if err := json.Unmarshal(before, &state); err != nil {
			state = nil // another program wrote it: the patch is the new state
		}
		state, err = provider.PatchState(state, patch)
		if err != nil {
			return err
		}
		var filled []string
		for name, slot := range state {
			if slot.Filled() {
				filled = append(filled, name)
			}
		}
		after, err := json.Marshal(state)
		if err == nil {
			_, err = tx.Exec(ctx, db.q(patchTaskSQL), planned, id, string(after), d.By, d.Reason, filled)
		}
		return err
	})
	if err == nil {
		db.tasksDue()
	}
	return wrap("patch a task", explain(err))
}
