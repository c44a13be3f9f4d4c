package task_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// A worker leaves tasks of kinds that it does not define as they are, in its own domains too.
// Promise: T14.1
func TestAWorkerClaimsOnlyKindsThatItDefines(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		later := call("orders/later", func(_ context.Context, r run) error { w.call(r.Key()); return nil })
		w.enqueue(later.New("vanished", 1))
		w.take(time.Second, "orders/later")
		time.Sleep(2 * time.Second)
		w.enqueue(later.New("a", 1), later.New("canceled", 1))
		w.cancel("canceled")
		stored := func() (all []any) {
			for _, id := range []string{"vanished", "a", "canceled"} {
				trail, err := w.db.TaskTrail(w.Context(), id)
				require.NoError(w, err)
				all = append(all, w.task(id), trail)
			}
			return all
		}
		before := stored()
		stop := w.start(w.worker(task.WorkerConfig{}, known))
		time.Sleep(10 * time.Minute)
		require.Equal(w, before, stored())
		require.NoError(w, stop())
		w.start(w.worker(task.WorkerConfig{}, known, later))
		w.becomes("vanished", task.Done)
		w.becomes("a", task.Done)
		w.becomes("canceled", task.Undone)
		require.ElementsMatch(w, []string{"vanished", "a"}, w.called())
	})
}

// A suspect task of a kind that a worker does not define keeps no other task waiting.
// Promise: T14.1
func TestASuspectTaskOfAnotherKindWaits(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		gone := call("orders/gone", func(context.Context, run) error { return nil })
		w.enqueue(gone.New("a", 1))
		for range 3 {
			w.take(time.Second, "orders/gone")
			time.Sleep(2 * time.Second)
		}
		before := w.task("a")
		require.True(w, before.Suspect)
		w.start(w.worker(task.WorkerConfig{}, known))
		for n := range 100 {
			w.enqueue(known.New(fmt.Sprint(n), 1))
			w.becomes(fmt.Sprint(n), task.Done)
		}
		time.Sleep(time.Hour)
		require.Equal(w, before, w.task("a"))
		w.start(w.worker(task.WorkerConfig{}, gone))
		w.becomes("a", task.Done)
	})
}

// An operator has completed a task. A worker that defines its kind ends it, without running it.
// Promise: T14.1
func TestACompletedTaskOfAnotherKindWaits(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		gone := call("orders/gone", func(context.Context, run) error { w.call("gone"); return nil })
		w.enqueue(gone.New("a", 1))
		w.abandon("orders/gone", "permanent")
		require.NoError(w, w.db.CompleteTask(w.Context(), "a", json.RawMessage("7"), decision))
		w.start(w.worker(task.WorkerConfig{}, known))
		time.Sleep(time.Hour)
		require.Equal(w, task.Pending, w.task("a").Status)
		w.start(w.worker(task.WorkerConfig{}, gone))
		require.JSONEq(w, "7", string(w.becomes("a", task.Done).Result))
		require.Empty(w, w.called())
	})
}

// abandon claims a task and abandons it, as another worker does.
func (w *world) abandon(kind, code string) {
	w.Helper()
	got := w.take(time.Minute, kind)
	require.Len(w, got, 1)
	changed, err := w.db.ChangeTasks(w.Context(), []provider.TaskChange{{ID: got[0].ID, Token: got[0].Token, To: task.Abandoned, Code: code}})
	require.NoError(w, err)
	require.True(w, changed[0].Applied)
}

// tasksStore is what the tests of a rolling deployment require of a store.
type tasksStore[Tx any] interface {
	provider.TaskProvider[Tx]
	provider.TaskInspector
	Transact(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error
}

// inEachStore runs a test with a memory, an SQLite and a PostgreSQL database.
func inEachStore(t *testing.T, onMemory func(*testing.T, tasksStore[tx]), onSQLite func(*testing.T, tasksStore[*sql.Tx]), onPostgres func(*testing.T, tasksStore[pgx.Tx])) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		db, err := memory.New(nil)
		require.NoError(t, err)
		onMemory(t, db)
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "tasks.db"), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		require.NoError(t, db.Migrate(t.Context()))
		onSQLite(t, db)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		onPostgres(t, postgrestest.Open(t, nil))
	})
}

// startOn runs a worker until the test ends.
func startOn[Tx any](t *testing.T, db tasksStore[Tx], kinds ...task.Kind[Tx]) {
	t.Helper()
	w, err := task.NewWorker(db, task.WorkerConfig{Logger: slog.New(slog.DiscardHandler)}, kinds...)
	require.NoError(t, err)
	g, err := kinora.Start(t.Context(), w)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Stop()) })
}

// untilCount waits until n tasks are done.
func untilCount[Tx any](t *testing.T, db tasksStore[Tx], n int) {
	t.Helper()
	patience.Until(t, func() bool {
		c, err := db.TaskCounts(t.Context(), "")
		require.NoError(t, err)
		return c[task.Done] == int64(n)
	}, "%d tasks", n)
}

// untilDone waits until all tasks are done, and requires that nothing else happened to them.
func untilDone[Tx any](t *testing.T, db tasksStore[Tx], n int) {
	t.Helper()
	untilCount(t, db, n)
	all, err := db.Tasks(t.Context(), task.Filter{Limit: n})
	require.NoError(t, err)
	for _, one := range all {
		trail, err := db.TaskTrail(t.Context(), one.ID)
		require.NoError(t, err)
		for _, r := range trail {
			require.Equal(t, provider.WhatDone, r.What, "%s: %+v", one.ID, r)
		}
	}
}

// A program that defines a new kind is deployed next to one that does not. Its tasks run as if it were alone.
// Promise: T14.1
func TestTasksOfANewKindNextToAnOldWorker(t *testing.T) {
	inEachStore(t, newKind[tx], newKind[*sql.Tx], newKind[pgx.Tx])
}

func newKind[Tx any](t *testing.T, db tasksStore[Tx]) {
	var runs atomic.Int64
	known := task.Define("orders/known", func(context.Context, *task.Run[Tx], int) (int, error) { return 0, nil })
	later := task.Define("orders/later", func(context.Context, *task.Run[Tx], int) (int64, error) { return runs.Add(1), nil })
	const n = 300
	add := func(from, to int) {
		for i := from; i < to; i++ {
			id := fmt.Sprint(i)
			require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx Tx) error {
				return db.TasksIn(tx).Enqueue(ctx, later.New("later-"+id, i), known.New("known-"+id, i))
			}))
		}
	}
	add(0, n/2)
	startOn(t, db, known)
	untilCount(t, db, n/2)
	require.Zero(t, runs.Load())
	startOn(t, db, known, later)
	add(n/2, n)
	untilDone(t, db, 2*n)
	require.EqualValues(t, n, runs.Load())
}

// A program that defines a new kind of groups is deployed next to one that does not, and both define the kind of their
// tasks. Each group is completed, and no handler runs twice.
// Promise: T14.1
func TestGroupsOfANewKindNextToAnOldWorker(t *testing.T) {
	inEachStore(t, newGroup[tx], newGroup[*sql.Tx], newGroup[pgx.Tx])
}

func newGroup[Tx any](t *testing.T, db tasksStore[Tx]) {
	var runs atomic.Int64
	known := task.Define("orders/known", func(context.Context, *task.Run[Tx], int) (int64, error) { return runs.Add(1), nil })
	group := task.DefineGroup("orders/all", func(ctx context.Context, tx Tx, id string, i int) ([]outbox.Message, error) {
		return nil, db.TasksIn(tx).Enqueue(ctx, known.New(id+"-complete", i))
	})
	startOn(t, db, known)
	startOn(t, db, known, group)
	const groups, tasks = 60, 5
	for i := range groups {
		id := fmt.Sprint(i)
		require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx Tx) error {
			var drafts []task.Draft
			for j := range tasks {
				drafts = append(drafts, known.New(fmt.Sprintf("%s-%d", id, j), j))
			}
			return db.TasksIn(tx).EnqueueGroup(ctx, group.New(id, i, drafts...))
		}))
	}
	untilDone(t, db, groups*(tasks+1))
	require.EqualValues(t, groups*(tasks+1), runs.Load())
}

// Only an old worker runs. It runs the tasks of a group that it does not define, and leaves the last one: its handler does not
// run again, no attempt is counted, and other tasks of the kind go on.
// Promise: T14.1
func TestTheLastTaskOfAGroupWaitsForAWorkerThatDefinesIt(t *testing.T) {
	for _, how := range []string{"Define", "DefineTx"} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				known := call("orders/known", func(_ context.Context, r run) error { w.call(r.ID()); return nil })
				if how == "DefineTx" {
					known = task.DefineTx("orders/known", func(_ context.Context, _ tx, in int) (int, []outbox.Message, error) {
						w.call(fmt.Sprint(in))
						return in, nil, nil
					})
				}
				group := task.DefineGroup("orders/all", func(context.Context, tx, string, int) ([]outbox.Message, error) {
					w.call("complete")
					return nil, nil
				})
				var claims atomic.Int64
				claimed := func(tasks []task.Task, _ time.Duration, _ error) { claims.Add(int64(len(tasks))) }
				w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Attempts: 1}, Observer: task.WorkerObserver{Claimed: claimed}}, known))
				w.in(func(ctx context.Context, tx task.Tx) {
					require.NoError(w, tx.EnqueueGroup(ctx, group.New("g", 1, known.New("0", 0), known.New("1", 1).Later(time.Second), known.New("2", 2).Later(time.Minute))))
				})
				w.becomes("0", task.Done)
				w.becomes("1", task.Done)
				time.Sleep(time.Hour)
				left := w.task("2")
				require.Equal(w, []any{task.Pending, 0, "unknown_group", how == "Define"}, []any{left.Status, left.Attempts, left.Code, left.Result != nil})
				require.Less(w, claims.Load(), int64(3+2*60), "it is claimed every 30 seconds")
				trail, err := w.db.TaskTrail(w.Context(), "2")
				require.NoError(w, err)
				require.Empty(w, trail)
				warnings := strings.Count(w.log.String(), "a group waits for a worker that defines its kind")
				require.InDelta(w, 59, warnings, 1, "one a minute:\n%s", w.log)
				require.Contains(w, w.log.String(), "kind=orders/all since=")

				w.enqueue(known.New("3", 3))
				w.becomes("3", task.Done)
				w.start(w.worker(task.WorkerConfig{}, known, group))
				w.becomes("2", task.Done)
				if calls := w.called(); how == "Define" {
					require.Equal(w, []string{"0", "1", "2", "3", "complete"}, calls)
				} else { // its transaction was rolled back each time
					require.Equal(w, []string{"2", "complete"}, calls[len(calls)-2:])
				}
			})
		})
	}
}

// If another worker that is alive defines the group, the last task is due at once, and this worker claims none of its kind for
// a second: the other one gets it.
// Promise: T14.1
func TestAWorkerLeavesTheLastTaskOfAGroupToAnother(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		group := task.DefineGroup("orders/all", noCompletion)
		able := provider.ServiceReport{ID: "able", Kind: "worker", Kinds: []string{"orders/all", "orders/known"}, Clock: time.Now()}
		require.NoError(w, w.db.Report(w.Context(), able, time.Hour))
		w.in(func(ctx context.Context, tx task.Tx) {
			require.NoError(w, tx.EnqueueGroup(ctx, group.New("g", 1, known.New("a", 1))))
		})
		old := w.worker(task.WorkerConfig{}, known)
		for range 3 {
			n, err := old.RunOnce(w.Context())
			require.NoError(w, err)
			require.Equal(w, 1, n)
			require.Len(w, w.dueNow("orders/known"), 1)
			for range 9 {
				n, err = old.RunOnce(w.Context())
				require.NoError(w, err)
				require.Zero(w, n)
				time.Sleep(100 * time.Millisecond)
			}
			time.Sleep(100 * time.Millisecond)
		}
		n, err := w.worker(task.WorkerConfig{}, known, group).RunOnce(w.Context())
		require.NoError(w, err)
		require.Equal(w, 1, n)
		require.Equal(w, task.Done, w.task("a").Status)
		require.NotContains(w, w.log.String(), "a group waits")
	})
}

func (w *world) dueNow(kind string) []task.Task {
	w.Helper()
	due, err := w.db.TaskCandidates(w.Context(), provider.TaskQuery{Kinds: []string{kind}}, 10)
	require.NoError(w, err)
	return due
}

// A task of a group that is canceled, given up or abandoned does not count: a worker ends it without the kind of the group.
// Promise: T14.1
func TestTheEndOfATaskThatDoesNotCountNeedsNoGroup(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(_ context.Context, r run) error {
			switch r.ID() {
			case "gives up":
				return task.GiveUp("sold_out")
			case "fails":
				return task.Permanent(errors.New("no such address"))
			}
			return nil
		})
		group := task.DefineGroup("orders/all", noCompletion)
		add := func(id string, drafts ...task.Draft) {
			w.in(func(ctx context.Context, tx task.Tx) {
				require.NoError(w, tx.EnqueueGroup(ctx, group.New(id, 1, drafts...)))
			})
		}
		add("1", known.New("vanished", 1))
		w.take(time.Second, "orders/known")
		time.Sleep(2 * time.Second)
		for _, id := range []string{"gives up", "fails", "canceled"} {
			add(id, known.New(id, 1))
		}
		w.cancel("canceled")
		w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Attempts: 1}}, known))
		require.Equal(w, provider.CodeVanished, w.becomes("vanished", task.Abandoned).Code)
		require.Equal(w, "permanent", w.becomes("fails", task.Abandoned).Code)
		w.becomes("gives up", task.Undone)
		w.becomes("canceled", task.Undone)
	})
}

const lacks = "tasks are due, and no worker that is alive defines their kind"

// A worker says once a minute which kinds of its domains have tasks that are due, and no living worker defines.
// Promise: T14.1
func TestAWorkerNamesKindsThatNobodyDefines(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		gone := call("orders/gone", func(context.Context, run) error { return nil })
		alone := call("orders/alone", func(context.Context, run) error { return nil })
		timer := call("orders/timer", func(context.Context, run) error { return nil })
		other := call("mails/other", func(context.Context, run) error { return nil })
		w.enqueue(alone.New("alone", 1))
		for range 3 {
			w.take(time.Second, "orders/alone")
			time.Sleep(2 * time.Second)
		}
		w.start(w.worker(task.WorkerConfig{Holder: "w"}, known))
		since := time.Now().UTC()
		w.enqueue(gone.New("1", 1), timer.New("2", 1).Later(20*time.Minute), other.New("3", 1))
		time.Sleep(time.Second)
		w.enqueue(gone.New("4", 1))
		count := func(kind string) int { return strings.Count(w.log.String(), lacks+`" worker=w kind=`+kind+" ") }
		time.Sleep(10*time.Minute + time.Second)
		require.Equal(w, []int{10, 10, 0, 0, 0}, []int{count("orders/gone"), count("orders/alone"), count("orders/timer"), count("mails/other"), count("orders/known")}, "%s", w.log)
		require.Contains(w, w.log.String(), "kind=orders/gone since="+since.Format("2006-01-02T15:04:05"))

		stop := w.start(w.worker(task.WorkerConfig{}, gone, alone))
		w.becomes("alone", task.Done)
		require.NoError(w, stop())
		require.NoError(w, w.db.Report(w.Context(), provider.ServiceReport{ID: "b", Kind: "worker", Kinds: []string{"orders/gone", "orders/timer"}, Clock: time.Now()}, time.Hour))
		w.enqueue(gone.New("5", 1))
		time.Sleep(30 * time.Minute)
		require.Equal(w, []int{10, 0}, []int{count("orders/gone"), count("orders/timer")}, "another worker defines them")
		time.Sleep(time.Hour)
		require.Equal(w, []int{40, 30}, []int{count("orders/gone"), count("orders/timer")}, "that worker has ended")
	})
}

// A worker that is deployed in place of a newer one is told at its start what it lacks, also timers that are not due.
// Promise: T14.1
func TestAWorkerWarnsAtItsStartOfWhatItLacks(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil })
		timer := call("orders/timer", func(context.Context, run) error { return nil })
		gone := call("orders/gone", func(context.Context, run) error { return nil })
		w.enqueue(timer.New("1", 1).Later(time.Hour), gone.New("2", 1).Later(time.Hour))
		require.NoError(w, w.db.Report(w.Context(), provider.ServiceReport{ID: "b", Kind: "worker", Kinds: []string{"orders/gone"}, Clock: time.Now()}, time.Hour))
		const warning = "there are tasks of kinds that no worker defines so far"
		stop := w.start(w.worker(task.WorkerConfig{}, known, timer))
		time.Sleep(time.Second)
		require.NoError(w, stop())
		require.NotContains(w, w.log.String(), warning)
		w.start(w.worker(task.WorkerConfig{}, known))
		time.Sleep(time.Hour)
		require.Equal(w, 1, strings.Count(w.log.String(), warning))
		require.Contains(w, w.log.String(), `lacks=[orders/timer]`)
	})
}

// A worker reports what it defines.
func TestAWorkerReportsItsKinds(t *testing.T) {
	inWorld(t, func(w *world) {
		known := call("orders/known", func(context.Context, run) error { return nil }).Was("orders/earlier")
		worker := w.worker(task.WorkerConfig{}, task.DefineGroup("orders/all", noCompletion), known)
		w.start(worker)
		time.Sleep(time.Second)
		all, err := w.db.Services(w.Context())
		require.NoError(w, err)
		require.Len(w, all, 1)
		require.Equal(w, []string{"orders/all", "orders/earlier", "orders/known"}, all[0].Kinds)
		require.Equal(w, all[0].Kinds, all[0].Served())
	})
}
