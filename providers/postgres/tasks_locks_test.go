package postgres_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// lockLimit is how long a statement that waits for no lock may take.
// A row that another transaction has locked keeps no other task from being renewed.
// Promise: T2.2
func TestARenewalWaitsForNoRow(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, draft("a"), draft("b"))
	tasks := claimTasks(t, db, 10)
	require.Len(t, tasks, 2)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `select from kinora.tasks where id = 'a' for update`)
	require.NoError(t, err)
	late, err := db.RenewTasks(patience.Context(t), tasks, time.Hour)
	require.NoError(t, err)
	require.Empty(t, late)
	require.Equal(t, tasks[0].NextAt, theTask(t, db, "a").NextAt)
	require.True(t, theTask(t, db, "b").NextAt.After(tasks[1].NextAt))
}

// An empty claim reads no task that is not due.
// Promise: T2.2
func TestAClaimReadsNoWaitingTasks(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	var drafts []provider.TaskDraft
	for i := range 2000 {
		drafts = append(drafts, draft(fmt.Sprint(i)).Later(time.Hour))
	}
	enqueueTasks(t, db, drafts...)
	for _, statement := range []string{
		`select from kinora.claim_tasks('{t/a}', false, 10, 3, gen_random_uuid(), 'me', 1000)`,
		postgres.TaskCandidatesSQL,
	} {
		tx, err := db.Pool().Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(t.Context()) }()
		args := []any{}
		if statement == postgres.TaskCandidatesSQL {
			args = []any{[]string{"t/a"}, false, 10}
		}
		tag, err := tx.Exec(t.Context(), statement, args...)
		require.NoError(t, err)
		require.Zero(t, tag.RowsAffected())
		var read int
		require.NoError(t, tx.QueryRow(t.Context(), `
			select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = 'tasks'`).Scan(&read))
		require.Less(t, read, 10, statement)
	}
}

// The row of a task is locked at the end of its step's transaction, so an answer does not wait for
// the step.
// Promise: T5.1
func TestAnAnswerDoesNotWaitForAStep(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	began, answered := make(chan struct{}), make(chan struct{})
	kind := task.Define("t/a", func(ctx context.Context, r *task.Run[pgx.Tx], _ int) (string, error) {
		_, err := task.StepTx(ctx, r, "step", func(ctx context.Context, _ pgx.Tx) (int, []outbox.Message, error) {
			close(began)
			select {
			case <-answered:
			case <-ctx.Done():
			}
			return 1, nil, ctx.Err()
		}, nil)
		if err != nil {
			return "", err
		}
		return task.Wait[string](ctx, r, "answer", 0)
	})
	enqueueTasks(t, db, kind.New("a", 1))
	worker, err := task.NewWorker(db, task.WorkerConfig{}, kind)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { _, err := worker.RunOnce(t.Context()); done <- err }()
	<-began
	err = db.Transact(patience.Context(t), func(ctx context.Context, tx pgx.Tx) error {
		_, err := db.TasksIn(tx).Answer(ctx, task.Answer{Task: "a", Name: "answer", ID: "m", Out: json.RawMessage(`"yes"`)})
		return err
	})
	close(answered)
	require.NoError(t, err)
	require.NoError(t, <-done)
	require.Equal(t, provider.TaskDone, theTask(t, db, "a").Status)
}

// The completion of a group runs on the connection of its last task: a second one may not be free.
// Promise: T8.1
func TestAGroupIsCompletedOnItsOneConnection(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil)+"&pool_max_conns=1")
	kind := task.Define("t/a", func(context.Context, *task.Run[pgx.Tx], int) (int, error) { return 1, nil })
	group := task.DefineGroup("t/group", func(ctx context.Context, tx pgx.Tx, id string, _ int) ([]outbox.Message, error) {
		return nil, db.TasksIn(tx).Enqueue(ctx, kind.New(id+" is complete", 1))
	})
	tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
		require.NoError(t, tasks.EnqueueGroup(ctx, group.New("g", 1, kind.New("a", 1), kind.New("b", 1))))
	})
	worker, err := task.NewWorker(db, task.WorkerConfig{Timeout: patience.Limit()}, kind, group)
	require.NoError(t, err)
	n, err := worker.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, provider.TaskPending, theTask(t, db, "g is complete").Status)
}
