package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// Tasks implements provider.TaskInspector.
func (db *DB) Tasks(ctx context.Context, f provider.TaskFilter) ([]provider.Task, error) {
	invalid := provider.CheckTaskFilter(f)
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db.Provider, "list tasks", invalid, func(s *state, _ time.Time) (tasks []provider.Task) {
		for t := range s.work.pick(f) {
			if tasks = append(tasks, ownTask(t.Task)); len(tasks) == f.Limit {
				break
			}
		}
		return tasks
	})
}

// pick yields the tasks that f selects, in order of ID, whatever its Limit.
func (w *work) pick(f provider.TaskFilter) iter.Seq[task] {
	return func(yield func(task) bool) {
		for id, t := range w.tasks.from(f.After) {
			switch {
			case id == f.After,
				f.IDs != nil && !slices.Contains(f.IDs, id),
				f.Kind != "" && t.Kind != f.Kind,
				f.Group != "" && t.Group != f.Group,
				f.GroupKind != "" && t.GroupKind != f.GroupKind,
				len(f.Status) > 0 && !slices.Contains(f.Status, t.Status),
				f.Code != "" && t.Code != f.Code:
				continue
			}
			if !yield(t) {
				return
			}
		}
	}
}

// TaskCounts implements provider.TaskInspector.
func (db *DB) TaskCounts(ctx context.Context, kind string) (map[provider.TaskStatus]int64, error) {
	invalid := provider.CheckStorable("kind", kind)
	return query(ctx, db.Provider, "count tasks", invalid, func(s *state, _ time.Time) map[provider.TaskStatus]int64 {
		counts := provider.ZeroTaskCounts()
		for _, t := range s.work.tasks.from("") {
			if kind == "" || t.Kind == kind {
				counts[t.Status]++
			}
		}
		return counts
	})
}

// TaskGroup implements provider.TaskInspector.
func (db *DB) TaskGroup(ctx context.Context, id string) (found provider.TaskGroup, ok bool, err error) {
	invalid := provider.CheckStorable("group id", id)
	found, err = query(ctx, db.Provider, "read a group of tasks", invalid, func(s *state, _ time.Time) provider.TaskGroup {
		var g group
		g, ok = s.work.groups.get(id)
		return ownGroup(g)
	})
	return found, ok, err
}

// TaskTrail implements provider.TaskInspector.
func (db *DB) TaskTrail(ctx context.Context, id string) ([]provider.TaskRecord, error) {
	invalid := provider.CheckStorable("task id", id)
	return query(ctx, db.Provider, "read the trail of a task", invalid, func(s *state, _ time.Time) (records []provider.TaskRecord) {
		trail, _ := s.work.trails.get(id)
		for _, r := range trail.from(0) {
			records = append(records, r)
		}
		return records
	})
}

// RequeueTasks implements provider.TaskInspector.
func (db *DB) RequeueTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	return db.decideTasks(ctx, "requeue tasks", provider.CheckTaskDecision(f, d), f, taskrow.Requeue, d)
}

// CancelTasks implements provider.TaskInspector.
func (db *DB) CancelTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	return db.decideTasks(ctx, "cancel tasks", provider.CheckTaskCancel(f, d), f, taskrow.Cancel, d)
}

func (db *Provider) decideTasks(ctx context.Context, doing string, invalid error, f provider.TaskFilter, d taskrow.Decision, by provider.Decision) (int, error) {
	return update(ctx, db, doing, invalid, func(s *state, now time.Time) (n int, err error) {
		for t := range s.work.pick(f) {
			if s.work.decide(t, d, by, now) {
				n++
			}
			if n > 0 && n == f.Limit {
				break
			}
		}
		return n, nil
	})
}

// CompleteTask implements provider.TaskInspector.
func (db *DB) CompleteTask(ctx context.Context, id string, result json.RawMessage, d provider.Decision) error {
	f := provider.TaskFilter{IDs: []string{id}}
	n, err := db.decideTasks(ctx, "complete a task", cmp.Or(provider.CheckTaskResult(result), provider.CheckTaskDecision(f, d)), f, taskrow.Complete(result), d)
	if err == nil && n == 0 {
		err = fmt.Errorf("complete task %s: %w", id, provider.ErrTaskVersion)
	}
	return err
}

// PatchTask implements provider.TaskInspector.
func (db *DB) PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, d provider.Decision) error {
	invalid := provider.CheckTaskDecision(provider.TaskFilter{IDs: []string{id}}, d)
	_, err := update(ctx, db.Provider, "patch task "+id, invalid, func(s *state, now time.Time) (bool, error) {
		was, _ := s.work.tasks.get(id)
		is, err := was.Patch(version, patch, now)
		if err == nil {
			s.work.put(was, is)
			s.work.record(is, now, taskrow.Record{What: provider.WhatPatched, Decision: d})
		}
		return true, err
	})
	return err
}
