package task_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// A handler that runs again gets the recorded results, and each step keeps its key.
// Promise: T3.1
func TestRecordedStepsAreReplayed(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs, fails atomic.Int64
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, in int) (string, error) {
			runs.Add(1)
			a, err := w.step(ctx, r, "first")
			if err != nil {
				return "", err
			}
			b, err := task.Step(ctx, r, "second", func(_ context.Context, key string) (int, error) {
				w.call(key)
				if fails.Add(1) < 3 {
					return 0, errors.New("unavailable")
				}
				return in + 1, nil
			}, nil)
			if err != nil {
				return "", err
			}
			return strings.Repeat(a, b), nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		got := w.becomes("a", task.Done)
		out, err := kind.Result(got)
		require.NoError(w, err)
		require.Equal(w, "result of firstresult of first", out)
		require.Equal(w, []string{"a/first", "a/second", "a/second", "a/second"}, w.called())
		require.EqualValues(w, 3, runs.Load())
	})
}

// A step that was recorded begins a new budget of attempts, so that a long process is not at its
// limit.
func TestProgressBeginsANewBudget(t *testing.T) {
	inWorld(t, func(w *world) {
		tries := map[string]int{}
		kind := task.Define("orders/long", func(ctx context.Context, r run, _ int) (int, error) {
			for _, name := range []string{"s1", "s2", "s3", "s4"} {
				_, err := task.Step(ctx, r, name, func(context.Context, string) (int, error) {
					if tries[name]++; tries[name] < 3 { // the limit is 3
						return 0, errors.New("unavailable")
					}
					return 0, nil
				}, nil)
				if err != nil {
					return 0, err
				}
			}
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Done)
	})
}

// Promise: T7.1
func TestGiveUpUndoesInReverse(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, in string) (int, error) {
			for _, name := range []string{"reserve", "charge"} {
				if _, err := w.step(ctx, r, name); err != nil {
					return 0, err
				}
			}
			_, err := task.StepTx(ctx, r, "book", func(_ context.Context, tx tx) (int, []outbox.Message, error) {
				tx.Put("books", r.ID(), 1)
				return 7, nil, nil
			}, func(_ context.Context, tx tx, done int) ([]outbox.Message, error) {
				w.call("undo book")
				tx.Put("books", r.ID(), 1-done)
				return nil, nil
			})
			if err != nil {
				return 0, err
			}
			_, err = task.Step(ctx, r, "ship", func(_ context.Context, key string) (string, error) {
				w.call(key)
				if in == "doubt" {
					return "", errors.New("no reply")
				}
				return "", nil
			}, w.undo)
			if err == nil || in == "doubt" {
				return 0, task.GiveUp("refused")
			}
			return 0, err
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", "sure"))
		got := w.becomes("a", task.Undone)
		require.Equal(w, "refused", got.Why)
		require.Equal(w, []string{"a/reserve", "a/charge", "a/ship", "undo a/ship", "undo book", "undo a/charge", "undo a/reserve"}, w.called())
		w.calls = nil
		w.enqueue(kind.New("b", "doubt"))
		w.becomes("b", task.Undone)
		require.Equal(w, []string{"b/reserve", "b/charge", "b/ship", "undo b/ship in doubt", "undo book", "undo b/charge", "undo b/reserve"}, w.called())
	})
}

// An undo that fails keeps those of earlier steps from running. After its last attempt the task is
// abandoned in its direction, and continues there after a requeue.
// Promise: T7.2
func TestUndoStopsAtTheFirstFailure(t *testing.T) {
	inWorld(t, func(w *world) {
		var down atomic.Bool
		down.Store(true)
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			if _, err := w.step(ctx, r, "first"); err != nil {
				return 0, err
			}
			_, err := task.Step(ctx, r, "second", func(context.Context, string) (string, error) { return "", nil },
				func(_ context.Context, key string, _ *string) error {
					if down.Load() {
						return errors.New("down")
					}
					w.call("undo " + key)
					return nil
				})
			if err != nil {
				return 0, err
			}
			if _, err := w.step(ctx, r, "third"); err != nil {
				return 0, err
			}
			return 0, task.GiveUp("no")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		got := w.becomes("a", task.Abandoned)
		require.True(w, got.Undo)
		require.Equal(w, []string{"a/first", "a/third", "undo a/third"}, w.called())
		down.Store(false)
		n, err := w.db.RequeueTasks(w.Context(), task.Filter{}, decision)
		require.NoError(w, err)
		require.Equal(w, 1, n)
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"a/first", "a/third", "undo a/third", "undo a/second", "undo a/first"}, w.called())
	})
}

// A task that is canceled after a worker vanished in a step, also after a requeue, undoes that step.
// Promise: T7.1
func TestCancelUndoesTheStepInDoubt(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			for _, name := range []string{"first", "second", "third"} {
				if _, err := w.step(ctx, r, name); err != nil {
					return 0, err
				}
			}
			return 0, nil
		})
		w.enqueue(kind.New("a", 1))
		claimed := w.take(time.Second, "orders/fulfil")
		w.call("a/first") // the other worker made the call, and vanished
		_, err := w.db.ChangeTasks(w.Context(), []provider.TaskChange{{ID: "a", Token: claimed[0].Token, To: task.Abandoned, Doubt: true}})
		require.NoError(w, err)
		_, err = w.db.RequeueTasks(w.Context(), task.Filter{}, decision)
		require.NoError(w, err)
		_, err = w.db.CancelTasks(w.Context(), task.Filter{Status: []task.Status{task.Pending, task.Claimed, task.Failed, task.Waiting, task.Abandoned}}, decision)
		require.NoError(w, err)
		w.start(w.worker(task.WorkerConfig{}, kind))
		got := w.becomes("a", task.Undone)
		require.Equal(w, provider.WhyCanceled, got.Why)
		require.Equal(w, []string{"a/first", "undo a/first in doubt"}, w.called())
	})
}

// A task that waits, or never ran, has no step in doubt.
// Promise: T7.1
func TestCancelOfAWaitingTask(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			if _, err := w.step(ctx, r, "first"); err != nil {
				return 0, err
			}
			if _, err := task.Wait[int](ctx, r, "paid", 0); err != nil {
				return 0, err
			}
			_, err := w.step(ctx, r, "second")
			return 0, err
		})
		stop := w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Waiting)
		require.NoError(w, stop())
		w.enqueue(kind.New("b", 1))
		w.in(func(ctx context.Context, tx task.Tx) {
			for _, id := range []string{"a", "b"} {
				ok, err := tx.Cancel(ctx, id)
				require.NoError(w, err)
				require.True(w, ok)
			}
			ok, err := tx.Cancel(ctx, "a")
			require.NoError(w, err)
			require.False(w, ok, "it is being undone already")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.becomes("a", task.Undone)
		w.becomes("b", task.Undone)
		require.Equal(w, []string{"a/first", "undo a/first"}, w.called())
	})
}

// Promise: T5.1
func TestWait(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/wait", func(ctx context.Context, r run, _ int) (string, error) {
			got, err := task.Wait[*string](ctx, r, "paid", time.Hour)
			if errors.Is(err, task.ErrTimeout) {
				return "timeout", nil
			}
			if err != nil {
				return "", err
			}
			if got == nil {
				return "null", nil
			}
			return *got, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		require.Equal(w, task.NotFound, w.answer("early", "paid", "m1", `"x"`))
		w.enqueue(kind.New("early", 1))
		require.Equal(w, task.Taken, w.answer("early", "paid", "m1", `"early"`))
		require.Equal(w, task.Again, w.answer("early", "paid", "m1", `"early"`))
		require.Equal(w, task.Late, w.answer("early", "paid", "m2", `"second"`))
		w.enqueue(kind.New("late", 1), kind.New("null", 1), kind.New("never", 1))
		w.becomes("late", task.Waiting)
		time.Sleep(time.Minute)
		require.Equal(w, task.Taken, w.answer("late", "paid", "m3", `"late"`))
		require.Equal(w, task.Taken, w.answer("null", "paid", "m4", `null`))
		began := time.Now()
		for id, want := range map[string]string{"early": "early", "late": "late", "null": "null", "never": "timeout"} {
			out, err := kind.Result(w.becomes(id, task.Done))
			require.NoError(w, err)
			require.Equal(w, want, out)
		}
		require.Equal(w, task.Late, w.answer("never", "paid", "m5", `"x"`))
		require.GreaterOrEqual(w, time.Since(began), 58*time.Minute, "the wait begins with the first call")
	})
}

func TestSleep(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/sleep", func(ctx context.Context, r run, _ int) (bool, error) {
			return true, r.Sleep(ctx, "rest", 24*time.Hour)
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		began := time.Now()
		w.enqueue(kind.New("a", 1), kind.New("woken", 1))
		w.becomes("woken", task.Waiting)
		require.Equal(w, task.Taken, w.answer("woken", "rest", "m", `null`))
		w.becomes("woken", task.Done)
		require.Less(w, time.Since(began), time.Minute)
		w.becomes("a", task.Done)
		require.InDelta(w, 24*time.Hour, time.Since(began), float64(3*time.Hour))
	})
}

// Changed code does nothing twice: the task is abandoned with an error that names both steps, and
// the old code finishes it after a requeue.
// Promise: T10.1
func TestChangedCode(t *testing.T) {
	steps := func(w *world, names ...string) *task.Definition[tx, int, int] {
		return task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			for _, name := range names {
				if wait, ok := strings.CutPrefix(name, "wait "); ok {
					if _, err := task.Wait[int](ctx, r, wait, 0); err != nil {
						return 0, err
					}
				} else if _, err := w.step(ctx, r, name); err != nil {
					return 0, err
				}
			}
			return len(names), nil
		})
	}
	for name, c := range map[string]struct {
		new    []string
		errors []string // empty: the new code continues
	}{
		"renamed":             {new: []string{"a", "x", "wait go", "c"}, errors: []string{`"b"`, `"x"`}},
		"added before":        {new: []string{"x", "a", "b", "wait go", "c"}, errors: []string{`"a"`, `"x"`}},
		"removed":             {new: []string{"a", "wait go", "c"}, errors: []string{`"b"`}},
		"the last one gone":   {new: []string{"a"}, errors: []string{`"b"`}},
		"swapped":             {new: []string{"b", "a", "wait go", "c"}, errors: []string{`"b"`, `"a"`}},
		"a step became later": {new: []string{"a", "wait go", "b", "c"}, errors: []string{`"b"`}},
		"added behind":        {new: []string{"a", "b", "wait go", "x", "c"}},
		"changed behind":      {new: []string{"a", "b", "wait go", "d"}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				old := steps(w, "a", "b", "wait go", "c")
				stop := w.start(w.worker(task.WorkerConfig{}, old))
				w.enqueue(old.New("t", 1))
				w.becomes("t", task.Waiting)
				require.NoError(w, stop())
				require.Equal(w, task.Taken, w.answer("t", "go", "m", `1`))
				stop = w.start(w.worker(task.WorkerConfig{LogErrors: true}, steps(w, c.new...)))
				if c.errors == nil {
					w.becomes("t", task.Done)
					require.Subset(w, w.called(), []string{"t/a", "t/b"})
					return
				}
				got := w.becomes("t", task.Abandoned)
				require.Equal(w, "changed", got.Code)
				for _, part := range c.errors {
					require.Contains(w, strings.ReplaceAll(w.log.String(), `\"`, `"`), part)
				}
				require.Equal(w, []string{"t/a", "t/b"}, w.called(), "nothing is done by the new code")
				require.NoError(w, stop())
				_, err := w.db.RequeueTasks(w.Context(), task.Filter{}, decision)
				require.NoError(w, err)
				w.start(w.worker(task.WorkerConfig{}, old))
				w.becomes("t", task.Done)
				require.Equal(w, []string{"t/a", "t/b", "t/c"}, w.called())
			})
		})
	}
}

// Promise: T10.1
func TestMisuse(t *testing.T) {
	inWorld(t, func(w *world) {
		swallow := func(_ string, _ error) {}
		kind := task.Define("orders/misuse", func(ctx context.Context, r run, in string) (int, error) {
			switch in {
			case "twice":
				swallow(w.step(ctx, r, "a"))
				swallow(w.step(ctx, r, "a"))
			case "together":
				_, err := task.Step(ctx, r, "a", func(context.Context, string) (int, error) {
					swallow(w.step(ctx, r, "b"))
					return 1, nil
				}, nil)
				return 0, err
			case "name":
				swallow(w.step(ctx, r, "No Name"))
			case "answered":
				_, err := w.step(ctx, r, "paid")
				return 0, err
			}
			return 0, nil
		})
		w.enqueue(kind.New("twice", "twice"), kind.New("together", "together"), kind.New("name", "name"), kind.New("answered", "answered"))
		require.Equal(w, task.Taken, w.answer("answered", "paid", "m", `1`))
		w.start(w.worker(task.WorkerConfig{}, kind))
		for _, id := range []string{"twice", "together", "answered"} {
			require.Equal(w, "misuse", w.becomes(id, task.Abandoned).Code, id)
		}
		w.becomes("name", task.Abandoned)
		require.Equal(w, []string{"twice/a"}, w.called())
	})
}

// An error of a step ends the run, also if the handler hides it.
// Promise: T10.1
func TestAHiddenErrorOfAStep(t *testing.T) {
	inWorld(t, func(w *world) {
		var fails atomic.Int64
		kind := task.Define("orders/hide", func(ctx context.Context, r run, _ int) (int, error) {
			_, _ = task.Step(ctx, r, "a", func(context.Context, string) (int, error) {
				if fails.Add(1) == 1 {
					return 0, errors.New("unavailable")
				}
				return 1, nil
			}, nil)
			_, _ = w.step(ctx, r, "b")
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Done)
		require.EqualValues(w, 2, fails.Load())
		require.Equal(w, []string{"a/b"}, w.called())
	})
}

// A state that would be too large is refused before it is stored, and names the remedy.
func TestStateIsBounded(t *testing.T) {
	inWorld(t, func(w *world) {
		big := strings.Repeat("x", provider.MaxTaskState/2)
		kind := task.Define("orders/big", func(ctx context.Context, r run, _ int) (int, error) {
			for _, name := range []string{"a", "b", "c"} {
				if _, err := task.Step(ctx, r, name, func(context.Context, string) (string, error) { return big, nil }, nil); err != nil {
					return 0, err
				}
			}
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{LogErrors: true}, kind))
		w.enqueue(kind.New("a", 1))
		require.Equal(w, "too_large", w.becomes("a", task.Abandoned).Code)
		require.Contains(w, w.log.String(), "use a group")
	})
}
