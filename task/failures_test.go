package task_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// A permanent error with a code that cannot be stored, or that is cut in the middle of a character,
// abandons the task at once.
func TestACodeThatCannotBeStored(t *testing.T) {
	for name, code := range map[string]string{"NUL": "a\x00b", "not UTF-8": "a\xff", "long": strings.Repeat("é", 200)} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				kind := task.Define("mail/welcome", func(_ context.Context, r run, _ int) (int, error) {
					w.call(r.Key())
					return 0, &provider.Error{Class: provider.ClassPermanent, Code: code, Err: errors.New("refused")}
				})
				w.start(w.worker(task.WorkerConfig{}, kind))
				w.enqueue(kind.New("a", 1))
				got := w.becomes("a", task.Abandoned)
				require.Len(w, w.called(), 1)
				require.NotEqual(w, provider.CodeVanished, got.Code)
			})
		})
	}
}

// A task whose state is too large can still be undone.
func TestATaskThatIsTooLargeCanBeUndone(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			if _, err := w.step(ctx, r, "charge"); err != nil {
				return 0, err
			}
			if _, err := task.Wait[string](ctx, r, "scanned", 0); err != nil {
				return 0, err
			}
			if _, err := w.step(ctx, r, "send"); err != nil {
				return 0, err
			}
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Waiting)
		out, err := json.Marshal(strings.Repeat("x", provider.MaxTaskState-2))
		require.NoError(w, err)
		require.Equal(w, task.Taken, w.answer("a", "scanned", "m", string(out)))
		w.becomes("a", task.Abandoned)
		_, err = w.db.CancelTasks(w.Context(), task.Filter{Status: []task.Status{task.Pending, task.Claimed, task.Failed, task.Waiting, task.Abandoned}}, decision)
		require.NoError(w, err)
		require.Eventually(w, func() bool { return w.task("a").Status == task.Undone }, time.Hour, time.Second, "%s", w.log)
	})
}

// A handler gives up at its last attempt, because a step took too long. Its undos get a context that
// has not ended, and attempts of their own.
func TestGivingUpAtTheLastAttemptIsUndone(t *testing.T) {
	inWorld(t, func(w *world) {
		var undos atomic.Int64
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "reserve", func(context.Context, string) (int, error) { return 1, nil },
				func(ctx context.Context, _ string, _ *int) error {
					undos.Add(1)
					return ctx.Err()
				})
			if err != nil {
				return 0, err
			}
			if _, err = task.Step(ctx, r, "charge", func(ctx context.Context, _ string) (int, error) {
				<-ctx.Done()
				return 0, ctx.Err()
			}, nil); err != nil && r.Attempt() >= 2 {
				return 0, task.GiveUp("charge_failed")
			}
			return 0, err
		})
		w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Base: time.Second, Attempts: 2}}, kind))
		w.enqueue(kind.New("a", 1))
		require.Eventually(w, func() bool { s := w.task("a").Status; return s == task.Undone || s == task.Abandoned }, time.Hour, time.Second)
		require.Equal(w, task.Undone, w.task("a").Status)
		require.EqualValues(w, 1, undos.Load(), "%s", w.log)
	})
}

// The undos have a budget of their own: the first failure of one does not abandon a task that was
// given up at its last attempt.
func TestUndosHaveTheirOwnAttempts(t *testing.T) {
	inWorld(t, func(w *world) {
		var undos atomic.Int64
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "reserve", func(context.Context, string) (int, error) { return 1, nil },
				func(context.Context, string, *int) error {
					if undos.Add(1) == 1 {
						return errors.New("unavailable")
					}
					return nil
				})
			if err != nil {
				return 0, err
			}
			if r.Attempt() >= 3 {
				return 0, task.GiveUp("charge_failed")
			}
			return 0, errors.New("charge failed")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		require.Eventually(w, func() bool { s := w.task("a").Status; return s == task.Undone || s == task.Abandoned }, time.Hour, time.Second)
		require.Equal(w, task.Undone, w.task("a").Status)
	})
}

// A handler that returns while a step runs in another goroutine has misused its run.
// Promise: T10.1
func TestAHandlerThatLeavesAStepBehindIsMisuse(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			begun := make(chan struct{})
			go func() {
				_, _ = task.Step(ctx, r, "charge", func(context.Context, string) (int, error) {
					close(begun)
					time.Sleep(time.Second)
					w.call("charge")
					return 0, nil
				}, nil)
			}()
			<-begun
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		require.Eventually(w, func() bool { s := w.task("a").Status; return s == task.Done || s == task.Abandoned }, time.Hour, time.Second)
		time.Sleep(2 * time.Second)
		require.Equal(w, task.Abandoned, w.task("a").Status)
	})
}

type receipt struct {
	Ref    string
	Secret string `json:"-"`
}

// A step returns the recorded result, also the first time. Otherwise the handler sees other values when
// it runs again.
// Promise: T3.1
func TestAStepReturnsWhatIsRecorded(t *testing.T) {
	inWorld(t, func(w *world) {
		var mu sync.Mutex
		var got []receipt
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			a, err := task.Step(ctx, r, "charge", func(context.Context, string) (receipt, error) {
				return receipt{"r1", "s"}, nil
			}, nil)
			if err != nil {
				return 0, err
			}
			mu.Lock()
			got = append(got, a)
			mu.Unlock()
			return 0, r.Sleep(ctx, "pause", time.Second)
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Done)
		require.Len(w, got, 2)
		require.Equal(w, got[1], got[0])
	})
}

// The database drops the connection of each change for a while, and replies to claims meanwhile: a
// failover. The outcome of a call is recorded after that.
// Promise: T12.1
func TestAnOutageOfSomeStatementsCountsNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		var down atomic.Bool
		db := &failing{DB: w.db, broken: func(method string) error {
			if method == "change" && down.Load() {
				return errors.New("connection reset by peer")
			}
			return nil
		}}
		kind := task.Define("mail/welcome", func(_ context.Context, r run, _ int) (int, error) {
			w.call(r.Key())
			return 0, nil
		})
		w.start(w.workerOf(db, task.WorkerConfig{}, kind))
		down.Store(true)
		w.enqueue(kind.New("a", 1))
		time.Sleep(5 * time.Second)
		down.Store(false)
		w.becomes("a", task.Done)
		require.Len(w, w.called(), 1)
	})
}

// lockedRow is a store in which another transaction has locked the row of task "a": a statement that
// changes that row waits, with the rows that it has locked until then.
type lockedRow struct {
	*failing
	locked atomic.Bool
}

func (l *lockedRow) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	for l.locked.Load() && changesTask(changes, "a") {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return l.DB.ChangeTasks(ctx, changes)
}

func changesTask(changes []provider.TaskChange, id string) bool {
	for _, c := range changes {
		if c.ID == id {
			return true
		}
	}
	return false
}

// A transaction of the application has answered a task and stays open: the worker's change of that
// task waits. The other tasks of the worker continue.
func TestALockedRowDelaysNoOtherTask(t *testing.T) {
	inWorld(t, func(w *world) {
		db := &lockedRow{failing: &failing{DB: w.db, broken: func(string) error { return nil }}}
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			for _, name := range []string{"s1", "s2", "s3", "s4"} {
				if _, err := w.step(ctx, r, name); err != nil {
					return 0, err
				}
			}
			return 0, nil
		})
		db.locked.Store(true)
		w.start(w.workerOf(db, task.WorkerConfig{Lease: 20 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(time.Second)
		began := time.Now()
		w.enqueue(kind.New("b", 1))
		w.becomes("b", task.Done)
		require.Less(w, time.Since(began), 20*time.Second)
		db.locked.Store(false)
		w.becomes("a", task.Done)
		require.Equal(w, 1, countOf(w.called(), "b/s1"))
	})
}

func countOf(all []string, one string) (n int) {
	for _, s := range all {
		if s == one {
			n++
		}
	}
	return n
}

// RunOnce runs tasks also after Run has ended.
func TestRunOnceAfterRun(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) { return 0, nil })
		worker := w.worker(task.WorkerConfig{}, kind)
		require.NoError(w, w.start(worker)())
		w.enqueue(kind.New("a", 1))
		n, err := worker.RunOnce(w.Context())
		require.NoError(w, err)
		require.Equal(w, 1, n)
		require.Equal(w, task.Done, w.task("a").Status)
	})
}

// RunOnce claims as many tasks as it may run at the same time, and runs them so.
func TestRunOnceRunsABatch(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) {
			time.Sleep(time.Second)
			return 0, nil
		})
		worker := w.worker(task.WorkerConfig{Concurrency: 3}, kind)
		w.enqueue(kind.New("a", 1), kind.New("b", 1), kind.New("c", 1), kind.New("d", 1))
		for _, want := range []int{3, 1, 0} {
			began := time.Now()
			n, err := worker.RunOnce(w.Context())
			require.NoError(w, err)
			require.Equal(w, want, n)
			require.LessOrEqual(w, time.Since(began), time.Second, "one ran after another")
		}
	})
}

// A handler of DefineTx that returns long after its timeout is no data race (with -race).
func TestALateTransactionIsNoRace(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs atomic.Int64
		kind := task.DefineTx("orders/fulfil", func(context.Context, tx, int) (int, []outbox.Message, error) {
			if runs.Add(1) == 1 {
				time.Sleep(time.Minute)
			}
			return 0, nil, nil
		})
		w.start(w.worker(task.WorkerConfig{Timeout: time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Done)
		time.Sleep(2 * time.Minute)
	})
}

// A suspect task waits until a worker is idle. Meanwhile one long task does not keep the worker from
// all others.
// Promise: T11.1
func TestASuspectTaskDelaysOthersOnlyBriefly(t *testing.T) {
	inWorld(t, func(w *world) {
		bad := task.Define("orders/bad", func(context.Context, run, int) (int, error) { return 0, nil })
		long := task.Define("orders/long", func(ctx context.Context, r run, _ int) (int, error) {
			for i := range 100 {
				_, err := task.Step(ctx, r, fmt.Sprintf("s%d", i), func(ctx context.Context, _ string) (int, error) {
					select {
					case <-time.After(20 * time.Second):
					case <-ctx.Done():
					}
					return 0, ctx.Err()
				}, nil)
				if err != nil {
					return 0, err
				}
			}
			return 0, nil
		})
		quick := task.Define("orders/quick", func(context.Context, run, int) (int, error) { return 0, nil })
		w.enqueue(bad.New("bad", 1))
		w.take(time.Second, "orders/bad")
		time.Sleep(2 * time.Second)
		w.take(10*time.Second, "orders/bad")
		w.start(w.worker(task.WorkerConfig{}, long, quick, bad))
		w.enqueue(long.New("long", 1))
		for !w.task("bad").Suspect {
			time.Sleep(time.Second)
		}
		time.Sleep(10 * time.Second)
		began := time.Now()
		w.enqueue(quick.New("quick", 1))
		w.becomes("quick", task.Done)
		require.Less(w, time.Since(began), 2*time.Minute)
	})
}

// A task that is abandoned, requeued and abandoned again has two ends, with two records. A sink that
// stores a record of one ID once has both.
// Promise: T9.1
func TestEachAbandonmentHasItsRecord(t *testing.T) {
	inWorld(t, func(w *world) {
		var mu sync.Mutex
		ids := map[string]string{}
		audit := appends(func(_ context.Context, r task.Record) error {
			mu.Lock()
			defer mu.Unlock()
			ids[r.ID] = r.Detail
			return nil
		})
		var runs atomic.Int64
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) {
			return 0, &provider.Error{Class: provider.ClassPermanent, Code: fmt.Sprintf("code_%d", runs.Add(1)), Err: errors.New("refused")}
		})
		w.start(w.worker(task.WorkerConfig{Audit: audit}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Abandoned)
		_, err := w.db.RequeueTasks(w.Context(), task.Filter{}, decision)
		require.NoError(w, err)
		require.Eventually(w, func() bool { return w.task("a").Code == "code_2" }, time.Hour, time.Second)
		mu.Lock()
		defer mu.Unlock()
		require.Len(w, ids, 2)
	})
}
