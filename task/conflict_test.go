package task_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
)

type counted struct{ N int }

type counter struct{ n int }

func (c *counter) Apply(any) { c.n++ }

// Steps that change one aggregate at the same time conflict. That is not the fault of a task: the
// transaction runs again at once, and no attempt is counted.
// Promise: T4.1
func TestConflictingStepsRunAgainAtOnce(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	types := eventstore.NewTypes(eventstore.Type[counted]("counted"))
	counters, err := eventstore.NewRepository(db, types, "counter", func(string) *counter { return &counter{} }, nil)
	require.NoError(t, err)
	count := func(ctx context.Context, tx pgx.Tx) error {
		_, err := counters.UpdateTx(ctx, db.InTx(tx), "one", func(c *counter) ([]any, error) { return []any{counted{c.n}}, nil })
		return err
	}
	steps := task.Define("counters/steps", func(ctx context.Context, r *task.Run[pgx.Tx], _ int) (bool, error) {
		return task.StepTx(ctx, r, "count", func(ctx context.Context, tx pgx.Tx) (bool, []outbox.Message, error) {
			return true, nil, count(ctx, tx)
		}, nil)
	})
	whole := task.DefineTx("counters/whole", func(ctx context.Context, tx pgx.Tx, _ int) (bool, []outbox.Message, error) {
		return true, nil, count(ctx, tx)
	})
	w, err := task.NewWorker(db, task.WorkerConfig{}, steps, whole)
	require.NoError(t, err)
	const n = 20
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		for i := range n {
			id := fmt.Sprint(i)
			if err := db.TasksIn(tx).Enqueue(ctx, steps.New("step-"+id, i), whole.New("whole-"+id, i)); err != nil {
				return err
			}
		}
		return nil
	}))
	g, err := kinora.Start(t.Context(), w)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Stop()) }()
	patience.Until(t, func() bool {
		c, err := db.TaskCounts(t.Context(), "")
		require.NoError(t, err)
		require.Zero(t, c[task.Failed])
		return c[task.Done] == 2*n
	}, "the tasks")
	c, _, err := counters.Load(t.Context(), "one")
	require.NoError(t, err)
	require.Equal(t, 2*n, c.n)
}
