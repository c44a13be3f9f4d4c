package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

const taskColumns = `id, kind, group_id, group_kind, status, undo, why, doubt, version, attempts, vanished, suspect,
	waits, wait_until, token, claimed_by, code, next_at, created_at, ended_at, attempted_at, metadata, input, state, result`

// errMalformed: another program changed a task, and its state is not an object of slots.
var errMalformed = errors.New("its state is malformed: repair it with PatchTask")

// codeMalformed is the code of a task that is abandoned because its state is malformed.
const codeMalformed = "malformed"

// scanTask scans taskColumns and then more. If the state of the task is malformed, State is nil and
// the error is nil. A time outside the years 1 to 9999 is zero.
func scanTask(rows *sql.Rows, more ...any) (r taskrow.Row, err error) {
	var token, metadata, state []byte
	err = rows.Scan(append([]any{&r.ID, &r.Kind, &r.Group, &r.GroupKind, &r.Status, &r.Undo, &r.Why, &r.Doubt, &r.Version, &r.Attempts,
		&r.Vanished, &r.Suspect, &r.Waits, scanTime(&r.WaitEnds), &token, &r.ClaimedBy, &r.Code, scanTime(&r.NextAt), scanTime(&r.CreatedAt),
		scanTime(&r.EndedAt), scanTime(&r.LastAttemptedAt), &metadata, (*[]byte)(&r.Input), &state, (*[]byte)(&r.Result)}, more...)...)
	if err != nil {
		return r, err
	}
	copy(r.Token[:], token)
	r.Metadata = provider.ParseTaskMetadata(metadata)
	if json.Unmarshal(state, &r.State) != nil {
		r.State = nil
	}
	for _, t := range []*time.Time{&r.WaitEnds, &r.NextAt, &r.CreatedAt, &r.EndedAt, &r.LastAttemptedAt} {
		*t, _ = provider.StoredTime(*t)
	}
	return r, nil
}

// taskRowsOf returns the tasks of a query that selects taskColumns.
func taskRowsOf(ctx context.Context, q querier, query string, args ...any) ([]taskrow.Row, error) {
	return collect(ctx, q, func(rows *sql.Rows) (taskrow.Row, error) { return scanTask(rows) }, query, args...)
}

func tasksOf(rows []taskrow.Row) []provider.Task {
	return mapSlice(rows, func(r taskrow.Row) provider.Task { return r.Task })
}

const (
	findTask = `select ` + taskColumns + `, ` + clock + ` from kinora_tasks o where id = ?1`

	// saveTask leaves the state as it is if ?17 is null.
	saveTask = `
update kinora_tasks set
	status = ?2, open = ?3, suspect = ?4, undo = ?5, why = ?6, doubt = ?7, version = ?8, attempts = ?9, vanished = ?10, waits = ?11,
	wait_until = ?12, token = ?13, code = ?14, next_at = ?15, ended_at = ?16, state = coalesce(?17, state), result = ?18
where id = ?1`

	// insertTrail adds a record to the trail of each task of ?1.
	insertTrail = `
insert into kinora_task_trail (task, what, detail, by_whom, reason, at) select value, ?2, ?3, ?4, ?5, ` + clock + ` from json_each(?1)`
)

// task reads a task and the clock. The task is zero if there is none.
func (s session) task(ctx context.Context, id string) (r taskrow.Row, now time.Time, err error) {
	err = eachRow(ctx, s, func(rows *sql.Rows) (err error) {
		r, err = scanTask(rows, scanTime(&now))
		return err
	}, findTask, id)
	return r, now, err
}

// save writes the columns of r that changes of a task can change, and adds records to its trail.
func (s session) save(ctx context.Context, r taskrow.Row, records ...taskrow.Record) error {
	state, err := json.Marshal(r.State)
	if err != nil {
		return &eventstore.InvalidError{Field: "slots", Reason: "cannot be encoded as JSON: " + err.Error()}
	}
	if err := s.saveExcept(ctx, r, string(state)); err != nil {
		return err
	}
	return s.record(ctx, []string{r.ID}, records...)
}

// saveExcept is save with another state, or without the state: it may be malformed.
func (s session) saveExcept(ctx context.Context, r taskrow.Row, state any) error {
	_, err := s.exec(ctx, saveTask, r.ID, string(r.Status), r.Status.Open(), r.Suspect, r.Undo, r.Why, r.Doubt, r.Version, r.Attempts, r.Vanished,
		r.Waits, msOf(r.WaitEnds), tokenOf(r.Token), r.Code, msOf(r.NextAt), msOf(r.EndedAt), state, jsonArg(r.Result))
	return err
}

func (s session) record(ctx context.Context, tasks []string, records ...taskrow.Record) error {
	for _, r := range records {
		if _, err := s.exec(ctx, insertTrail, listOf(tasks), r.What, r.Detail, r.By, r.Reason); err != nil {
			return err
		}
	}
	return nil
}

// msOf rounds up, so that a task is never due too early. The zero time is null.
func msOf(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.Add(time.Millisecond - 1).UnixMilli()
}

// changeTask applies c. It reads the task and writes it: the transaction has the write lock, or
// fails to write if it has not.
func (s session) changeTask(ctx context.Context, c *provider.TaskChange) (provider.TaskChanged, error) {
	was, now, err := s.task(ctx, c.ID)
	if err != nil {
		return provider.TaskChanged{}, err
	}
	is, records, ok := was.Change(c, now)
	if !ok {
		return provider.TaskChanged{Now: was.Task}, nil
	}
	if was.State == nil {
		return provider.TaskChanged{}, fmt.Errorf("task %s: %w", c.ID, errMalformed)
	}
	changed := provider.TaskChanged{Applied: true, Now: provider.Task{ID: is.ID, Undo: is.Undo, Version: is.Version, Group: is.Group}}
	return changed, s.save(ctx, is, records...)
}

// ChangeTasks implements provider.Tasks.
func (d *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if len(changes) == 0 {
		return nil, nil
	}
	return update(ctx, d, "change tasks", provider.CheckTaskChanges(changes), func(u *unit) ([]provider.TaskChanged, error) {
		changed := make([]provider.TaskChanged, len(changes))
		for i := range changes {
			var err error
			if changed[i], err = u.changeTask(ctx, &changes[i]); err != nil {
				return nil, err
			}
			u.add(news{tasks: changes[i].To == provider.TaskPending})
		}
		return changed, nil
	})
}

const renewTask = `
update kinora_tasks set next_at = ` + clock + ` + ?3 where id = ?1 and status = 'claimed' and token = ?2`

// RenewTasks implements provider.Tasks. It waits, as every write, until no other transaction writes or
// ctx ends; meanwhile no worker can claim a task. A loss of power may lose its commit.
func (d *Provider) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) ([]string, error) {
	if len(tasks) == 0 {
		return nil, nil
	}
	return update(unsynced(ctx), d, "renew tasks", nil, func(u *unit) (late []string, err error) {
		for _, t := range tasks {
			n, err := u.changed(ctx, renewTask, t.ID, tokenOf(t.Token), millis(lease))
			if err != nil {
				return nil, err
			}
			if n == 0 {
				late = append(late, t.ID)
			}
		}
		return late, nil
	})
}

// TaskKinds walks from kind to kind by the index; null ends the walk. The character after a slash
// is 0.
var taskKinds = `
with recursive due (kind) as (` + walkKinds("due", "kinora_tasks_due", 0) + `),
alone (kind) as (` + walkKinds("alone", "kinora_tasks_suspect", 1) + `)
select kind from due where kind is not null union select kind from alone where kind is not null order by kind`

func walkKinds(walk, index string, suspect int) string {
	return fmt.Sprintf(`
	select min(kind) from kinora_tasks indexed by %[2]s
	where open = 1 and suspect = %[3]d and kind > ?1 || '/' and kind < ?1 || '0'
	union all
	select (
		select min(kind) from kinora_tasks indexed by %[2]s
		where open = 1 and suspect = %[3]d and kind > %[1]s.kind and kind < ?1 || '0')
	from %[1]s where %[1]s.kind is not null`, walk, index, suspect)
}

// TaskKinds implements provider.Tasks.
func (d *Provider) TaskKinds(ctx context.Context, domain string) (kinds []string, err error) {
	if err = provider.CheckStorable("domain", domain); err == nil {
		kinds, err = column[string](ctx, d.reads, taskKinds, domain)
	}
	return result(kinds, "list kinds of tasks", err)
}

const (
	// oldTasks selects at most ?3 tasks that were done before ?1 ms ago, or undone before ?2 ms ago.
	oldTasks = `
select id from kinora_tasks t indexed by kinora_tasks_ended
where status in ('done', 'undone') and status = 'done' and ended_at < ` + clock + ` - ?1` + notOpen + `
union all
select id from kinora_tasks t indexed by kinora_tasks_ended
where status in ('done', 'undone') and status = 'undone' and ended_at < ` + clock + ` - ?2` + notOpen + `
limit ?3`

	notOpen = ` and not exists (select 1 from kinora_task_groups g where g.id = t.group_id and g.open > 0)`

	// oldGroups selects at most ?2 groups without tasks that were completed more than ?1 ms ago.
	oldGroups = `
select id from kinora_task_groups g indexed by kinora_task_groups_completed
where completed_at < ` + clock + ` - ?1 and not exists (
	select 1 from kinora_tasks indexed by kinora_tasks_group where group_id <> '' and group_id = g.id)
limit ?2`

	hasOldTasks  = `select exists (` + oldTasks + `)`
	hasOldGroups = `select exists (` + oldGroups + `)`

	deleteTasks  = `delete from kinora_tasks where id in (select value from json_each(?1))`
	deleteTrails = `delete from kinora_task_trail where task in (select value from json_each(?1))`
	deleteGroups = `delete from kinora_task_groups where id in (` + oldGroups + `)`
)

// DeleteTasks implements provider.Tasks. It writes only if it finds tasks or groups to delete.
func (d *Provider) DeleteTasks(ctx context.Context, keep provider.TaskRetention, limit int) (n int, err error) {
	limit = max(limit, 0)
	done, undone := millis(keep.Done), millis(keep.Undone)
	var tasks, groups bool
	err = cmp.Or(one(ctx, d.reads, []any{&tasks}, hasOldTasks, done, undone, limit),
		one(ctx, d.reads, []any{&groups}, hasOldGroups, done, limit))
	if err == nil && (tasks || groups) {
		err = d.writeTx(ctx, func(u *unit) error {
			ids, err := column[string](ctx, u, oldTasks, done, undone, limit)
			if n = len(ids); err == nil {
				err = u.execAll(ctx, []string{deleteTrails, deleteTasks}, listOf(ids))
			}
			if err == nil {
				_, err = u.exec(ctx, deleteGroups, done, limit)
			}
			return err
		})
	}
	return result(n, "delete tasks", err)
}

// TasksDue implements provider.TaskWaker.
func (d *Provider) TasksDue() <-chan struct{} { return d.due.wait() }

// taskCandidates walks the due tasks of each kind of ?2 separately, up to the limit ?1, so that
// tasks of other kinds and tasks that wait cost nothing. The kinds take turns. It reads the
// clock once, and the long columns only of the tasks that it returns.
const (
	taskCandidates    = `with` + turnsOf + `kinora_tasks_due where open = 1 and suspect = 0` + inTurns
	suspectCandidates = `with` + turnsOf + `kinora_tasks_suspect where open = 1 and suspect = 1` + inTurns

	turnsOf = ckOnce + `,
kinds (kind) as materialized (select distinct value from json_each(?2)),
turns (task, due, turn) as materialized (
	select p.id, p.next_at, row_number() over (partition by p.kind order by p.next_at, p.id)
	from kinds cross join kinora_tasks p on p.id in (
		select id from kinora_tasks indexed by `

	inTurns = ` and kind = kinds.kind and next_at <= (select t from ck)
		order by next_at, id limit ?1))
select ` + taskColumns + `
from (select * from turns order by turn, due, task limit ?1) cross join kinora_tasks o on o.id = task
order by turn, due, task`
)

// TaskCandidates implements provider.Tasks.
func (d *Provider) TaskCandidates(ctx context.Context, q provider.TaskQuery, limit int) ([]provider.Task, error) {
	if err := provider.CheckStorable("query.kinds", q.Kinds...); err != nil {
		return nil, wrap("read task candidates", err)
	}
	rows, err := taskCandidatesOf(ctx, d.reads, q, limit)
	return result(tasksOf(rows), "read task candidates", err)
}

func taskCandidatesOf(ctx context.Context, from querier, q provider.TaskQuery, limit int) ([]taskrow.Row, error) {
	query := taskCandidates
	if q.Alone {
		query = suspectCandidates
	}
	return taskRowsOf(ctx, from, query, max(limit, 0), listOf(q.Kinds))
}

// takeTask changes task ?1 if it is still as ?12 to ?15 say, and due at ?16.
const takeTask = `
update kinora_tasks set
	status = ?2, suspect = ?3, token = ?4, claimed_by = ?5, next_at = ?6, doubt = ?7, attempted_at = ?8, attempts = ?9, vanished = ?10, code = ?11
where id = ?1 and open = 1 and version = ?12 and status = ?13 and attempts = ?14 and token is ?15 and next_at <= ?16`

const readClock = `select ` + clock

func (s session) now(ctx context.Context) (now time.Time, err error) {
	err = one(ctx, s, []any{scanTime(&now)}, readClock)
	return now, err
}

// takeTask claims the task that was read as r. One whose state is malformed is abandoned.
func (s session) takeTask(ctx context.Context, r taskrow.Row, q provider.TaskQuery, t claim.Terms, now time.Time) (taken provider.Task, ok bool, err error) {
	is, records, taken, ok := r.Take(q.Attempts, t, now)
	n, err := s.changed(ctx, takeTask, r.ID, string(is.Status), is.Suspect, tokenOf(is.Token), is.ClaimedBy, msOf(is.NextAt), is.Doubt, msOf(is.LastAttemptedAt),
		is.Attempts, is.Vanished, is.Code, r.Version, string(r.Status), r.Attempts, tokenOf(r.Token), now.UnixMilli())
	if err != nil || n == 0 {
		return taken, false, err
	}
	if ok && r.State == nil {
		end := provider.TaskChange{Token: t.Token, To: provider.TaskAbandoned, Code: codeMalformed, Doubt: is.Doubt}
		abandoned, more, _ := is.Change(&end, now)
		ok, records, err = false, append(records, more...), s.saveExcept(ctx, abandoned, nil)
	}
	if err == nil {
		err = s.record(ctx, []string{r.ID}, records...)
	}
	return taken, ok, err
}

// ClaimTasks implements provider.Tasks.
func (d *Provider) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	if q.Alone {
		t.Limit = 1
	}
	return claimRows(ctx, d, "claim tasks", provider.CheckStorable("query.kinds", q.Kinds...),
		func(from querier) ([]taskrow.Row, error) { return taskCandidatesOf(ctx, from, q, t.Limit) },
		func(u *unit, rows []taskrow.Row) ([]provider.Task, error) { return u.claimTasks(ctx, rows, q, t) })
}

func (s session) claimTasks(ctx context.Context, rows []taskrow.Row, q provider.TaskQuery, t claim.Terms) (taken []provider.Task, err error) {
	now, err := s.now(ctx)
	for i := 0; err == nil && i < len(rows); i++ {
		var got provider.Task
		var ok bool
		if got, ok, err = s.takeTask(ctx, rows[i], q, t, now); ok {
			taken = append(taken, got)
		}
	}
	return taken, err
}
