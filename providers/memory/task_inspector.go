package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Tasks implements provider.TaskInspector.
func (db *DB) Tasks(ctx context.Context, f provider.TaskFilter) ([]provider.Task, error) {
	if err := provider.CheckTaskFilter(f); err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db.Provider, "list tasks", func(s *state, _ time.Time) (tasks []provider.Task) {
		for _, t := range s.work.pick(f, func(task) bool { return true }) {
			tasks = append(tasks, ownTask(t.Task))
		}
		return tasks
	})
}

// pick returns the tasks that f and is select, in order of ID. A Limit of 0 means no limit.
func (w *work) pick(f provider.TaskFilter, is func(task) bool) (picked []task) {
	for id, t := range w.tasks.from(f.After) {
		switch {
		case id == f.After,
			f.IDs != nil && !slices.Contains(f.IDs, id),
			f.Kind != "" && t.Kind != f.Kind,
			f.Group != "" && t.Group != f.Group,
			f.GroupKind != "" && t.GroupKind != f.GroupKind,
			len(f.Status) > 0 && !slices.Contains(f.Status, t.Status),
			f.Code != "" && t.Code != f.Code,
			!is(t):
			continue
		}
		if picked = append(picked, t); len(picked) == f.Limit {
			break
		}
	}
	return picked
}

// TaskCounts implements provider.TaskInspector.
func (db *DB) TaskCounts(ctx context.Context, kind string) (map[provider.TaskStatus]int64, error) {
	if err := provider.CheckStorable("kind", kind); err != nil {
		return nil, fmt.Errorf("count tasks: %w", err)
	}
	return query(ctx, db.Provider, "count tasks", func(s *state, _ time.Time) map[provider.TaskStatus]int64 {
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
	if err := provider.CheckStorable("group id", id); err != nil {
		return found, false, fmt.Errorf("read a group of tasks: %w", err)
	}
	found, err = query(ctx, db.Provider, "read a group of tasks", func(s *state, _ time.Time) provider.TaskGroup {
		var g group
		g, ok = s.work.groups.get(id)
		return ownGroup(g)
	})
	return found, ok, err
}

// TaskTrail implements provider.TaskInspector.
func (db *DB) TaskTrail(ctx context.Context, id string) ([]provider.TaskRecord, error) {
	if err := provider.CheckStorable("task id", id); err != nil {
		return nil, fmt.Errorf("read the trail of a task: %w", err)
	}
	return query(ctx, db.Provider, "read the trail of a task", func(s *state, _ time.Time) (records []provider.TaskRecord) {
		trail, _ := s.work.trails.get(id)
		for _, r := range trail.from(0) {
			records = append(records, r)
		}
		return records
	})
}

// RequeueTasks implements provider.TaskInspector.
func (db *DB) RequeueTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	if err := provider.CheckTaskDecision(f, d); err != nil {
		return 0, fmt.Errorf("requeue tasks: %w", err)
	}
	return update(ctx, db.Provider, "requeue tasks", func(s *state, now time.Time) int {
		picked := s.work.pick(f, func(t task) bool {
			return t.Status == provider.TaskAbandoned || t.Status == provider.TaskFailed
		})
		for _, was := range picked {
			is := was
			restart(&is, now)
			is.Version++
			s.work.decide(was, is, provider.WhatRequeued, d, now)
		}
		return len(picked)
	})
}

// decide stores is, which a decision has made of was.
func (w *work) decide(was, is task, what string, d provider.Decision, now time.Time) {
	w.put(was, is)
	w.record(is, what, "", d, now)
}

// CancelTasks implements provider.TaskInspector.
func (db *DB) CancelTasks(ctx context.Context, f provider.TaskFilter, d provider.Decision) (int, error) {
	if err := provider.CheckTaskCancel(f, d); err != nil {
		return 0, fmt.Errorf("cancel tasks: %w", err)
	}
	return update(ctx, db.Provider, "cancel tasks", func(s *state, now time.Time) int {
		picked := s.work.pick(f, func(t task) bool { return !t.Undo && !t.Status.Final() })
		for _, t := range picked {
			s.work.cancel(t, d, now)
		}
		return len(picked)
	})
}

// CompleteTask implements provider.TaskInspector.
func (db *DB) CompleteTask(ctx context.Context, id string, result json.RawMessage, d provider.Decision) error {
	invalid := cmp.Or(provider.CheckStorable("task id", id), provider.CheckTaskResult(result), provider.CheckTaskDecision(provider.TaskFilter{}, d))
	return db.decideOne(ctx, "complete a task", invalid, func(w *work, now time.Time) error {
		was, _ := w.tasks.get(id)
		if was.Status != provider.TaskAbandoned {
			return fmt.Errorf("task %s: %w", id, provider.ErrTaskVersion)
		}
		is := was
		restart(&is, now)
		is.Version++
		is.Result = slices.Clone(result)
		w.decide(was, is, provider.WhatCompleted, d, now)
		return nil
	})
}

// PatchTask implements provider.TaskInspector. A task that waits for a slot which the patch fills
// becomes pending.
func (db *DB) PatchTask(ctx context.Context, id string, version int64, patch json.RawMessage, d provider.Decision) error {
	invalid := cmp.Or(provider.CheckStorable("task id", id), provider.CheckTaskDecision(provider.TaskFilter{}, d))
	return db.decideOne(ctx, "patch a task", invalid, func(w *work, now time.Time) error {
		was, _ := w.tasks.get(id)
		is, ok, err := was.Patch(version, patch, now)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("task %s: %w", id, provider.ErrTaskVersion)
		}
		w.decide(was, is, provider.WhatPatched, d, now)
		return nil
	})
}

func (db *Provider) decideOne(ctx context.Context, doing string, invalid error, decide func(w *work, now time.Time) error) error {
	err := invalid
	if err == nil {
		err = db.tx(ctx, func(tx *Model) error { return decide(&tx.staged.work, db.now()) })
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}
