package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// The columns of a task.
const taskColumns = `o.id, o.kind, o.group_id, o.group_kind, o.input, o.state, o.result, o.status, o.undo, o.why, o.doubt, o.version, o.attempts,
	o.vanished, o.suspect, o.waits, o.token, o.claimed_by, o.code, o.metadata, o.next_at, o.created_at, o.ended_at, o.attempted_at`

// taskRow is a row of tasks as the driver reads it.
type taskRow struct {
	provider.Task
	state, metadata []byte
	token           uuid.NullUUID
}

// task returns the task. Its State is nil if it is not an object of slots, because another program wrote it.
func (r *taskRow) task() provider.Task {
	r.Token = claim.Token(r.token.UUID)
	r.Metadata = provider.ParseTaskMetadata(r.metadata)
	if err := json.Unmarshal(r.state, &r.State); err != nil {
		r.State = nil
	}
	return r.Task
}

// scanTask reads taskColumns.
func scanTask(row pgx.CollectableRow) (provider.Task, error) {
	var r taskRow
	err := row.Scan(&r.ID, &r.Kind, &r.Group, &r.GroupKind, &r.Input, &r.state, &r.Result, &r.Status, &r.Undo, &r.Why, &r.Doubt, &r.Version, &r.Attempts,
		&r.Vanished, &r.Suspect, &r.Waits, &r.token, &r.ClaimedBy, &r.Code, &r.metadata,
		scanTime(&r.NextAt), scanTime(&r.CreatedAt), scanTime(&r.EndedAt), scanTime(&r.LastAttemptedAt))
	return r.task(), err
}

const claimTasksSQL = `
select id, kind, group_id, group_kind, input, state, result, undo, why, doubt, version, attempts, vanished, suspect, waits, timed_out, spent, code, metadata, next_at, created_at
from kinora.claim_tasks($1::text[], $2::boolean, $3::int, $4::int, $5::uuid, $6::text, $7::bigint)`

// ClaimTasks implements provider.Tasks with one statement. A task whose state cannot be read is abandoned.
func (db *Provider) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	limit := t.Limit
	if q.Alone {
		limit = 1
	}
	var malformed []provider.TaskChange
	crash.Point("claim tasks: before")
	invalid := provider.CheckStorable("query.kinds", q.Kinds...)
	tasks, err := read(ctx, db, "claim tasks", invalid, func(row pgx.CollectableRow) (provider.Task, error) {
		r := taskRow{Task: provider.Task{Status: provider.TaskClaimed, ClaimedBy: t.Holder}, token: uuid.NullUUID{UUID: uuid.UUID(t.Token)}}
		err := row.Scan(&r.ID, &r.Kind, &r.Group, &r.GroupKind, &r.Input, &r.state, &r.Result, &r.Undo, &r.Why, &r.Doubt, &r.Version, &r.Attempts,
			&r.Vanished, &r.Suspect, &r.Waits, &r.TimedOut, &r.Spent, &r.Code, &r.metadata, scanTime(&r.NextAt), scanTime(&r.CreatedAt))
		task := r.task()
		if !task.Spent {
			task.LastAttemptedAt = task.NextAt.Add(-t.Lease.Truncate(time.Microsecond)) // the time of the claim
		}
		if err == nil && task.State == nil {
			change := provider.TaskChange{ID: task.ID, Token: task.Token, To: provider.TaskAbandoned, Code: "malformed", Doubt: task.Doubt}
			malformed = append(malformed, change)
		}
		return task, err
	}, claimTasksSQL, kindsOf(q), q.Alone, limit, max(q.Attempts, 0), uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds())
	crash.Point("claim tasks: after")
	if err == nil && len(malformed) > 0 {
		tasks = slices.DeleteFunc(tasks, func(t provider.Task) bool { return t.State == nil })
		_, _ = db.ChangeTasks(ctx, malformed) // if that fails, the next claim finds them
	}
	return tasks, classifyOwn(ctx, err)
}

// kindsOf returns each kind once.
func kindsOf(q provider.TaskQuery) []string {
	return slices.Compact(slices.Sorted(slices.Values(q.Kinds)))
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
	invalid := provider.CheckStorable("query.kinds", q.Kinds...)
	tasks, err := read(ctx, db, "read due tasks", invalid, scanTask, taskCandidatesSQL, planned, kindsOf(q), q.Alone, limit)
	return tasks, classifyOwn(ctx, err)
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
	kinds, err := read(ctx, db, "read the kinds of tasks", provider.CheckStorable("domain", domain),
		pgx.RowTo[string], taskKindsSQL, planned, domain)
	return kinds, classifyOwn(ctx, err)
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
	_, err = db.row(ctx, "delete tasks", nil, []any{&n},
		deleteTasksSQL, planned, keep.Done.Microseconds(), keep.Undone.Microseconds(), max(limit, 0))
	crash.Point("delete tasks: after")
	return n, classifyOwn(ctx, err)
}

// TasksDue implements provider.TaskWaker. ChangeTasks, units, Transact and Wake signal, and a Listener for other processes.
func (db *Provider) TasksDue() <-chan struct{} { return db.due.listen() }

const (
	changeTasksSQL = `
select n, undo, version, group_id
from kinora.change_tasks($1::text[], $2::text[]::uuid[], $3::text[], $4::bigint[], $5::jsonb[], $6::text[], $7::boolean[], $8::text[], $9::boolean[], $10::jsonb[], $11::text[])`

	tasksByIDSQL = `
select ` + taskColumns + ` from unnest($1::text[]) n(id), lateral (select * from kinora.tasks where id = n.id limit 1) o`

	countTaskSQL = `
update kinora.task_groups set open = open - 1, completed_at = case when open = 1 then clock_timestamp() end
where id = $1::text returning kind, data, total, open`
)

// changeTasks applies changes with one statement. A second one reads the tasks whose changes are refused.
func (db *Provider) changeTasks(ctx context.Context, on querier, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	order := inOrder(changes)
	args, err := changeArgs(changes, order)
	if err = cmp.Or(provider.CheckTaskChanges(changes), err); err != nil {
		return nil, wrap("change tasks", err)
	}
	changed := make([]provider.TaskChanged, len(changes))
	rows, _ := on.Query(ctx, db.q(changeTasksSQL), db.described(args)...) // the rows return its error too
	var n, applied int
	var now provider.Task
	err = eachRow(rows, []any{&n, &now.Undo, &now.Version, &now.Group}, func() {
		at := order[n-1]
		now.ID = changes[at].ID
		changed[at] = provider.TaskChanged{Applied: true, Now: now}
		applied++
	})
	if err == nil && applied < len(changes) {
		err = db.readRefused(ctx, on, changes, changed)
	}
	return changed, wrap("change tasks", explain(err))
}

// readRefused sets the stored tasks of refused changes.
func (db *Provider) readRefused(ctx context.Context, on querier, changes []provider.TaskChange, changed []provider.TaskChanged) error {
	ids := map[string][]*provider.Task{}
	for i := range changed {
		if !changed[i].Applied {
			ids[changes[i].ID] = append(ids[changes[i].ID], &changed[i].Now)
		}
	}
	tasks, err := collect(ctx, on, scanTask, db.q(tasksByIDSQL), planned, slices.Collect(maps.Keys(ids)))
	for _, t := range tasks {
		for _, now := range ids[t.ID] {
			*now = t
		}
	}
	return err
}

// inOrder returns the indexes of changes in the order in which all statements lock tasks: that of their ids.
func inOrder(changes []provider.TaskChange) []int {
	order := make([]int, len(changes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return strings.Compare(changes[a].ID, changes[b].ID) })
	return order
}

// changeArgs returns the arguments of changeTasksSQL, in this order.
func changeArgs(changes []provider.TaskChange, order []int) ([]any, error) {
	n := len(changes)
	ids, tokens, to, after := make([]string, n), make([]string, n), make([]string, n), make([]int64, n)
	slots, open, progress := make([]*string, n), make([]string, n), make([]bool, n)
	gaveUp, doubts, results, codes := make([]string, n), make([]bool, n), make([]*string, n), make([]string, n)
	for i, at := range order {
		c := &changes[at]
		ids[i], tokens[i], to[i], open[i], progress[i] = c.ID, uuid.UUID(c.Token).String(), string(c.To), c.Open, c.Progress
		gaveUp[i], doubts[i], codes[i] = c.GiveUp, c.Doubt, c.Code
		if after[i] = c.After.Microseconds(); c.After > 0 {
			after[i] = max(after[i], 1)
		}
		if len(c.Slots) > 0 {
			text, err := json.Marshal(c.Slots)
			if err == nil && len(text) > provider.MaxTaskState {
				err = &eventstore.InvalidError{Field: fmt.Sprintf("changes[%d].slots", at), Reason: fmt.Sprintf("%d bytes: at most %d are allowed", len(text), provider.MaxTaskState)}
			}
			if err != nil {
				return nil, err
			}
			slots[i] = new(string(text))
		}
		if c.Result != nil {
			results[i] = new(string(c.Result))
		}
	}
	return []any{ids, tokens, to, after, slots, open, progress, gaveUp, doubts, results, codes}, nil
}

// ChangeTasks implements provider.Tasks.
func (db *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if len(changes) == 0 {
		return nil, nil
	}
	crash.Point("change tasks: before")
	changed, err := db.changeTasks(ctx, db.pool, changes)
	crash.Point("change tasks: after")
	if err != nil {
		return nil, classifyOwn(ctx, err)
	}
	for i := range changed {
		if changed[i].Applied && changes[i].To == provider.TaskPending {
			db.tasksDue()
			break
		}
	}
	return changed, nil
}

// A renewal waits for no lock: the transaction that has locked a row is that of the task's own
// step, or of an answer. The last part sees the rows as they were before the renewal.
const renewTasksSQL = `
with c as materialized (select * from unnest($1::text[], $2::uuid[]) c(id, token)),
locked as materialized (
	select o.id, o.token from kinora.tasks o where o.id = any($1::text[]) and o.status = 'claimed' and o.token = any($2::uuid[])
	order by o.id for update skip locked),
renewed as (
	update kinora.tasks o set next_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
	from locked l, c where o.id = l.id and c.id = l.id and c.token = l.token)
select distinct c.id from c left join lateral (select o.status, o.token from kinora.tasks o where o.id = c.id limit 1) o on true
where (o.status = 'claimed' and o.token = c.token) is not true`

// RenewTasks implements provider.Tasks.
func (db *Provider) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) (late []string, err error) {
	ids := mapSlice(tasks, func(t *provider.Task) string { return t.ID })
	tokens := mapSlice(tasks, func(t *provider.Task) uuid.UUID { return uuid.UUID(t.Token) })
	crash.Point("renew tasks: before")
	late, err = read(ctx, db, "renew the leases of tasks", provider.CheckStored("task id", ids...),
		pgx.RowTo[string], renewTasksSQL, planned, ids, tokens, lease.Microseconds())
	crash.Point("renew tasks: after")
	return late, classifyOwn(ctx, err)
}
