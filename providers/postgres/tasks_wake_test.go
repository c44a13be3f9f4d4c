package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// A commit that may have made tasks due wakes workers, and nothing else does.
func TestTasksDueIsClosedAfterTheCommit(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	unit := func(fn func(ctx context.Context, tasks provider.TaskTx) error) error {
		return db.Do(t.Context(), provider.Unit{}, func(ctx context.Context, tx pgx.Tx, _ provider.Found) (provider.Closing, error) {
			return provider.Closing{}, fn(ctx, db.TasksIn(tx))
		})
	}
	wakes := func(why string, want bool, do func()) {
		t.Helper()
		due := db.TasksDue()
		do()
		require.Equal(t, want, closed(due), why)
	}
	wakes("a unit that is rolled back", false, func() {
		require.Error(t, unit(func(ctx context.Context, tasks provider.TaskTx) error {
			require.NoError(t, tasks.Enqueue(ctx, draft("a")))
			return errors.New("no")
		}))
	})
	wakes("a unit without tasks", false, func() {
		require.NoError(t, unit(func(context.Context, provider.TaskTx) error { return nil }))
	})
	due := db.TasksDue()
	wakes("a unit that adds a task", true, func() {
		require.NoError(t, unit(func(ctx context.Context, tasks provider.TaskTx) error {
			require.NoError(t, tasks.Enqueue(ctx, draft("a")))
			require.False(t, closed(due), "before the commit")
			return nil
		}))
	})
	var a provider.Task
	wakes("a claim", false, func() { a = claimTasks(t, db, 1)[0] })
	wakes("a release", true, func() {
		require.True(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskPending}).Applied)
	})
	wakes("a release that is refused", false, func() {
		require.False(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskPending}).Applied)
	})
	wakes("an answer in a unit", true, func() {
		require.NoError(t, unit(func(ctx context.Context, tasks provider.TaskTx) error {
			_, err := tasks.Answer(ctx, provider.TaskAnswer{Task: "a", Name: "w", ID: "m", Out: json.RawMessage("1")})
			return err
		}))
	})
	wakes("Transact", true, func() { enqueueTasks(t, db, draft("b")) })
	wakes("a decision", true, func() {
		_, err := db.CancelTasks(t.Context(), provider.TaskFilter{Status: notFinal}, ann)
		require.NoError(t, err)
	})
	wakes("Wake", true, db.Wake)
}

func TestAListenerWakesWorkersOfOtherProcesses(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	here, there := notifying(t, dsn, false), notifying(t, dsn, true)
	listen(t, here, nil, true)
	due := here.TasksDue()
	enqueueTasks(t, there, draft("a"))
	patience.Receive(t, due, "a task that is added")
	a := claimTasks(t, there, 1)[0]
	due = here.TasksDue()
	require.True(t, changeTask(t, there, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskPending}).Applied)
	patience.Receive(t, due, "a task that is released")
}

// Every operation needs one connection at a time.
func TestTasksOnOneConnection(t *testing.T) {
	t.Parallel()
	for _, mode := range append([]string{"cache_statement"}, poolerModes...) {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db, err := postgres.Open(t.Context(), postgrestest.DSN(t, nil)+"&pool_max_conns=1&default_query_exec_mode="+mode, nil)
			require.NoError(t, err)
			t.Cleanup(db.Close)
			ctx := patience.Context(t)
			require.NoError(t, startsTasks(ctx, db))
			require.NoError(t, works(ctx, db))
			for range 3 {
				for _, a := range claimTasks(t, db, 10) {
					to := provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskAbandoned, GiveUp: "no", Code: "c", Slots: map[string]provider.Slot{"s": {Call: 1}}}
					require.True(t, changeTask(t, db, to).Applied)
					require.False(t, changeTask(t, db, to).Applied)
				}
			}
			all, err := db.Tasks(ctx, provider.TaskFilter{Status: []provider.TaskStatus{provider.TaskAbandoned}, Code: "c"})
			require.NoError(t, err)
			require.NotEmpty(t, all)
			require.NoError(t, db.PatchTask(ctx, all[0].ID, all[0].Version, json.RawMessage(`{"s": null}`), ann))
		})
	}
}

// The schema may be named as a keyword of SQL.
func TestTasksInAnotherSchema(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	for _, name := range []string{"shop", "values", "row"} {
		shop, err := postgres.New(db.Pool(), &postgres.Config{Schema: name})
		require.NoError(t, err)
		require.NoError(t, shop.Migrate(t.Context()))
		require.NoError(t, startsTasks(t.Context(), shop), name)
		require.NoError(t, works(t.Context(), shop), name)
		require.Zero(t, count(t, db, `select count(*) from kinora.tasks`))
	}
}

// Rows that another program wrote harm themselves only.
func TestForeignTasksHarmThemselvesOnly(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]string{
		"state is a number": `state = '1'`, "state is null": `state = 'null'`, "state is an array": `state = '[{}]'`, "a slot is a number": `state = '{"w": 1}'`,
		"a slot has other types": `state = '{"w": {"n": "x", "until": 1, "timeout": "no"}}'`, "attempts": `attempts = 2147483647, vanished = 2147483647, suspect = false`,
		"negative": `attempts = -2147483648, vanished = -2147483648, version = -1`,
		"times":    `next_at = '-infinity', created_at = '-infinity', wait_until = 'infinity', ended_at = 'infinity'`,
		"far":      `next_at = '4000-01-01 BC', created_at = '20000-01-01', wait_until = '20000-01-01', ended_at = '4000-01-01 BC'`,
		"status":   `status = 'other'`, "closed": `status = 'done', open = true`, "never": `status = 'claimed', next_at = 'infinity'`,
		"group": `group_id = 'none', group_kind = 'none'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil)
			enqueueTasks(t, db, draft("a"), draft("b"), draft("c"))
			_, err := db.Pool().Exec(t.Context(), `update kinora.tasks set `+set+` where id = 'b'`)
			require.NoError(t, err)
			all, err := db.Tasks(t.Context(), provider.TaskFilter{})
			require.NoError(t, err)
			require.Len(t, all, 3)
			_, err = json.Marshal(all)
			require.NoError(t, err)
			_, err = db.TaskTrail(t.Context(), "b")
			require.NoError(t, err)
			_, err = db.TaskCounts(t.Context(), "")
			require.NoError(t, err)
			done := map[string]bool{}
			for _, store := range []provider.Tasks{struct{ provider.Tasks }{db}, db} {
				for _, a := range claimTasks(t, store, 2) {
					require.NotNil(t, a.State)
					late, err := db.RenewTasks(t.Context(), []provider.Task{a}, time.Minute)
					require.NoError(t, err)
					require.Empty(t, late)
					tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
						_, err := tasks.Answer(ctx, provider.TaskAnswer{Task: a.ID, Name: "w", ID: "m", Out: json.RawMessage("1")})
						require.NoError(t, err)
					})
					done[a.ID] = changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskDone}).Applied
				}
			}
			require.True(t, done["a"] && done["c"])
			if b := theTask(t, db, "b"); b.State == nil {
				require.Equal(t, []any{provider.TaskAbandoned, "malformed"}, []any{b.Status, b.Code})
			}
			_, err = db.CancelTasks(t.Context(), provider.TaskFilter{Status: notFinal}, ann)
			require.NoError(t, err)
			_, err = db.DeleteTasks(t.Context(), provider.TaskRetention{Done: time.Hour, Undone: time.Hour}, 10)
			require.NoError(t, err)
		})
	}
}

// A renewal does not wait for a row that another transaction has locked, and does not report it.
func TestARenewalWaitsForNoLock(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, draft("a"), draft("b"), draft("c"))
	tasks := claimTasks(t, db, 3)
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "c", Token: tasks[2].Token, To: provider.TaskDone}).Applied)
	before := theTask(t, db, "b").NextAt
	tasksIn(t, db, func(ctx context.Context, in provider.TaskTx) {
		_, err := in.Answer(ctx, provider.TaskAnswer{Task: "b", Name: "w", ID: "m", Out: json.RawMessage("1")})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(ctx, patience.Limit())
		defer cancel()
		late, err := db.RenewTasks(ctx, append(tasks, provider.Task{ID: "none"}), time.Hour)
		require.NoError(t, err)
		require.ElementsMatch(t, []string{"c", "none"}, late)
	})
	require.Equal(t, before, theTask(t, db, "b").NextAt)
	require.Greater(t, time.Until(theTask(t, db, "a").NextAt), 50*time.Minute)
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: tasks[0].Token, To: provider.TaskDone}).Applied)
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "b", Token: tasks[1].Token, To: provider.TaskDone}).Applied)
}

// A batch of changes locks tasks in order of id, as decisions do, so that these do not deadlock.
func TestChangesLockTasksInOrder(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, draft("a"), draft("b"), draft("c"))
	tasks := claimTasks(t, db, 3)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from kinora.tasks where id = 'b' for update`)
	require.NoError(t, err)
	changes := make([]provider.TaskChange, len(tasks))
	for i, task := range tasks {
		changes[len(tasks)-1-i] = provider.TaskChange{ID: task.ID, Token: task.Token, To: provider.TaskDone}
	}
	done := make(chan error, 1)
	go func() {
		changed, err := db.ChangeTasks(t.Context(), changes)
		for _, c := range changed {
			if !c.Applied {
				err = errors.New("not applied")
			}
		}
		done <- err
	}()
	waiting(t, db, 1)
	var free string
	require.NoError(t, db.Pool().QueryRow(t.Context(), `select string_agg(id, '') from (select id from kinora.tasks for update skip locked) t`).Scan(&free))
	require.Equal(t, "c", free)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-done)
}

// Two transactions that add one id with different inputs: the second waits, and fails so that
// Transact runs it again. The next run returns that the id is used.
func TestTasksAddedAtTheSameTime(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	first, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = first.Rollback(context.Background()) }()
	require.NoError(t, db.TasksIn(first).Enqueue(t.Context(), draft("b")))
	other := draft("b")
	other.Input = json.RawMessage("2")
	done := make(chan error, 1)
	runs := 0
	go func() {
		done <- db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			runs++
			return db.TasksIn(tx).Enqueue(ctx, draft("a"), other)
		})
	}()
	waiting(t, db, 1)
	require.NoError(t, first.Commit(t.Context()))
	require.ErrorIs(t, <-done, provider.ErrTaskIDReused)
	require.Equal(t, 2, runs)
	require.Equal(t, 1, count(t, db, `select count(*) from kinora.tasks`))
}
