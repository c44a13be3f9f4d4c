package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// selectTasks returns the tasks of f, in order of ID. The conditions are those that indexes need.
func selectTasks(ctx context.Context, q querier, f *provider.TaskFilter) ([]taskrow.Row, error) {
	var args []any
	arg := func(v any) string {
		args = append(args, v)
		return fmt.Sprintf("?%d", len(args))
	}
	where, index := "where id > "+arg(f.After), ""
	if f.IDs != nil {
		where += " and id in (select value from json_each(" + arg(anyOf(f.IDs)) + "))"
	} else if f.OnlyStuck() {
		where, index = where+" and status in ('failed', 'abandoned')", "indexed by kinora_tasks_stuck "
	}
	for _, c := range []struct{ column, value string }{{"kind", f.Kind}, {"group_id", f.Group}, {"group_kind", f.GroupKind}, {"code", f.Code}} {
		if c.value != "" {
			where += " and " + c.column + " = " + arg(c.value)
		}
	}
	if f.Group != "" {
		where += " and group_id <> ''"
	}
	if len(f.Status) > 0 {
		where += " and status in (select value from json_each(" + arg(listOf(f.Status)) + "))"
	}
	query := "select " + taskColumns + " from kinora_tasks o " + index + where + " order by id limit " + arg(cmp.Or(max(f.Limit, 0), defaultPage))
	return taskRowsOf(ctx, q, query, args...)
}

// Tasks implements provider.TaskInspector. A task whose state is malformed has no State.
func (d *DB) Tasks(ctx context.Context, f provider.TaskFilter) (tasks []provider.Task, err error) {
	if err = provider.CheckTaskFilter(f); err == nil {
		var rows []taskrow.Row
		rows, err = selectTasks(ctx, d.reads, &f)
		tasks = tasksOf(rows)
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
	return result(counts, "count tasks", count(ctx, d.reads, counts, countTasks, kind))
}

// TaskGroup implements provider.TaskInspector.
func (d *DB) TaskGroup(ctx context.Context, id string) (g provider.TaskGroup, found bool, err error) {
	if err = provider.CheckStorable("group id", id); err == nil {
		g, _, err = groupOf(ctx, d.reads, id)
	}
	return g, g.ID != "", wrap("read a group of tasks", err)
}

const readTrail = `
select r.id, r.task, coalesce(o.kind, ''), coalesce(o.group_id, ''), r.what, r.detail, r.by_whom, r.reason, r.at
from kinora_task_trail r left join kinora_tasks o on o.id = r.task
where r.task = ?1 order by r.id`

// TaskTrail implements provider.TaskInspector.
func (d *DB) TaskTrail(ctx context.Context, id string) (trail []provider.TaskRecord, err error) {
	if err = provider.CheckStorable("task id", id); err == nil {
		trail, err = collect(ctx, d.reads, func(rows *sql.Rows) (r provider.TaskRecord, err error) {
			var seq int64
			err = rows.Scan(&seq, &r.Task, &r.Kind, &r.Group, &r.What, &r.Detail, &r.By, &r.Reason, scanTime(&r.At))
			r.ID = fmt.Sprintf("%s/%d", r.Task, seq)
			r.At, _ = provider.StoredTime(r.At)
			return r, err
		}, readTrail, id)
	}
	return result(trail, "read the trail of a task", err)
}

// decideTasks changes the tasks that f selects and that d does not refuse, and returns their number. It reads a page of
// tasks at a time.
func (s session) decideTasks(ctx context.Context, f provider.TaskFilter, d taskrow.Decision, by provider.Decision) (n int, err error) {
	limit := f.Limit
	f, found := d.Narrow(f)
	if !found {
		return 0, nil
	}
	now, err := s.now(ctx)
	if err != nil {
		return 0, err
	}
	for f.Limit = defaultPage; ; {
		rows, err := selectTasks(ctx, s, &f)
		if err != nil {
			return n, err
		}
		var changed []string
		for i := 0; i < len(rows) && (limit <= 0 || n < limit); i++ {
			if is, ok := rows[i].Decide(d, now); ok {
				if err := s.saveExcept(ctx, is, nil); err != nil {
					return n, err
				}
				changed = append(changed, is.ID)
				n++
			}
		}
		err = s.record(ctx, changed, taskrow.Record{What: d.What, Decision: by})
		if err != nil || n == limit || len(rows) < f.Limit {
			return n, err
		}
		f.After = rows[len(rows)-1].ID
	}
}

func (d *Provider) decideAll(
	ctx context.Context, doing string, invalid error, f provider.TaskFilter, what taskrow.Decision, by provider.Decision,
) (int, error) {
	return update(ctx, d, doing, invalid, func(u *unit) (int, error) {
		n, err := u.decideTasks(ctx, f, what, by)
		u.tasks = n > 0
		return n, err
	})
}

// RequeueTasks implements provider.TaskInspector.
func (d *DB) RequeueTasks(ctx context.Context, f provider.TaskFilter, by provider.Decision) (int, error) {
	return d.decideAll(ctx, "requeue tasks", provider.CheckTaskDecision(f, by), f, taskrow.Requeue, by)
}

// CancelTasks implements provider.TaskInspector.
func (d *DB) CancelTasks(ctx context.Context, f provider.TaskFilter, by provider.Decision) (int, error) {
	return d.decideAll(ctx, "cancel tasks", provider.CheckTaskCancel(f, by), f, taskrow.Cancel, by)
}

// CompleteTask implements provider.TaskInspector.
func (d *DB) CompleteTask(ctx context.Context, id string, out json.RawMessage, by provider.Decision) error {
	f := provider.TaskFilter{IDs: []string{id}}
	invalid := cmp.Or(provider.CheckTaskResult(out), provider.CheckTaskDecision(f, by))
	n, err := d.decideAll(ctx, "complete a task", invalid, f, taskrow.Complete(out), by)
	if err == nil && n == 0 {
		err = fmt.Errorf("complete task %s: %w", id, provider.ErrTaskVersion)
	}
	return err
}

// PatchTask implements provider.TaskInspector. A malformed state is patched as an empty one.
func (d *DB) PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, by provider.Decision) error {
	err := cmp.Or(provider.CheckTaskDecision(provider.TaskFilter{IDs: []string{id}}, by), provider.CheckJSON("patch", patch, provider.MaxTaskState))
	if err == nil {
		err = d.writeTx(ctx, func(u *unit) error {
			was, now, err := u.task(ctx, id)
			if err != nil {
				return err
			}
			is, err := was.Patch(version, patch, now)
			if u.tasks = true; err == nil {
				err = u.save(ctx, is, taskrow.Record{What: provider.WhatPatched, Decision: by})
			}
			return err
		})
	}
	return wrap("patch task "+id, err)
}
