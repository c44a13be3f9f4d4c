package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

// ChangeTasks implements provider.Tasks.
func (db *Provider) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if err := provider.CheckTaskChanges(changes); err != nil {
		return nil, fmt.Errorf("change tasks: %w", err)
	}
	return update(ctx, db, "change tasks", func(s *state, now time.Time) []provider.TaskChanged {
		changed := make([]provider.TaskChanged, len(changes))
		for i := range changes {
			changed[i] = s.work.change(&changes[i], now)
		}
		return changed
	})
}

// change applies c to its task if the task does not refuse it.
func (w *work) change(c *provider.TaskChange, now time.Time) provider.TaskChanged {
	was, known := w.tasks.get(c.ID)
	if !known {
		return provider.TaskChanged{}
	}
	is, records, ok := was.Change(c, now)
	if !ok {
		return provider.TaskChanged{Now: ownTask(was.Task)}
	}
	w.put(was, is)
	w.recordAll(is, records, now)
	return provider.TaskChanged{
		Applied: true, Now: provider.Task{ID: is.ID, Undo: is.Undo, Version: is.Version, Group: is.Group},
	}
}

// decide applies a decision to a task that it does not refuse.
func (w *work) decide(was task, d taskrow.Decision, by provider.Decision, now time.Time) bool {
	is, ok := was.Decide(d, now)
	if ok {
		w.put(was, is)
		w.record(is, d.What, "", by, now)
	}
	return ok
}
