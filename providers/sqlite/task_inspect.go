package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// taskSelection is the part of a statement that selects tasks, after "from kinora_tasks o".
type taskSelection struct {
	sql  string
	args []any
}

// arg adds an argument and returns its parameter.
func (s *taskSelection) arg(v any) string {
	s.args = append(s.args, v)
	return fmt.Sprintf("?%d", len(s.args))
}

// onlyStuck is the condition of the index kinora_tasks_stuck.
const onlyStuck = `status in ('failed', 'abandoned')`

// selectTasks selects the tasks of f, in order of ID, for which when is true. limit is for a filter
// without one; -1 means no limit.
func selectTasks(f *provider.TaskFilter, when string, limit int) taskSelection {
	var s taskSelection
	where := []string{"id > " + s.arg(f.After)}
	stuck := when == onlyStuck || len(f.Status) > 0 && !slices.ContainsFunc(f.Status, func(is provider.TaskStatus) bool {
		return is != provider.TaskFailed && is != provider.TaskAbandoned
	})
	index := ""
	if f.IDs != nil {
		where = append(where, "id in (select value from json_each("+s.arg(anyOf(f.IDs))+"))")
	} else if stuck {
		index = "indexed by kinora_tasks_stuck "
		where = append(where, onlyStuck)
	}
	for _, c := range []struct{ column, value string }{{"kind", f.Kind}, {"group_id", f.Group}, {"group_kind", f.GroupKind}, {"code", f.Code}} {
		if c.value != "" {
			where = append(where, c.column+" = "+s.arg(c.value))
		}
	}
	if f.Group != "" {
		where = append(where, "group_id <> ''") // the condition of the index
	}
	if len(f.Status) > 0 {
		where = append(where, "status in (select value from json_each("+s.arg(listOf(f.Status))+"))")
	}
	if when != "" {
		where = append(where, "("+when+")")
	}
	s.sql = index + "where " + strings.Join(where, " and ") + " order by id limit " + s.arg(cmp.Or(max(f.Limit, 0), limit))
	return s
}

// Tasks implements provider.TaskInspector. A task whose state is malformed has no State.
func (d *DB) Tasks(ctx context.Context, f provider.TaskFilter) (tasks []provider.Task, err error) {
	if err = provider.CheckTaskFilter(f); err == nil {
		s := selectTasks(&f, "", defaultPage)
		tasks, err = tasksOf(ctx, d.reads, `select `+taskColumns+` from kinora_tasks o `+s.sql, s.args...)
	}
	return result(tasks, "list tasks", err)
}

const countTasks = `select status, count(*) from kinora_tasks where ?1 in ('', kind) group by status`

// TaskCounts implements provider.TaskInspector.
func (d *DB) TaskCounts(ctx context.Context, kind string) (map[provider.TaskStatus]int64, error) {
	if err := provider.CheckStorable("kind", kind); err != nil {
		return nil, wrap("count tasks", err)
	}
	counts := provider.ZeroTaskCounts()
	err := eachRow(ctx, d.reads, func(rows *sql.Rows) error {
		var status provider.TaskStatus
		var n int64
		err := rows.Scan(&status, &n)
		counts[status] = n
		return err
	}, countTasks, kind)
	return result(counts, "count tasks", err)
}

// TaskGroup implements provider.TaskInspector.
func (d *DB) TaskGroup(ctx context.Context, id string) (provider.TaskGroup, bool, error) {
	err := provider.CheckStorable("group id", id)
	if err == nil {
		var g provider.TaskGroup
		if g, _, err = groupOf(ctx, d.reads, id); err == nil {
			return g, true, nil
		}
	}
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return provider.TaskGroup{}, false, wrap("read a group of tasks", err)
}

const readTrail = `
select r.id, r.task, coalesce(o.kind, ''), coalesce(o.group_id, ''), r.what, r.detail, r.by_whom, r.reason, r.at
from kinora_task_trail r left join kinora_tasks o on o.id = r.task
where r.task = ?1 order by r.id`

// TaskTrail implements provider.TaskInspector.
func (d *DB) TaskTrail(ctx context.Context, id string) (trail []provider.TaskRecord, err error) {
	if err = provider.CheckStorable("task id", id); err == nil {
		err = eachRow(ctx, d.reads, func(rows *sql.Rows) error {
			var r provider.TaskRecord
			var seq, at int64
			err := rows.Scan(&seq, &r.Task, &r.Kind, &r.Group, &r.What, &r.Detail, &r.By, &r.Reason, &at)
			r.ID, r.At = fmt.Sprintf("%s/%d", r.Task, seq), storedTime(sql.NullInt64{Int64: at, Valid: true})
			trail = append(trail, r)
			return err
		}, readTrail, id)
	}
	return result(trail, "read the trail of a task", err)
}

// taskDecision is a change of tasks that needs no state.
type taskDecision struct {
	what string
	set  string // sets columns; ?set is value
	// value may be nil if set does not have ?set
	value any
	when  string // the tasks that it changes
	by    provider.Decision
}

const (
	nextVersion = `version = min(version, 9007199254740991) + 1`

	// restartTask makes a task pending with no attempts counted.
	restartTask = nextVersion + `, status = 'pending', open = 1, suspect = 0, attempts = 0, vanished = 0, token = null, ended_at = null`
)

var (
	requeueTask = taskDecision{what: provider.WhatRequeued, set: restartTask + `, next_at = ` + clock, when: onlyStuck}

	// A claimed task stays claimed.
	cancelTask = taskDecision{
		what: provider.WhatCanceled,
		set: nextVersion + `, undo = 1, why = '` + provider.WhyCanceled + `',
	status   = iif(status = 'claimed', 'claimed', 'pending'),
	open     = 1,
	suspect  = suspect and status <> 'abandoned',
	attempts = iif(status = 'claimed', attempts, 0),
	vanished = iif(status = 'claimed', vanished, 0),
	next_at  = iif(status = 'claimed', next_at, ` + clock + `),
	ended_at = null, result = null`,
		when: `undo = 0 and status not in ('done', 'undone')`,
	}
)

// decideTasks changes the tasks that f and d select, and returns their number.
func (s session) decideTasks(ctx context.Context, f provider.TaskFilter, d taskDecision) (int, error) {
	selected := selectTasks(&f, d.when, -1)
	ids := `(select id from kinora_tasks o ` + selected.sql + `)`
	trail := taskSelection{args: slices.Clone(selected.args)}
	_, err := s.exec(ctx, `
insert into kinora_task_trail (task, what, detail, by_whom, reason, at)
select id, `+trail.arg(d.what)+`, '', `+trail.arg(d.by.By)+`, `+trail.arg(d.by.Reason)+`, `+clock+` from kinora_tasks where id in `+ids, trail.args...)
	if err != nil {
		return 0, err
	}
	set := d.set
	if d.value != nil {
		set = strings.ReplaceAll(set, "?set", selected.arg(d.value))
	}
	return s.changed(ctx, `update kinora_tasks set `+set+` where id in `+ids, selected.args...)
}

func (d *Provider) decideAll(ctx context.Context, doing string, f provider.TaskFilter, what taskDecision, by provider.Decision) (n int, err error) {
	what.by = by
	if err = provider.CheckTaskDecision(f, by); err == nil {
		err = d.writeTx(ctx, func(u *unit) error {
			n, err = u.decideTasks(ctx, f, what)
			u.tasks = n > 0
			return err
		})
	}
	return result(n, doing, err)
}

// RequeueTasks implements provider.TaskInspector.
func (d *DB) RequeueTasks(ctx context.Context, f provider.TaskFilter, by provider.Decision) (int, error) {
	return d.decideAll(ctx, "requeue tasks", f, requeueTask, by)
}

// CancelTasks implements provider.TaskInspector.
func (d *DB) CancelTasks(ctx context.Context, f provider.TaskFilter, by provider.Decision) (int, error) {
	if err := provider.CheckTaskCancel(f, by); err != nil {
		return 0, wrap("cancel tasks", err)
	}
	return d.decideAll(ctx, "cancel tasks", f, cancelTask, by)
}

// CompleteTask implements provider.TaskInspector.
func (d *DB) CompleteTask(ctx context.Context, id string, out json.RawMessage, by provider.Decision) error {
	f := provider.TaskFilter{IDs: []string{id}}
	if err := provider.CheckTaskResult(out); err != nil {
		return wrap("complete a task", err)
	}
	n, err := d.decideAll(ctx, "complete a task", f, taskDecision{
		what: provider.WhatCompleted, set: restartTask + `, next_at = ` + clock + `, result = ?set`, value: string(out),
		when: `status = 'abandoned'`,
	}, by)
	if err == nil && n == 0 {
		err = fmt.Errorf("complete task %s: %w", id, provider.ErrTaskVersion)
	}
	return err
}

// PatchTask implements provider.TaskInspector. A task that waits for a slot which the patch fills
// becomes pending. A malformed state is patched as an empty one.
func (d *DB) PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, by provider.Decision) error {
	err := cmp.Or(provider.CheckTaskDecision(provider.TaskFilter{IDs: []string{id}}, by), provider.CheckJSON("patch", patch, provider.MaxTaskState))
	if err == nil {
		err = d.writeTx(ctx, func(u *unit) error {
			was, now, err := u.task(ctx, id)
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				return err
			}
			is, ok, err := was.Patch(version, patch, now)
			if err == nil && !ok {
				err = fmt.Errorf("task %s: %w", id, provider.ErrTaskVersion)
			}
			if err != nil {
				return err
			}
			u.tasks = true
			if err := u.save(ctx, is); err != nil {
				return err
			}
			return u.record(ctx, id, provider.WhatPatched, "", by)
		})
	}
	return wrap("patch a task", err)
}
