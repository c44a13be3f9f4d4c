package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// taskTx implements provider.TaskTx.
type taskTx struct{ *Tx }

// TasksIn implements provider.TaskProvider. For tx, see InTx.
func (d *DB) TasksIn(tx *sql.Tx) provider.TaskTx { return taskTx{d.InTx(tx)} }

// updateTasks is update in a savepoint of t, so that an error leaves the transaction as it was.
func updateTasks[R any](ctx context.Context, t taskTx, doing string, invalid error, change func() (R, error)) (r R, err error) {
	if err = invalid; err == nil {
		err = t.atomically(ctx, func() error {
			r, err = change()
			return err
		})
	}
	if err == nil {
		t.hint(news{tasks: true})
	}
	return result(r, doing, err)
}

// insertTasks adds the tasks ?1 of group ?2 and kind ?3, with the metadata ?4: arrays of the id, the kind, the input, the
// delay and the earliest time. It returns the ids that no task had.
const insertTasks = `
insert into kinora_tasks (id, kind, group_id, group_kind, metadata, input, created_at, next_at)
select value ->> 0, value ->> 1, ?2, ?3, ?4, value ->> 2, ` + clock + `, max(` + clock + ` + (value ->> 3), coalesce(value ->> 4, 0))
from json_each(?1) where true
on conflict (id) do nothing
returning id`

// addTasks returns the ids that no task had.
func (s session) addTasks(ctx context.Context, tasks []provider.TaskDraft, group, groupKind string) ([]string, error) {
	rows := mapSlice(tasks, func(d provider.TaskDraft) []any {
		return []any{d.ID, d.Kind, string(d.Input), millis(d.After), msOf(d.At)}
	})
	return column[string](ctx, s, insertTasks, jsonOf(rows), group, groupKind, provider.TaskMetadata(ctx))
}

// Enqueue implements provider.TaskTx.
func (t taskTx) Enqueue(ctx context.Context, tasks ...provider.TaskDraft) error {
	_, err := updateTasks(ctx, t, "enqueue tasks", provider.CheckTaskDrafts(tasks), func() (any, error) {
		added, err := t.addTasks(ctx, tasks, "", "")
		for i := 0; err == nil && len(added) < len(tasks) && i < len(tasks); i++ {
			if d := &tasks[i]; !slices.Contains(added, d.ID) {
				var is taskrow.Row
				if is, _, err = t.task(ctx, d.ID); err == nil && !is.IsOf(d) {
					err = fmt.Errorf("task %s: %w", d.ID, provider.ErrTaskIDReused)
				}
			}
		}
		return nil, err
	})
	return err
}

const (
	insertGroup = `
insert into kinora_task_groups (id, kind, data, total, open, tasks) values (?1, ?2, ?3, ?4, ?4, ?5)
on conflict (id) do nothing`

	findGroup = `select id, kind, data, total, open, tasks from kinora_task_groups where id = ?1`

	countGroup = `
update kinora_task_groups set open = open - 1, completed_at = iif(open = 1, ` + clock + `, null)
where id = ?1
returning kind, data, total, open`
)

// EnqueueGroup implements provider.TaskTx.
func (t taskTx) EnqueueGroup(ctx context.Context, g provider.TaskGroupDraft) error {
	_, err := updateTasks(ctx, t, "enqueue a group of tasks", provider.CheckTaskGroup(g), func() (any, error) {
		n, err := t.changed(ctx, insertGroup, g.ID, g.Kind, string(g.Data), len(g.Tasks), taskrow.Digest(g.Tasks))
		if err == nil && n == 0 {
			is, digest, err := groupOf(ctx, t, g.ID)
			if err == nil && !taskrow.IsGroup(is, digest, g) {
				err = fmt.Errorf("group %s: %w", g.ID, provider.ErrTaskIDReused)
			}
			return nil, err
		}
		var added []string
		if err == nil {
			added, err = t.addTasks(ctx, g.Tasks, g.ID, g.Kind)
		}
		for i := 0; err == nil && len(added) < len(g.Tasks) && i < len(g.Tasks); i++ {
			if id := g.Tasks[i].ID; !slices.Contains(added, id) {
				err = fmt.Errorf("task %s: %w", id, provider.ErrTaskIDReused)
			}
		}
		return nil, err
	})
	return err
}

// groupOf returns a group and the digest of its tasks. The group is zero if there is none.
func groupOf(ctx context.Context, q querier, id string) (g provider.TaskGroup, digest string, err error) {
	_, err = find(ctx, q, []any{&g.ID, &g.Kind, (*[]byte)(&g.Data), &g.Total, &g.Open, &digest}, findGroup, id)
	return g, digest, err
}

// Answer implements provider.TaskTx.
func (t taskTx) Answer(ctx context.Context, a provider.TaskAnswer) (provider.AnswerOutcome, error) {
	return updateTasks(ctx, t, "answer a task", provider.CheckTaskAnswer(a), func() (provider.AnswerOutcome, error) {
		was, now, err := t.task(ctx, a.Task)
		is, outcome := was.Answer(&a, now)
		switch {
		case err != nil:
			return "", err
		case was.ID == "":
			return provider.AnswerNotFound, nil
		case was.State == nil:
			return "", fmt.Errorf("task %s: %w", a.Task, errMalformed)
		case outcome == provider.AnswerTaken:
			err = t.save(ctx, is, taskrow.Record{What: provider.WhatAnswered, Detail: a.Name, Decision: provider.Decision{By: a.ID}})
		}
		return outcome, err
	})
}

// Postpone implements provider.TaskTx.
func (t taskTx) Postpone(ctx context.Context, id string, at time.Time) (bool, error) {
	return t.decideOne(ctx, "postpone a task", provider.CheckPostpone(id, at), id, taskrow.Postpone(at))
}

// Cancel implements provider.TaskTx.
func (t taskTx) Cancel(ctx context.Context, id string) (bool, error) {
	return t.decideOne(ctx, "cancel a task", provider.CheckStorable("task id", id), id, taskrow.Cancel)
}

func (t taskTx) decideOne(ctx context.Context, doing string, invalid error, id string, d taskrow.Decision) (bool, error) {
	return updateTasks(ctx, t, doing, invalid, func() (bool, error) {
		n, err := t.decideTasks(ctx, provider.TaskFilter{IDs: []string{id}}, d, provider.Decision{})
		return n == 1, err
	})
}

// Change implements provider.TaskTx. The transaction has the write lock, and so the group's row.
func (t taskTx) Change(ctx context.Context, c provider.TaskChange) (provider.TaskChanged, error) {
	invalid := provider.CheckTaskChanges([]provider.TaskChange{c})
	return updateTasks(ctx, t, "change a task", invalid, func() (provider.TaskChanged, error) {
		changed, err := t.changeTask(ctx, &c)
		if err != nil || c.To != provider.TaskDone || !changed.Applied || changed.Now.Group == "" {
			return changed, err
		}
		g := &provider.TaskGroup{ID: changed.Now.Group}
		changed.Group = g
		return changed, wrap("count group "+g.ID, one(ctx, t, []any{&g.Kind, (*[]byte)(&g.Data), &g.Total, &g.Open}, countGroup, g.ID))
	})
}
