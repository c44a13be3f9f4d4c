package task_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// A task is canceled while the audit sink is down: at the first try, whose result is about to be kept, or
// at the second one, which ends the task with the kept result. Its steps are undone in both cases.
// Promise: T7.1
func TestCancelOfAResultThatIsKept(t *testing.T) {
	for name, at := range map[string]int64{"while it is kept": 1, "while it is recorded": 2} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				var tries atomic.Int64
				audit := appends(func(context.Context, task.Record) error {
					n := tries.Add(1)
					if n == at {
						w.cancel("a")
					}
					if n == 1 {
						return errors.New("down")
					}
					return nil
				})
				kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (string, error) { return w.step(ctx, r, "charge") })
				w.start(w.worker(task.WorkerConfig{Audit: audit}, kind))
				w.enqueue(kind.New("a", 1))
				w.becomes("a", task.Undone)
				require.Equal(w, []string{"a/charge", "undo a/charge"}, w.called())
			})
		})
	}
}

// A call whose result was kept is not made again if it is canceled then.
// Promise: T7.1
func TestCancelOfACallWhoseResultIsKept(t *testing.T) {
	inWorld(t, func(w *world) {
		var tries atomic.Int64
		audit := appends(func(context.Context, task.Record) error {
			switch tries.Add(1) {
			case 1:
				return errors.New("down")
			case 2:
				w.cancel("a")
			}
			return nil
		})
		kind := call("mails/welcome", func(context.Context, run) error { w.call("mail"); return nil })
		w.start(w.worker(task.WorkerConfig{Audit: audit}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"mail"}, w.called())
	})
}

// A task whose workers crashed in a step is abandoned, or waits for one that defines its kind. If it is canceled then, that
// step is undone: it may have been done.
// Promise: T7.1
func TestCancelOfATaskThatVanishedUndoesItsStep(t *testing.T) {
	for _, how := range []string{"at the limit", "another kind"} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (string, error) { return w.step(ctx, r, "charge") })
				w.enqueue(kind.New("a", 1))
				require.Len(w, w.take(time.Second, "orders/fulfil"), 1) // its worker crashes in the step
				time.Sleep(2 * time.Second)
				first, then := kind, task.Abandoned
				if how == "another kind" { // its worker, too, leaves the task as it is
					first, then = task.Define("orders/other", func(context.Context, run, int) (string, error) { return "", nil }), task.Claimed
				}
				stop := w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Attempts: 1}}, first))
				time.Sleep(time.Hour)
				is := w.task("a")
				require.True(w, is.Doubt)
				require.Equal(w, then, is.Status)
				w.cancel("a")
				require.NoError(w, stop())
				w.start(w.worker(task.WorkerConfig{}, kind))
				w.becomes("a", task.Undone)
				require.Equal(w, []string{"undo a/charge in doubt"}, w.called())
			})
		})
	}
}

// An undo that does not return is tried again, also if it is that of a step in doubt.
// Promise: T7.1
func TestAnUndoInDoubtThatHangsIsTriedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		release := make(chan struct{})
		defer close(release)
		var undos atomic.Int64
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "charge",
				func(context.Context, string) (int, error) { return 0, errors.New("connection reset") },
				func(context.Context, string, *int) error {
					if undos.Add(1) == 1 {
						<-release
					}
					w.call("undone")
					return nil
				})
			if err != nil {
				return 0, task.GiveUp("not_charged")
			}
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"undone"}, w.called())
	})
}

// Others have their turn after each suspect task, also if suspect tasks take long.
func TestSlowSuspectsTakeTurnsWithOthers(t *testing.T) {
	inWorld(t, func(w *world) {
		slow := task.Define("orders/slow", func(ctx context.Context, _ run, _ int) (int, error) {
			select {
			case <-time.After(20 * time.Second):
			case <-ctx.Done():
			}
			return 0, ctx.Err()
		})
		quick := call("orders/quick", func(context.Context, run) error { return nil })
		for i := range 20 {
			w.enqueue(slow.New(fmt.Sprint("slow-", i), 1))
		}
		for range 3 {
			w.take(time.Second, "orders/slow")
			time.Sleep(2 * time.Second)
		}
		require.True(w, w.task("slow-19").Suspect)
		w.start(w.worker(task.WorkerConfig{}, slow, quick))
		time.Sleep(30 * time.Second)
		began := time.Now()
		w.enqueue(quick.New("quick", 1))
		w.becomes("quick", task.Done)
		require.Less(w, time.Since(began), 2*time.Minute)
	})
}

// lateTake is a store that replies to a claim when its lease is over. The task was canceled meanwhile.
type lateTake struct {
	*failing
	cancel func(id string)
}

func (l *lateTake) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]task.Task, error) {
	taken, err := l.failing.ClaimTasks(ctx, q, t)
	for _, got := range taken {
		if !got.Undo {
			l.cancel(got.ID)
			time.Sleep(2 * t.Lease) // on the clock of a bubble
		}
	}
	return taken, err
}

// A worker that renews its claim before it calls the handler notices that the task was canceled.
// Promise: T7.1
func TestACancellationBeforeALateCall(t *testing.T) {
	inWorld(t, func(w *world) {
		db := &lateTake{failing: &failing{DB: w.db, broken: func(string) error { return nil }}, cancel: w.cancel}
		kind := call("mails/welcome", func(context.Context, run) error { w.call("mail"); return nil })
		w.start(w.workerOf(db, task.WorkerConfig{Lease: 10 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Undone)
		require.Empty(w, w.called())
	})
}

// A task is undone also if its handler fails behind its steps because another system is away.
// Promise: T7.1
func TestCancelWhileAnotherSystemIsAway(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (string, error) {
			if _, err := w.step(ctx, r, "charge"); err != nil {
				return "", err
			}
			return "", &provider.Error{Class: provider.ClassTransient, Err: errors.New("away")}
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(10 * time.Second)
		w.cancel("a")
		time.Sleep(time.Minute)
		require.Equal(w, task.Undone, w.task("a").Status)
		require.Equal(w, []string{"a/charge", "undo a/charge"}, w.called())
	})
}

// A handler that takes too long in the direction of undo leaves its undos their own time.
func TestUndosHaveTheirOwnTime(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "charge", func(context.Context, string) (int, error) { return 1, nil },
				func(ctx context.Context, _ string, _ *int) error {
					w.call("undo")
					return ctx.Err()
				})
			if err != nil {
				return 0, err
			}
			<-ctx.Done() // a call that hangs
			return 0, ctx.Err()
		})
		w.start(w.worker(task.WorkerConfig{Timeout: time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Failed)
		w.cancel("a")
		time.Sleep(time.Hour)
		require.Equal(w, task.Undone, w.task("a").Status)
		require.Equal(w, []string{"undo"}, w.called())
	})
}

// A transaction that conflicted, and then does not return, does not keep the turn of those that conflict
// later.
func TestATurnThatIsNotGivenBack(t *testing.T) {
	inWorld(t, func(w *world) {
		release := make(chan struct{})
		defer close(release)
		var tries [2]atomic.Int64
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, i int) (int, error) {
			return task.StepTx(ctx, r, "a", func(context.Context, tx) (int, []outbox.Message, error) {
				if tries[i].Add(1) == 1 {
					return 0, nil, eventstore.ErrConflict
				}
				if i == 0 {
					<-release
				}
				return 0, nil, nil
			}, nil)
		})
		w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Base: time.Hour, Attempts: 3}}, kind))
		w.enqueue(kind.New("hangs", 0))
		w.becomes("hangs", task.Failed)
		w.enqueue(kind.New("conflicts", 1))
		time.Sleep(50 * time.Minute)
		require.Equal(w, task.Done, w.task("conflicts").Status)
	})
}

// A completion that takes longer than its timeout counts as a failure, also in the transaction of DefineTx.
func TestACompletionThatHangs(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.DefineTx("orders/command", func(context.Context, tx, int) (int, []outbox.Message, error) { return 0, nil, nil })
		group := task.DefineGroup("orders/all", func(ctx context.Context, _ tx, _ string, _ int) ([]outbox.Message, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		w.start(w.worker(task.WorkerConfig{Timeout: time.Second}, kind, group))
		w.in(func(ctx context.Context, tx task.Tx) {
			require.NoError(w, tx.EnqueueGroup(ctx, group.New("g", 1, kind.New("a", 1))))
		})
		require.Equal(w, "deadline", w.becomes("a", task.Failed).Code)
	})
}

// A call before a wait is not made again if the task is canceled while it waits: no step is recorded.
func TestCancelOfAWaitRepeatsNoCall(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("mails/ask", func(ctx context.Context, r run) error {
			w.call(r.Key())
			_, err := task.Wait[int](ctx, r, "reply", 0)
			return err
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Waiting)
		w.cancel("a")
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"a"}, w.called())
	})
}

// skipping is a store that renews nothing, as if other transactions had locked the rows.
type skipping struct{ failing }

func (*skipping) RenewTasks(context.Context, []provider.Task, time.Duration) ([]string, error) {
	return nil, nil
}

// A renewal that skipped a task does not let a step begin after another worker took the task over.
func TestNoStepBeginsAfterARenewalThatSkipped(t *testing.T) {
	inWorld(t, func(w *world) {
		var stopped atomic.Bool
		broken := &skipping{failing{DB: w.db, broken: func(method string) error {
			if method == "claim" && stopped.Load() {
				return errors.New("stopped")
			}
			return nil
		}}}
		kind := call("calls/slow", func(ctx context.Context, r run) error {
			stopped.Store(true)
			time.Sleep(10 * time.Second)
			_, err := w.step(ctx, r, "first")
			return err
		})
		w.start(w.workerOf(broken, task.WorkerConfig{Lease: 3 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(5 * time.Second)
		require.Len(w, w.take(time.Hour, "calls/slow"), 1)
		time.Sleep(time.Minute)
		require.Empty(w, w.called())
	})
}
