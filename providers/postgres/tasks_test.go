package postgres_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

func draft(id string) provider.TaskDraft {
	return provider.TaskDraft{ID: id, Kind: "t/a", Input: json.RawMessage(`{"a": 1}`)}
}

// tasksIn runs fn in a transaction of Transact.
func tasksIn(t *testing.T, db *postgres.DB, fn func(ctx context.Context, tasks provider.TaskTx)) {
	t.Helper()
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		fn(ctx, db.TasksIn(tx))
		return nil
	}))
}

func enqueueTasks(t *testing.T, db *postgres.DB, drafts ...provider.TaskDraft) {
	t.Helper()
	tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) { require.NoError(t, tasks.Enqueue(ctx, drafts...)) })
}

func claimTasks(t *testing.T, db provider.Tasks, limit int, kinds ...string) []provider.Task {
	t.Helper()
	if kinds == nil {
		kinds = []string{"t/a"}
	}
	tasks, err := provider.ClaimTasks(t.Context(), db, provider.TaskQuery{Kinds: kinds, Attempts: 3}, claim.Terms{Lease: time.Minute, Limit: limit, Holder: "me"})
	require.NoError(t, err)
	return tasks
}

func changeTask(t *testing.T, db *postgres.DB, c provider.TaskChange) provider.TaskChanged {
	t.Helper()
	changed, err := db.ChangeTasks(t.Context(), []provider.TaskChange{c})
	require.NoError(t, err)
	require.Len(t, changed, 1)
	return changed[0]
}

func theTask(t *testing.T, db *postgres.DB, id string) provider.Task {
	t.Helper()
	tasks, err := db.Tasks(t.Context(), provider.TaskFilter{IDs: []string{id}})
	require.NoError(t, err)
	require.Len(t, tasks, 1)
	return tasks[0]
}

func trail(t *testing.T, db *postgres.DB, id string) (whats []string) {
	t.Helper()
	records, err := db.TaskTrail(t.Context(), id)
	require.NoError(t, err)
	for _, r := range records {
		whats = append(whats, r.What)
		require.NotEmpty(t, r.ID)
		require.NotZero(t, r.At)
		require.Equal(t, id, r.Task)
	}
	return whats
}

var ann = provider.Decision{By: "ann", Reason: "test"}

// notFinal are the statuses of tasks that can be canceled.
var notFinal = []provider.TaskStatus{provider.TaskPending, provider.TaskClaimed, provider.TaskFailed, provider.TaskWaiting, provider.TaskAbandoned}

func TestATaskGoesThroughItsStates(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, draft("a"))
	enqueueTasks(t, db, draft("a"))
	got := claimTasks(t, db, 10)
	require.Len(t, got, 1)
	stored := theTask(t, db, "a")
	stored.Doubt = false // as before the claim
	require.Equal(t, stored, got[0])
	require.Empty(t, claimTasks(t, db, 10))
	a := got[0]
	// a step
	step := provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskClaimed, After: time.Hour, Open: "s", Progress: true,
		Slots: map[string]provider.Slot{"s": {Call: 1, Out: json.RawMessage("null")}}}
	require.Equal(t, provider.TaskChanged{Applied: true, Now: provider.Task{ID: "a", Version: 2}}, changeTask(t, db, step))
	again := changeTask(t, db, step)
	require.False(t, again.Applied)
	require.False(t, again.Late(a.Token))
	require.True(t, again.Now.State["s"].Filled())
	require.JSONEq(t, "null", string(again.Now.State["s"].Out))
	require.Greater(t, time.Until(again.Now.NextAt), 50*time.Minute)
	// a wait
	wait := provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskWaiting, Open: "w", After: time.Hour, Slots: map[string]provider.Slot{"w": {Call: 2}}}
	require.True(t, changeTask(t, db, wait).Applied)
	w := theTask(t, db, "a")
	require.Equal(t, provider.TaskWaiting, w.Status)
	require.Equal(t, w.NextAt.Format("2006-01-02T15:04:05.000000Z"), w.State["w"].Until)
	require.Equal(t, 2, w.State["w"].Call)
	require.True(t, changeTask(t, db, wait).Late(a.Token))
	tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
		answer := provider.TaskAnswer{Task: "a", Name: "w", ID: "m1", Out: json.RawMessage(`7`)}
		for _, want := range []provider.AnswerOutcome{provider.AnswerTaken, provider.AnswerAgain} {
			outcome, err := tasks.Answer(ctx, answer)
			require.NoError(t, err)
			require.Equal(t, want, outcome)
		}
		answer.ID = "m2"
		outcome, err := tasks.Answer(ctx, answer)
		require.NoError(t, err)
		require.Equal(t, provider.AnswerLate, outcome)
		answer.Task = "none"
		outcome, err = tasks.Answer(ctx, answer)
		require.NoError(t, err)
		require.Equal(t, provider.AnswerNotFound, outcome)
	})
	got = claimTasks(t, db, 10)
	require.Len(t, got, 1)
	require.Equal(t, 1, got[0].Attempts)
	require.Equal(t, "w", got[0].Waits)
	require.False(t, got[0].TimedOut)
	require.JSONEq(t, "7", string(got[0].State["w"].Out))
	require.Equal(t, 2, got[0].State["w"].Call)
	done := provider.TaskChange{ID: "a", Token: got[0].Token, To: provider.TaskDone, Result: json.RawMessage(`"x"`)}
	require.True(t, changeTask(t, db, done).Applied)
	require.True(t, changeTask(t, db, done).Late(got[0].Token))
	d := theTask(t, db, "a")
	require.Equal(t, provider.TaskDone, d.Status)
	require.JSONEq(t, `"x"`, string(d.Result))
	require.NotZero(t, d.EndedAt)
	require.Equal(t, []string{provider.WhatAnswered, provider.WhatDone}, trail(t, db, "a"))
}

func TestAWaitWithoutEnd(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, draft("a"))
	a := claimTasks(t, db, 1)[0]
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskWaiting, Open: "w"}).Applied)
	w := theTask(t, db, "a")
	require.Equal(t, []any{provider.TaskWaiting, "w", true}, []any{w.Status, w.Waits, w.NextAt.IsZero()})
	n, err := db.CancelTasks(t.Context(), provider.TaskFilter{Status: notFinal}, ann)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	a = claimTasks(t, db, 1)[0]
	require.True(t, a.Undo)
	require.Equal(t, provider.WhyCanceled, a.Why)
	require.False(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskDone}).Applied)
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: a.Token, To: provider.TaskUndone}).Applied)
	require.Equal(t, []string{provider.WhatCanceled, provider.WhatUndone}, trail(t, db, "a"))
}

func TestATaskThatVanishesTwiceIsClaimedAloneUntilItIsSpent(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]func(db *postgres.DB) provider.Tasks{
		"batch": func(db *postgres.DB) provider.Tasks { return db }, "portable": func(db *postgres.DB) provider.Tasks { return struct{ provider.Tasks }{db} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			enqueueTasks(t, db, draft("a"))
			vanish := func() {
				_, err := db.Pool().Exec(t.Context(), `update kinora.tasks set next_at = clock_timestamp() - interval '1 second'`)
				require.NoError(t, err)
			}
			claimed := func(alone bool) []provider.Task {
				got, err := provider.ClaimTasks(t.Context(), of(db), provider.TaskQuery{Kinds: []string{"t/a"}, Attempts: 4, Alone: alone}, claim.Terms{})
				require.NoError(t, err)
				return got
			}
			for want := 1; want <= 2; want++ {
				require.Empty(t, claimed(true))
				got := claimed(false)
				require.Len(t, got, 1)
				require.Equal(t, []any{want, want - 1}, []any{got[0].Attempts, got[0].Vanished})
				vanish()
			}
			require.Empty(t, claimed(false))
			a := theTask(t, db, "a")
			require.Equal(t, []any{provider.TaskFailed, true, "vanished", int64(1)}, []any{a.Status, a.Suspect, a.Code, a.Version})
			require.Empty(t, claimed(false))
			for want := 3; want <= 4; want++ {
				got := claimed(true)
				require.Len(t, got, 1)
				require.Equal(t, []any{want, false}, []any{got[0].Attempts, got[0].Spent})
				vanish()
			}
			got := claimed(true)
			require.Len(t, got, 1)
			require.Equal(t, []any{4, true, provider.CodeVanished}, []any{got[0].Attempts, got[0].Spent, got[0].Code})
			require.True(t, changeTask(t, db, provider.TaskChange{ID: "a", Token: got[0].Token, To: provider.TaskAbandoned, Code: got[0].Code}).Applied)
			n, err := db.RequeueTasks(t.Context(), provider.TaskFilter{Code: "vanished", Kind: "t/a"}, ann)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			require.Len(t, claimed(false), 1)
			const vanished = provider.WhatFailed
			require.Equal(t, []string{vanished, vanished, vanished, vanished, provider.WhatAbandoned, provider.WhatRequeued}, trail(t, db, "a"))
		})
	}
}

func TestAGroupIsCountedAndCompared(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	g := provider.TaskGroupDraft{ID: "g", Kind: "t/g", Data: json.RawMessage(`{"x": 1.0}`), Tasks: []provider.TaskDraft{draft("b"), draft("a")}}
	reused := func(change func(*provider.TaskGroupDraft)) {
		other := g
		change(&other)
		tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
			require.ErrorIs(t, tasks.EnqueueGroup(ctx, other), provider.ErrTaskIDReused)
		})
	}
	for range 2 {
		tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) { require.NoError(t, tasks.EnqueueGroup(ctx, g)) })
	}
	reused(func(g *provider.TaskGroupDraft) { g.Data = json.RawMessage(`2`) })
	reused(func(g *provider.TaskGroupDraft) { g.Kind = "t/h" })
	reused(func(g *provider.TaskGroupDraft) { g.Tasks = g.Tasks[:1] })
	reused(func(g *provider.TaskGroupDraft) { g.Tasks = []provider.TaskDraft{draft("a"), draft("c")} })
	reused(func(g *provider.TaskGroupDraft) { g.ID = "h"; g.Tasks = []provider.TaskDraft{draft("d"), draft("a")} })
	tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
		require.ErrorIs(t, tasks.Enqueue(ctx, draft("a")), provider.ErrTaskIDReused)
		require.ErrorIs(t, tasks.Enqueue(ctx, draft("e"), draft("a")), provider.ErrTaskIDReused)
	})
	all, err := db.Tasks(t.Context(), provider.TaskFilter{})
	require.NoError(t, err)
	require.Len(t, all, 2, "a refused call adds nothing")
	_, found, err := db.TaskGroup(t.Context(), "h")
	require.NoError(t, err)
	require.False(t, found)
	for i, a := range claimTasks(t, db, 10) {
		tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
			changed, err := tasks.Change(ctx, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskDone})
			require.NoError(t, err)
			require.Equal(t, &provider.TaskGroup{ID: "g", Kind: "t/g", Data: json.RawMessage(`{"x": 1.0}`), Total: 2, Open: 1 - i}, changed.Group)
		})
	}
	_, err = db.Pool().Exec(t.Context(), `update kinora.tasks set ended_at = ended_at - interval '1 day'; update kinora.task_groups set completed_at = completed_at - interval '1 day'`)
	require.NoError(t, err)
	for _, want := range []int{1, 1, 0} {
		n, err := db.DeleteTasks(t.Context(), provider.TaskRetention{Done: time.Hour, Undone: time.Hour}, 1)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	_, found, err = db.TaskGroup(t.Context(), "g")
	require.NoError(t, err)
	require.False(t, found)
}

func TestATimerIsPostponed(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	at := time.Now().Add(24 * 365 * 50 * time.Hour).UTC().Truncate(time.Microsecond)
	enqueueTasks(t, db, draft("a").Due(at), draft("b"))
	require.Equal(t, at, theTask(t, db, "a").NextAt)
	postpone := func(id string, want bool) {
		t.Helper()
		tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
			done, err := tasks.Postpone(ctx, id, at)
			require.NoError(t, err)
			require.Equal(t, want, done)
		})
	}
	postpone("a", true)
	postpone("none", false)
	b := claimTasks(t, db, 1)[0]
	postpone("b", true)
	require.True(t, changeTask(t, db, provider.TaskChange{ID: "b", Token: b.Token, To: provider.TaskDone}).Late(b.Token))
	require.Equal(t, at, theTask(t, db, "b").NextAt)
	require.Equal(t, []string{provider.WhatPostponed}, trail(t, db, "b"))
	tasksIn(t, db, func(ctx context.Context, tasks provider.TaskTx) {
		for _, want := range []bool{true, false} {
			done, err := tasks.Cancel(ctx, "b")
			require.NoError(t, err)
			require.Equal(t, want, done)
		}
	})
	postpone("b", false)
}
