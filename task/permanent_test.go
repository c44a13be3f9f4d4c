package task_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
)

// A permanent error has a code that an operator can read.
func TestPermanentErrorsHaveACode(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"permanent":  errors.New("the account is closed"),
		"legal_hold": &provider.Error{Class: provider.ClassUnknown, Code: "legal_hold", Err: errors.New("held")},
	} {
		db, errNew := memory.New(nil)
		require.NoError(t, errNew)
		kind := task.Define("calls/refused", func(context.Context, *task.Run[*memory.Model], int) (bool, error) {
			return false, task.Permanent(err)
		})
		require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
			return db.TasksIn(tx).Enqueue(ctx, kind.New("one", 1))
		}))
		w, errNew := task.NewWorker(db, task.WorkerConfig{}, kind)
		require.NoError(t, errNew)
		_, errNew = w.RunOnce(t.Context())
		require.NoError(t, errNew)
		tasks, errNew := db.Tasks(t.Context(), task.Filter{Status: []task.Status{task.Abandoned}})
		require.NoError(t, errNew)
		require.Len(t, tasks, 1)
		require.Equal(t, want, tasks[0].Code)
	}
}
