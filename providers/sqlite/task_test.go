package sqlite_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

const fulfil = "orders/fulfil"

var fulfilling = provider.TaskQuery{Kinds: []string{fulfil}, Attempts: 3}

// notFinal are the statuses of tasks that can be canceled.
var notFinal = []provider.TaskStatus{provider.TaskPending, provider.TaskClaimed, provider.TaskFailed, provider.TaskWaiting, provider.TaskAbandoned}

func taskDraft(id string) provider.TaskDraft {
	return provider.TaskDraft{ID: id, Kind: fulfil, Input: json.RawMessage(`{}`)}
}

func addTasks(t *testing.T, db *sqlite.DB, drafts ...provider.TaskDraft) {
	t.Helper()
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return db.TasksIn(tx).Enqueue(ctx, drafts...)
	}))
}

func claimTasks(t *testing.T, db *sqlite.DB, limit int) []provider.Task {
	t.Helper()
	taken, err := db.ClaimTasks(t.Context(), fulfilling, claim.Terms{Holder: "w", Limit: limit})
	require.NoError(t, err)
	return taken
}

func taskOf(t *testing.T, db *sqlite.DB, id string) provider.Task {
	t.Helper()
	found, err := db.Tasks(t.Context(), provider.TaskFilter{IDs: []string{id}})
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}

func execSQL(t *testing.T, db *sqlite.DB, query string, args ...any) {
	t.Helper()
	_, err := db.SQL().ExecContext(t.Context(), query, args...)
	require.NoError(t, err)
}

// ClaimTasks reads candidates before its transaction begins, and takes none that has changed since then.
func TestAClaimTakesNoTaskThatHasChanged(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx := t.Context()
	inTx := func(fn func(tasks provider.TaskTx) (bool, error)) {
		require.NoError(t, db.Transact(ctx, func(_ context.Context, tx *sql.Tx) error {
			done, err := fn(db.TasksIn(tx))
			require.True(t, done)
			return err
		}))
	}
	changed := func(to provider.TaskStatus) func(string) {
		return func(id string) {
			c := claimTasks(t, db, 1)[0]
			results, err := db.ChangeTasks(ctx, []provider.TaskChange{{ID: id, Token: c.Token, To: to}})
			require.NoError(t, err)
			require.True(t, results[0].Applied)
		}
	}
	for name, change := range map[string]func(id string){
		"claimed":  func(string) { claimTasks(t, db, 1) },
		"canceled": func(id string) { inTx(func(tasks provider.TaskTx) (bool, error) { return tasks.Cancel(ctx, id) }) },
		"postponed": func(id string) {
			inTx(func(tasks provider.TaskTx) (bool, error) { return tasks.Postpone(ctx, id, time.Now().Add(time.Hour)) })
		},
		"released": changed(provider.TaskPending), "failed": changed(provider.TaskFailed), "done": changed(provider.TaskDone),
	} {
		addTasks(t, db, taskDraft(name))
		read, err := db.TaskCandidates(ctx, fulfilling, 1)
		require.NoError(t, err)
		require.Equal(t, name, read[0].ID)
		change(name)
		was := taskOf(t, db, name)
		_, ok, err := db.TakeTask(ctx, read[0], fulfilling, claim.Terms{})
		require.NoError(t, err)
		require.False(t, ok, name)
		require.Equal(t, was, taskOf(t, db, name), name)
		execSQL(t, db, `delete from kinora_tasks`) // so that it does not affect the next one
	}
}

// No statement of workers scans the table of tasks, and a claim sorts only the tasks that it
// returns.
func TestTaskPlans(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, nil)
	addTasks(t, db, taskDraft("a"), taskDraft("b"))
	const (
		due     = "SEARCH kinora_tasks USING COVERING INDEX kinora_tasks_due (kind=? AND next_at<?)"
		suspect = "SEARCH kinora_tasks USING COVERING INDEX kinora_tasks_suspect (kind=? AND next_at<?)"
		byID    = "SEARCH kinora_tasks USING INDEX sqlite_autoindex_kinora_tasks_1 (id=?)"
		oByID   = "SEARCH o USING INDEX sqlite_autoindex_kinora_tasks_1 (id=?)"
		kinds   = "SEARCH kinora_tasks USING COVERING INDEX kinora_tasks_due (kind>? AND kind<?)"
		ended   = "SEARCH t USING INDEX kinora_tasks_ended (status=? AND ended_at<?)"
		stuck   = "SEARCH o USING COVERING INDEX kinora_tasks_stuck (id>?)"
		trail   = "SEARCH r USING INDEX kinora_task_trail_task (task=?)"
	)
	var taken []provider.Task
	ann := provider.Decision{By: "ann", Reason: "test"}
	for _, c := range []struct {
		name  string
		run   func() error
		plans [][]string // of the statements, in order; empty: not checked
	}{
		{"claim", func() (err error) {
			taken, err = db.ClaimTasks(ctx, fulfilling, claim.Terms{})
			return err
		}, [][]string{{due, oByID, "MATERIALIZE ck"}, nil, nil, {byID}, {byID}, nil}},
		{"claim alone", func() error {
			_, err := db.ClaimTasks(ctx, provider.TaskQuery{Kinds: []string{fulfil}, Alone: true}, claim.Terms{})
			return err
		}, [][]string{{suspect, oByID}}},
		{"renew", func() error {
			_, err := db.RenewTasks(ctx, taken[:1], time.Minute)
			return err
		}, [][]string{nil, {byID}, nil}},
		{"change", func() error {
			_, err := db.ChangeTasks(ctx, []provider.TaskChange{{ID: "a", Token: taken[0].Token, To: provider.TaskDone}})
			return err
		}, [][]string{nil, {oByID}, {byID}, nil, nil}},
		{"kinds", func() error {
			_, err := db.TaskKinds(ctx, "orders")
			return err
		}, [][]string{{kinds}}},
		{"a second later", func() error { return shiftBack(db.SQL(), time.Second) }, nil},
		{"delete", func() error {
			_, err := db.DeleteTasks(ctx, provider.TaskRetention{Done: time.Millisecond, Undone: time.Hour}, 10)
			return err
		}, [][]string{{ended}, nil, nil, {ended}, nil, {strings.Replace(byID, "INDEX", "COVERING INDEX", 1)}, nil, nil}},
		{"requeue", func() error {
			_, err := db.RequeueTasks(ctx, provider.TaskFilter{Kind: fulfil}, ann)
			return err
		}, [][]string{nil, nil, {strings.Replace(stuck, "COVERING ", "", 1)}, nil, nil}},
		{"list", func() error {
			_, err := db.Tasks(ctx, provider.TaskFilter{Status: []provider.TaskStatus{provider.TaskAbandoned}})
			return err
		}, [][]string{{strings.Replace(stuck, "COVERING ", "", 1)}}},
		{"list a group", func() error {
			_, err := db.Tasks(ctx, provider.TaskFilter{Group: "g"})
			return err
		}, [][]string{{"SEARCH o USING INDEX kinora_tasks_group (group_id=? AND id>?)"}}},
		{"trail", func() error {
			_, err := db.TaskTrail(ctx, "b")
			return err
		}, [][]string{{trail, "SEARCH o USING INDEX sqlite_autoindex_kinora_tasks_1 (id=?) LEFT-JOIN"}}},
	} {
		statements := tr.during(func() { require.NoError(t, c.run(), c.name) })
		if c.plans == nil {
			continue
		}
		require.Len(t, statements, len(c.plans), "%s: %q", c.name, statements)
		for i, want := range c.plans {
			if len(want) == 0 {
				continue
			}
			got := plan(t, db.SQL(), statements[i])
			for _, line := range want {
				require.Contains(t, got, line, c.name)
			}
			for _, line := range got {
				require.NotRegexp(t, `^SCAN (kinora_tasks|o|p|t)\b`, line, c.name)
			}
		}
	}
}

// Tasks that wait, with an end and without, do not make an empty claim slower.
func TestTasksThatWaitCostClaimsNothing(t *testing.T) {
	db := open(t, nil)
	claim := func() { require.Empty(t, claimTasks(t, db, 50)) }
	before := patience.Fastest(30, claim)
	execSQL(t, db, `
insert into kinora_tasks (id, kind, status, input, created_at, next_at)
with recursive g (i) as (select 1 union all select i + 1 from g where i < 100000)
select 'w' || i, ?1, 'waiting', '{}', 0, iif(i % 2, 4000000000000, null) from g`, fulfil)
	after := patience.Faster(t, 20*before, claim) // a scan would take thousands of times as long
	t.Logf("an empty claim took %v, and %v beside 100,000 tasks that wait", before, after)
}

// Each commit that may make tasks due closes the channel, after the commit. The commit of a pool of
// the caller is not seen: Wake stands for it.
func TestTasksDue(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	ctx := t.Context()
	for i, c := range []struct {
		name string
		run  func(t *testing.T, id string)
	}{
		{"Transact", func(t *testing.T, id string) { addTasks(t, db, taskDraft(id)) }},
		{"Do", func(t *testing.T, id string) {
			require.NoError(t, db.Do(ctx, provider.Unit{}, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
				due := db.TasksDue()
				defer func() { require.False(t, isClosed(due), "before the commit") }()
				return provider.Closing{}, db.TasksIn(tx).Enqueue(ctx, taskDraft(id))
			}))
		}},
		{"the pool of Open", func(t *testing.T, id string) {
			tx, err := db.SQL().BeginTx(ctx, nil)
			require.NoError(t, err)
			due := db.TasksDue()
			require.NoError(t, db.TasksIn(tx).Enqueue(ctx, taskDraft(id)))
			require.False(t, isClosed(due), "before the commit")
			require.NoError(t, tx.Commit())
		}},
		{"a release", func(t *testing.T, _ string) {
			taken := claimTasks(t, db, 1)
			due := db.TasksDue()
			_, err := db.ChangeTasks(ctx, []provider.TaskChange{{ID: taken[0].ID, Token: taken[0].Token, To: provider.TaskPending}})
			require.NoError(t, err)
			require.True(t, isClosed(due))
		}},
		{"a decision", func(t *testing.T, _ string) {
			n, err := db.CancelTasks(ctx, provider.TaskFilter{Status: notFinal}, provider.Decision{By: "ann", Reason: "test"})
			require.NoError(t, err)
			require.Positive(t, n)
		}},
		{"Wake", func(*testing.T, string) { db.Wake() }},
	} {
		due := db.TasksDue()
		c.run(t, fmt.Sprint("t", i))
		require.True(t, isClosed(due), c.name)
	}
	due := db.TasksDue()
	require.Error(t, db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		require.NoError(t, db.TasksIn(tx).Enqueue(ctx, taskDraft("rolled back")))
		return context.Canceled
	}))
	require.False(t, isClosed(due), "a rollback")
}

// Rows that another program wrote harm only themselves: claims abandon a task whose state is not an
// object of slots, take the tasks behind it, and listings show it. PatchTask repairs it.
func TestForeignTasks(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx := t.Context()
	ann := provider.Decision{By: "ann", Reason: "test"}
	for i, state := range []string{``, `no json`, `[]`, `null`, `{"a":7}`, `{"a":{"n":"x"}}`} {
		execSQL(t, db, `insert into kinora_tasks (id, kind, input, state, created_at, next_at) values (?1, ?2, 'no json', ?3, 0, ?4)`,
			fmt.Sprint("bad", i), fulfil, state, i)
	}
	execSQL(t, db, `insert into kinora_tasks (id, kind, input, attempts, vanished, version, created_at, next_at)
		values ('most', ?1, '{}', 1000000000, 1000000000, 9007199254740992, ?2, ?2)`, fulfil, -1<<62)
	for _, never := range []any{1 << 62, nil} {
		execSQL(t, db, `insert into kinora_tasks (id, kind, status, input, created_at, next_at) values (?1, ?2, 'waiting', '{}', ?3, ?4)`,
			fmt.Sprint("never ", never), fulfil, 1<<62, never)
	}
	addTasks(t, db, taskDraft("good"))
	listed, err := db.Tasks(ctx, provider.TaskFilter{})
	require.NoError(t, err)
	require.Len(t, listed, 10)
	require.ErrorContains(t, db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := db.TasksIn(tx).Answer(ctx, provider.TaskAnswer{Task: "bad2", Name: "a", ID: "m", Out: json.RawMessage(`1`)})
		return err
	}), "malformed")

	var ids []string
	for range 6 {
		for _, task := range claimTasks(t, db, 2) {
			ids = append(ids, task.ID)
		}
	}
	require.Equal(t, []string{"most", "good"}, ids, "in order of their times, each claimed once")
	require.Equal(t, "malformed", taskOf(t, db, "bad3").Code)
	require.Equal(t, provider.TaskAbandoned, taskOf(t, db, "bad3").Status)
	trail, err := db.TaskTrail(ctx, "bad3")
	require.NoError(t, err)
	require.Len(t, trail, 1)
	require.Equal(t, []string{provider.WhatAbandoned, "malformed"}, []string{trail[0].What, trail[0].Detail})
	n, err := db.CancelTasks(ctx, provider.TaskFilter{IDs: []string{"most"}}, ann)
	require.NoError(t, err)
	require.Equal(t, 1, n)

	require.NoError(t, db.PatchTask(ctx, "bad3", taskOf(t, db, "bad3").Version, json.RawMessage(`{}`), ann))
	_, err = db.RequeueTasks(ctx, provider.TaskFilter{IDs: []string{"bad3"}}, ann)
	require.NoError(t, err)
	require.Equal(t, "bad3", claimTasks(t, db, 2)[0].ID)

	for _, refused := range []string{
		`update kinora_tasks set status = 'lost'`, `update kinora_tasks set open = 1 - open`, `update kinora_tasks set token = x'00' where status <> 'claimed'`,
		`update kinora_tasks set version = 0`, `update kinora_tasks set attempts = -1`, `update kinora_tasks set ended_at = 5 where open = 1`,
	} {
		_, err := db.SQL().ExecContext(ctx, refused)
		require.ErrorContains(t, err, "CHECK constraint failed", refused)
	}
}

// Claims, changes and renewals wait for another process that has the write lock, until their
// contexts end.
func TestTasksOfABusyDatabase(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db, other := openAt(t, path, nil), openAt(t, path, nil)
	ctx := t.Context()
	addTasks(t, db, taskDraft("a"), taskDraft("b"))
	first := claimTasks(t, db, 1)
	tx, err := other.SQL().BeginTx(ctx, nil)
	require.NoError(t, err)
	waited := make(chan error)
	go func() {
		_, err := db.ClaimTasks(ctx, fulfilling, claim.Terms{})
		waited <- err
	}()
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = db.ChangeTasks(short, []provider.TaskChange{{ID: "a", Token: first[0].Token, To: provider.TaskDone}})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = db.RenewTasks(short, first, time.Hour)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, tx.Rollback())
	require.NoError(t, <-waited)
	require.Equal(t, provider.TaskClaimed, taskOf(t, db, "b").Status, "the claim waited")
	late, err := db.RenewTasks(ctx, append(first, provider.Task{ID: "unknown"}), time.Hour)
	require.NoError(t, err)
	require.Equal(t, []string{"unknown"}, late)
	require.Greater(t, time.Until(taskOf(t, db, "a").NextAt), 30*time.Minute)
}
