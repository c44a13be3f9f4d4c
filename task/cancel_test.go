package task_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

func (w *world) cancel(id string) {
	w.Helper()
	n, err := w.db.CancelTasks(w.Context(), task.Filter{IDs: []string{id}}, decision)
	require.NoError(w, err)
	require.Equal(w, 1, n)
}

// A call that failed is not made again after it was canceled. After a crash, the call is not made if it
// needs its key.
// Promise: T7.1
func TestACanceledCallIsNotMade(t *testing.T) {
	inWorld(t, func(w *world) {
		down := true
		kind := call("mails/welcome", func(_ context.Context, r run) error {
			key := r.Key()
			w.call(key)
			if down {
				return errors.New("unavailable")
			}
			return nil
		})
		stop := w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("failed", 1))
		w.becomes("failed", task.Failed)
		w.cancel("failed")
		w.becomes("failed", task.Undone)
		require.NoError(w, stop())
		require.Equal(w, []string{"failed"}, w.called())

		w.enqueue(kind.New("crashed", 1))
		require.Len(w, w.take(time.Second, "mails/welcome"), 1)
		w.cancel("crashed")
		down = false
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.becomes("crashed", task.Undone)
		require.Equal(w, []string{"failed"}, w.called())
	})
}

// A call that fails after it was canceled is not made again, also without a key.
func TestACallThatIsCanceledWhileItRuns(t *testing.T) {
	inWorld(t, func(w *world) {
		began, canceled := make(chan struct{}), make(chan struct{})
		kind := call("mails/welcome", func(context.Context, run) error {
			w.call("mail")
			close(began)
			<-canceled
			return errors.New("unavailable")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		<-began
		w.cancel("a")
		close(canceled)
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"mail"}, w.called())
	})
}

// A task whose handler always fails can be canceled: its recorded steps are undone.
// Promise: T7.1
func TestCancelOfAnAbandonedTask(t *testing.T) {
	for _, how := range []string{"permanent", "error", "panic", "misuse", "undecodable", "result"} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (any, error) {
					if _, err := w.step(ctx, r, "charge"); err != nil {
						return nil, err
					}
					switch how {
					case "permanent":
						return nil, task.Permanent(errors.New("no"))
					case "error":
						return nil, errors.New("no")
					case "panic":
						panic("no")
					case "misuse":
						return w.step(ctx, r, "charge")
					case "undecodable":
						return task.Wait[[]int](ctx, r, "paid", 0)
					}
					return func() {}, nil
				})
				w.start(w.worker(task.WorkerConfig{}, kind))
				w.enqueue(kind.New("a", 1))
				require.Equal(w, task.Taken, w.answer("a", "paid", "m", `"no list"`))
				w.becomes("a", task.Abandoned)
				w.cancel("a")
				w.becomes("a", task.Undone)
				require.Equal(w, []string{"a/charge", "undo a/charge"}, w.called())
			})
		})
	}
}

// An operator who has undone a task by hand ends it.
// Promise: T7.1
func TestCompleteATaskThatIsBeingUndone(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "charge", func(context.Context, string) (int, error) { return 1, nil },
				func(context.Context, string, *int) error { return task.Permanent(errors.New("no refund")) })
			if err != nil {
				return 0, err
			}
			return 0, task.GiveUp("refused")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		require.True(w, w.becomes("a", task.Abandoned).Undo)
		require.NoError(w, w.db.CompleteTask(w.Context(), "a", []byte("null"), decision))
		require.Equal(w, "refused", w.becomes("a", task.Undone).Why)
	})
}

// A task whose handler postpones or cancels it in its own transaction is abandoned: that is a misuse.
// Promise: T10.1
func TestAHandlerThatChangesItsOwnTask(t *testing.T) {
	inWorld(t, func(w *world) {
		own := func(ctx context.Context, tx tx, how string) error {
			switch how {
			case "postpone":
				_, err := w.db.TasksIn(tx).Postpone(ctx, how, time.Now().Add(time.Hour))
				return err
			case "cancel":
				_, err := w.db.TasksIn(tx).Cancel(ctx, how)
				return err
			}
			_, err := w.db.TasksIn(tx).Postpone(ctx, how, time.Now().Add(time.Hour))
			return err
		}
		command := task.DefineTx("orders/command", func(ctx context.Context, tx tx, how string) (int, []outbox.Message, error) {
			return 0, nil, own(ctx, tx, how)
		})
		process := task.Define("orders/process", func(ctx context.Context, r run, how string) (int, error) {
			return task.StepTx(ctx, r, "a", func(ctx context.Context, tx *memory.Model) (int, []outbox.Message, error) {
				return 0, nil, own(ctx, tx, how)
			}, nil)
		})
		w.start(w.worker(task.WorkerConfig{LogErrors: true}, command, process))
		w.enqueue(command.New("postpone", "postpone"), command.New("cancel", "cancel"), process.New("step", "step"))
		for _, id := range []string{"postpone", "cancel", "step"} {
			require.Equal(w, "misuse", w.becomes(id, task.Abandoned).Code, id)
		}
		require.Contains(w, w.log.String(), "its own task")
	})
}

// A panic of a step ends the run, also if the handler recovers.
// Promise: T10.1
func TestAHiddenPanicOfAStep(t *testing.T) {
	inWorld(t, func(w *world) {
		var tries atomic.Int64
		kind := task.Define("orders/hide", func(ctx context.Context, r run, in int) (n int, err error) {
			defer func() { _ = recover() }()
			return task.Step(ctx, r, "a", func(context.Context, string) (int, error) {
				if tries.Add(1) == 1 {
					panic("no")
				}
				return in, nil
			}, nil)
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 5))
		require.Equal(w, "panic", w.becomes("a", task.Failed).Code)
		out, err := kind.Result(w.becomes("a", task.Done))
		require.NoError(w, err)
		require.Equal(w, 5, out)
	})
}

func TestRunOnceDeletesOldTasks(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(context.Context, run) error { return nil })
		worker := w.worker(task.WorkerConfig{}, kind)
		w.enqueue(kind.New("a", 1))
		for range 2 {
			_, err := worker.RunOnce(w.Context())
			require.NoError(w, err)
			time.Sleep(8 * 24 * time.Hour)
		}
		_, err := worker.RunOnce(w.Context())
		require.NoError(w, err)
		all, err := w.db.Tasks(w.Context(), task.Filter{})
		require.NoError(w, err)
		require.Empty(w, all)
	})
}
