package postgres_test

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// fillTasks adds n tasks by SQL, which are due after a time.
func fillTasks(t testing.TB, db *postgres.DB, prefix, kind, status string, n int, after time.Duration) {
	t.Helper()
	_, err := db.Pool().Exec(context.Background(), `
		insert into kinora.tasks (id, kind, input, status, open, next_at, ended_at)
		select $1::text || g, $2::text, '1', $3::text, $3::text in ('pending', 'waiting'), clock_timestamp() + $5::interval, case when $3::text = 'done' then clock_timestamp() end
		from generate_series(1, $4::int) g`, prefix, kind, status, n, after)
	require.NoError(t, err)
}

// A store whose statistics say that the tables of tasks are empty, and whose only connection has
// already made its plans for empty tables.
func agedTasks(t *testing.T) *postgres.DB {
	t.Helper()
	db := postgrestest.OpenBusy(t, nil)
	for _, table := range []string{"tasks", "task_groups", "task_trail"} {
		_, err := db.Pool().Exec(t.Context(), "alter table kinora."+table+" set (autovacuum_enabled = false)")
		require.NoError(t, err)
		_, err = db.Pool().Exec(t.Context(), "vacuum analyze kinora."+table)
		require.NoError(t, err)
	}
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	aged, err := postgres.New(pool, nil)
	require.NoError(t, err)
	return aged
}

// taskCalls are calls of every statement of tasks.
func taskCalls(t *testing.T, db *postgres.DB) map[string]func() {
	n := 0
	name := func() string { n++; return "x" + time.Duration(n).String() }
	claimed := func(store provider.Tasks, limit int) []provider.Task {
		tasks, err := provider.ClaimTasks(t.Context(), store, provider.TaskQuery{Kinds: []string{"t/a", "t/b", "t/c"}, Attempts: 8}, claim.Terms{Limit: limit})
		require.NoError(t, err)
		return tasks
	}
	one := func() provider.Task {
		enqueueTasks(t, db, draft(name()))
		return claimed(db, 1)[0]
	}
	return map[string]func(){
		"an empty claim":          func() { require.Empty(t, claimed(db, 50)) },
		"an empty portable claim": func() { require.Empty(t, claimed(struct{ provider.Tasks }{db}, 50)) },
		"enqueue, claim, step, wait, answer": func() {
			a := one()
			step := provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskClaimed, After: time.Minute, Open: "s",
				Slots: map[string]provider.Slot{"s": {Call: 1, Out: json.RawMessage("1")}}}
			require.True(t, changeTask(t, db, step).Applied)
			require.False(t, changeTask(t, db, step).Applied, "refused")
			late, err := db.RenewTasks(t.Context(), []provider.Task{a}, time.Minute)
			require.NoError(t, err)
			require.Empty(t, late)
			require.True(t, changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskWaiting, Open: "w"}).Applied)
			tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
				outcome, err := tasks.Answer(ctx, provider.TaskAnswer{Task: a.ID, Name: "w", ID: "m", Out: json.RawMessage("1")})
				require.NoError(t, err)
				require.Equal(t, provider.AnswerTaken, outcome)
				_, err = tasks.Cancel(ctx, a.ID)
				require.NoError(t, err)
			})
			a = claimed(struct{ provider.Tasks }{db}, 1)[0]
			require.True(t, changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskUndone}).Applied)
			require.Len(t, trail(t, db, a.ID), 3)
		},
		"a group": func() {
			tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
				g := provider.TaskGroupDraft{ID: name(), Kind: "t/g", Data: json.RawMessage("1"), Tasks: []provider.TaskDraft{draft(name())}}
				require.NoError(t, tasks.EnqueueGroup(ctx, g))
				require.NoError(t, tasks.EnqueueGroup(ctx, g))
			})
			a := claimed(db, 1)[0]
			tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
				changed, err := tasks.Change(ctx, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskDone})
				require.NoError(t, err)
				require.Equal(t, 0, changed.Group.Open)
			})
			all, err := db.Tasks(t.Context(), provider.TaskFilter{Group: a.Group})
			require.NoError(t, err)
			require.Len(t, all, 1)
		},
		"timers": func() {
			a := draft(name())
			enqueueTasks(t, db, a.Later(time.Hour), draft(name()).Later(time.Hour))
			tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
				done, err := tasks.Postpone(ctx, a.ID, time.Now().Add(time.Hour))
				require.NoError(t, err)
				require.True(t, done)
			})
		},
		"decisions and lists": func() {
			a := one()
			require.True(t, changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskAbandoned, Code: "c"}).Applied)
			all, err := db.Tasks(t.Context(), provider.TaskFilter{Status: []provider.TaskStatus{provider.TaskAbandoned}})
			require.NoError(t, err)
			require.Len(t, all, 1)
			require.NoError(t, db.PatchTask(t.Context(), a.ID, all[0].Version, json.RawMessage(`{"s": {"out": 1}}`), ann))
			require.NoError(t, db.CompleteTask(t.Context(), a.ID, json.RawMessage("1"), ann))
			a = claimed(db, 1)[0]
			require.True(t, changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskAbandoned}).Applied)
			k, err := db.RequeueTasks(t.Context(), provider.TaskFilter{Kind: "t/a", Code: "other"}, ann)
			require.NoError(t, err)
			require.Zero(t, k)
			k, err = db.RequeueTasks(t.Context(), provider.TaskFilter{Kind: "t/a"}, ann)
			require.NoError(t, err)
			require.Equal(t, 1, k)
			a = claimed(db, 1)[0]
			require.True(t, changeTask(t, db, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskDone}).Applied)
			kinds, err := db.TaskKinds(t.Context(), "t")
			require.NoError(t, err)
			require.Subset(t, []string{"t/a", "t/b", "t/c"}, kinds)
		},
		"retention": func() {
			_, err := db.DeleteTasks(t.Context(), provider.TaskRetention{Done: time.Hour, Undone: time.Hour}, 100)
			require.NoError(t, err)
		},
	}
}

// The statements of tasks read only a few pages, whatever number of tasks of their kinds and of
// others wait, is due or has ended, even if their plans were made while the tables were empty.
func TestTheCostOfTasksIsFlat(t *testing.T) {
	t.Parallel()
	many := longtest.Or(20_000, 200_000)
	db := agedTasks(t)
	calls := taskCalls(t, db)
	for range 7 { // the fifth makes the plan that is kept
		for _, call := range calls {
			call()
		}
	}
	before := map[string]int{}
	for what, call := range calls {
		before[what] = pages(t, db.Pool(), call)
	}
	for _, kind := range []string{"t/a", "t/b"} {
		fillTasks(t, db, "later "+kind, kind, "pending", many, time.Hour)
	}
	fillTasks(t, db, "waiting", "t/a", "waiting", many, time.Hour)
	fillTasks(t, db, "done", "t/c", "done", many, 0)
	for what, call := range calls {
		after := pages(t, db.Pool(), call)
		t.Logf("%s: %d pages, %d with many tasks", what, before[what], after)
		require.Less(t, after, 2*before[what]+100, what)
	}
}

// A claim among many due tasks costs the same at the beginning and at the end. Each kind has its
// turn.
func TestManyTasksThatAreDueAtOnce(t *testing.T) {
	t.Parallel()
	many := longtest.Or(5_000, 50_000)
	db := agedTasks(t)
	require.Empty(t, claimTasks(t, db, 50))
	fillTasks(t, db, "a", "t/a", "pending", many, -time.Hour)
	fillTasks(t, db, "b", "t/b", "pending", 10, -time.Minute)
	first := claimTasks(t, db, 20, "t/a", "t/b")
	kinds := map[string]int{}
	for _, task := range first {
		kinds[task.Kind]++
	}
	require.Equal(t, map[string]int{"t/a": 10, "t/b": 10}, kinds)
	require.Less(t, pages(t, db.Pool(), func() { require.Len(t, claimTasks(t, db, 10), 10) }), 600, "a claim of ten")
	var took []time.Duration
	for left := many - 20; left > 0; {
		began := time.Now()
		tasks := claimTasks(t, db, 50)
		took = append(took, time.Since(began))
		require.NotEmpty(t, tasks)
		left -= len(tasks)
		changes := make([]provider.TaskChange, len(tasks))
		for i, task := range tasks {
			changes[i] = provider.TaskChange{ID: task.ID, Token: task.Token, To: provider.TaskDone}
		}
		changed, err := db.ChangeTasks(t.Context(), changes)
		require.NoError(t, err)
		for i := range changed {
			require.True(t, changed[i].Applied)
		}
	}
	slices.Sort(took)
	t.Logf("%d claims: median %s, p99 %s", len(took), took[len(took)/2], took[len(took)*99/100])
	// An empty claim marks the dead entries of the index, unless a transaction may still need them.
	patience.Until(t, func() bool {
		require.Empty(t, claimTasks(t, db, 50))
		return pages(t, db.Pool(), func() { require.Empty(t, claimTasks(t, db, 50)) }) < many/50
	}, "an empty claim after them reads few pages")
}
