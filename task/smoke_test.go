package task_test

import (
	"context"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

func TestSmoke(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	var log []string
	p := task.Define("orders/fulfil", func(ctx context.Context, r *task.Run[*memory.Model], in int) (string, error) {
		a, err := task.Step(ctx, r, "charge", func(_ context.Context, key string) (string, error) { log = append(log, key); return "ref", nil },
			func(_ context.Context, key string, done *string) error { log = append(log, "undo "+key+" "+*done); return nil })
		if err != nil {
			return "", err
		}
		s, err := task.Wait[string](ctx, r, "scanned", time.Hour)
		if err != nil {
			return "", err
		}
		if s == "no" {
			return "", task.GiveUp("refused")
		}
		return task.StepTx(ctx, r, "done", func(ctx context.Context, tx *memory.Model) (string, []outbox.Message, error) {
			tx.Put("t", "k", a+s)
			return a + s, nil, nil
		}, nil)
	})
	w, err := task.NewWorker(db, task.WorkerConfig{}, p)
	require.NoError(t, err)
	g, err := kinora.Start(t.Context(), w)
	require.NoError(t, err)
	enqueue := func(id string, answer string) {
		require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
			if err := db.TasksIn(tx).Enqueue(ctx, p.New(id, 1)); err != nil {
				return err
			}
			_, err := db.TasksIn(tx).Answer(ctx, task.Answer{Task: id, Name: "scanned", ID: "m" + id, Out: []byte(answer)})
			return err
		}))
	}
	enqueue("a", `"yes"`)
	enqueue("b", `"no"`)
	require.Eventually(t, func() bool {
		c, err := db.TaskCounts(t.Context(), "")
		require.NoError(t, err)
		return c[task.Done] == 1 && c[task.Undone] == 1
	}, 5*time.Second, 5*time.Millisecond)
	all, err := db.Tasks(t.Context(), task.Filter{})
	require.NoError(t, err)
	out, err := p.Result(all[0])
	require.NoError(t, err)
	require.Equal(t, "refyes", out)
	require.Equal(t, "refused", all[1].Why)
	require.NoError(t, g.Stop())
	t.Log(log)
}
