package postgres

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// The columns of a task.
const taskColumns = `o.id, o.kind, o.group_id, o.group_kind, o.input, o.state, o.result, o.status, o.undo, o.why, o.doubt, o.version, o.attempts,
	o.vanished, o.suspect, o.waits, o.token, o.claimed_by, o.code, o.metadata, o.next_at, o.created_at, o.ended_at, o.attempted_at`

// taskRow is a row of tasks as the driver reads it.
type taskRow struct {
	provider.Task
	state, metadata                 []byte
	token                           *uuid.UUID
	next, created, ended, attempted pgtype.Timestamptz
}

// columns are the destinations of taskColumns.
func (r *taskRow) columns() []any {
	return []any{&r.ID, &r.Kind, &r.Group, &r.GroupKind, &r.Input, &r.state, &r.Result, &r.Status, &r.Undo, &r.Why, &r.Doubt, &r.Version, &r.Attempts,
		&r.Vanished, &r.Suspect, &r.Waits, &r.token, &r.ClaimedBy, &r.Code, &r.metadata, &r.next, &r.created, &r.ended, &r.attempted}
}

// task returns the task. readable is false if its state is not an object of slots, because another
// program wrote it; then State is nil.
func (r *taskRow) task() (t provider.Task, readable bool) {
	t = r.Task
	if r.token != nil {
		t.Token = claim.Token(*r.token)
	}
	t.Metadata = provider.ParseTaskMetadata(r.metadata)
	t.NextAt, t.CreatedAt, t.EndedAt, t.LastAttemptedAt = storedTime(r.next), storedTime(r.created), storedTime(r.ended), storedTime(r.attempted)
	if err := json.Unmarshal(r.state, &t.State); err != nil {
		t.State = nil
	}
	return t, t.State != nil
}

// storedTime returns the zero time for a time that is null, infinite or outside the years 1 to
// 9999.
func storedTime(t pgtype.Timestamptz) time.Time {
	if !t.Valid || t.InfinityModifier != pgtype.Finite {
		return time.Time{}
	}
	at, _ := provider.StoredTime(t.Time)
	return at
}

func scanTask(row pgx.CollectableRow) (provider.Task, error) {
	var r taskRow
	err := row.Scan(r.columns()...)
	t, _ := r.task()
	return t, err
}

const claimTasksSQL = `
select id, kind, group_id, group_kind, input, state, result, undo, why, doubt, version, attempts, vanished, suspect, waits, timed_out, spent, code, metadata, next_at, created_at
from kinora.claim_tasks($1::text[], $2::boolean, $3::int, $4::int, $5::uuid, $6::text, $7::bigint)`

// codeMalformed is the code of a task whose state cannot be read, because another program wrote it.
const codeMalformed = "malformed"

// ClaimTasks implements provider.Tasks with one statement. A task whose state cannot be
// read is abandoned instead.
func (db *Provider) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	if err := provider.CheckStorable("query.kinds", q.Kinds...); err != nil {
		return nil, wrap("claim tasks", err)
	}
	limit := t.Limit
	if q.Alone {
		limit = 1
	}
	var malformed []provider.TaskChange
	crash.Point("claim tasks: before")
	tasks, err := collect(ctx, db.pool, func(row pgx.CollectableRow) (provider.Task, error) {
		r := taskRow{Task: provider.Task{Status: provider.TaskClaimed, ClaimedBy: t.Holder}, token: (*uuid.UUID)(&t.Token)}
		err := row.Scan(&r.ID, &r.Kind, &r.Group, &r.GroupKind, &r.Input, &r.state, &r.Result, &r.Undo, &r.Why, &r.Doubt, &r.Version, &r.Attempts,
			&r.Vanished, &r.Suspect, &r.Waits, &r.TimedOut, &r.Spent, &r.Code, &r.metadata, &r.next, &r.created)
		task, readable := r.task()
		if !task.Spent {
			task.LastAttemptedAt = task.NextAt.Add(-t.Lease.Truncate(time.Microsecond)) // the time of the claim
		}
		if err == nil && !readable {
			malformed = append(malformed, abandonMalformed(task))
		}
		return task, err
	}, db.q(claimTasksSQL), kindsOf(q), q.Alone, limit, max(q.Attempts, 0), uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds())
	crash.Point("claim tasks: after")
	if err == nil && len(malformed) > 0 {
		readable := tasks[:0]
		for _, task := range tasks {
			if task.State != nil {
				readable = append(readable, task)
			}
		}
		tasks = readable
		_, err = db.ChangeTasks(ctx, malformed)
	}
	return tasks, classifyOwn(ctx, wrap("claim tasks", explain(err)))
}

// kindsOf returns each kind once.
func kindsOf(q provider.TaskQuery) []string {
	return slices.Compact(slices.Sorted(slices.Values(q.Kinds)))
}

func abandonMalformed(t provider.Task) provider.TaskChange {
	return provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskAbandoned, Code: codeMalformed, Doubt: t.Doubt}
}

// The walk is as in kinora.claim_tasks. The tasks are read by their keys, whatever the statistics.
const taskCandidatesSQL = `
with ck as materialized (select clock_timestamp() t),
seen as materialized (
	select p.*, row_number() over (partition by p.kind order by p.next_at, p.id) as turn
	from unnest($1::text[]) k(kind), lateral (
		select o.id, o.kind, o.next_at from kinora.tasks o
		where o.open and o.suspect = $2::boolean and o.kind = k.kind and o.next_at <= (select t from ck)
		order by o.next_at, o.id limit $3::int) p),
picked as materialized (select * from seen order by turn, next_at, id limit $3::int)
select ` + taskColumns + `
from picked p, lateral (select * from kinora.tasks where id = p.id limit 1) o order by p.turn, p.next_at, p.id`

// TaskCandidates implements provider.Tasks.
func (db *Provider) TaskCandidates(ctx context.Context, q provider.TaskQuery, limit int) ([]provider.Task, error) {
	if err := provider.CheckStorable("query.kinds", q.Kinds...); err != nil {
		return nil, wrap("read due tasks", err)
	}
	tasks, err := collect(ctx, db.pool, scanTask, db.q(taskCandidatesSQL), planned, kindsOf(q), q.Alone, limit)
	return tasks, classifyOwn(ctx, wrap("read due tasks", explain(err)))
}

// The character after a slash is 0. The walk skips from kind to kind through the index.
const taskKindsSQL = `
with recursive k(suspect, kind) as (
	select s.suspect, (
		select kind from kinora.tasks t
		where t.open and t.suspect = s.suspect and t.kind > $1::text || '/' and t.kind < $1::text || '0' order by t.kind limit 1)
	from (values (false), (true)) s(suspect)
	union all
	select k.suspect, (
		select t.kind from kinora.tasks t
		where t.open and t.suspect = k.suspect and t.kind > k.kind and t.kind < $1::text || '0' order by t.kind limit 1)
	from k where k.kind is not null)
select distinct kind from k where kind is not null order by kind`

// TaskKinds implements provider.Tasks.
func (db *Provider) TaskKinds(ctx context.Context, domain string) ([]string, error) {
	if err := provider.CheckStorable("domain", domain); err != nil {
		return nil, wrap("read the kinds of tasks", err)
	}
	kinds, err := collect(ctx, db.pool, pgx.RowTo[string], db.q(taskKindsSQL), planned, domain)
	return kinds, classifyOwn(ctx, wrap("read the kinds of tasks", explain(err)))
}

const notOpen = `not exists (select from kinora.task_groups g where g.id = t.group_id and g.open > 0)`

// Trails are deleted with their tasks. Locked rows are skipped: another worker is deleting them.
// So are tasks of open groups, because an operator looks for them.
const deleteTasksSQL = `
with ck as materialized (select clock_timestamp() - $1::bigint * interval '1 microsecond' as done, clock_timestamp() - $2::bigint * interval '1 microsecond' as undone),
old as materialized (
	select id from (
		(select id, ended_at from kinora.tasks t where status = 'done' and ended_at < (select done from ck) and ` + notOpen + ` order by ended_at limit $3::bigint)
		union all
		(select id, ended_at from kinora.tasks t where status = 'undone' and ended_at < (select undone from ck) and ` + notOpen + ` order by ended_at limit $3::bigint)) o
	order by ended_at limit $3::bigint),
gone as (
	delete from kinora.tasks where id = any(array(
		select id from kinora.tasks where id = any(array(select id from old)) and status in ('done', 'undone') order by id for update skip locked))
	returning id),
trails as (delete from kinora.task_trail where task = any(array(select id from gone))),
groups as (
	delete from kinora.task_groups where id = any(array(
		select id from kinora.task_groups where completed_at < (select done from ck) order by completed_at limit $3::bigint for update skip locked)))
select count(*) from gone`

// DeleteTasks implements provider.Tasks.
func (db *Provider) DeleteTasks(ctx context.Context, keep provider.TaskRetention, limit int) (n int, err error) {
	crash.Point("delete tasks: before")
	err = db.pool.QueryRow(ctx, db.q(deleteTasksSQL), planned, keep.Done.Microseconds(), keep.Undone.Microseconds(), max(limit, 0)).Scan(&n)
	crash.Point("delete tasks: after")
	return n, classifyOwn(ctx, wrap("delete tasks", explain(err)))
}

// TasksDue implements provider.TaskWaker. ChangeTasks, units, Transact and Wake signal, and a
// Listener signals for tasks of other processes.
func (db *Provider) TasksDue() <-chan struct{} { return db.due.listen() }

// tasksDue tells workers that tasks became due: those of this process and, with Config.Notify,
// those of others.
func (db *Provider) tasksDue() {
	db.due.signal()
	if db.cfg.Notify {
		db.notifier.request()
	}
}
