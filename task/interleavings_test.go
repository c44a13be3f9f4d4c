package task_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// A task that was postponed while it ran is claimed again by the same worker. The end of the first
// run does not end the renewals of the second.
// Promise: T2.1
func TestTheEndOfAnOldClaimKeepsTheNewOne(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs atomic.Int64
		first := make(chan struct{})
		kind := task.Define("mail/remind", func(ctx context.Context, _ run, _ int) (int, error) {
			switch runs.Add(1) {
			case 1:
				<-first
			case 2:
				select {
				case <-time.After(5 * time.Minute):
				case <-ctx.Done():
				}
			}
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{Lease: 30 * time.Second, Timeout: time.Hour}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(2 * time.Second)
		w.in(func(ctx context.Context, tx task.Tx) {
			ok, err := tx.Postpone(ctx, "a", time.Now())
			require.NoError(w, err)
			require.True(w, ok)
		})
		time.Sleep(30 * time.Second) // until a renewal reports that it was lost
		require.EqualValues(w, 2, runs.Load())
		close(first)
		got := w.becomes("a", task.Done)
		require.EqualValues(w, 2, runs.Load(), "the lease of the second run was not renewed")
		require.Zero(w, got.Vanished)
	})
}

// slowRenew is a store whose next renewal waits for a function.
type slowRenew struct {
	*failing
	before atomic.Pointer[func()]
}

func (s *slowRenew) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) ([]string, error) {
	if f := s.before.Swap(nil); f != nil {
		(*f)()
	}
	return s.DB.RenewTasks(ctx, tasks, lease)
}

// A task waits, is answered and is claimed again while a renewal of its last claim is in progress.
// The renewal reports the old claim as late, and the new one continues.
func TestALateReportEndsOnlyItsClaim(t *testing.T) {
	inWorld(t, func(w *world) {
		db := &slowRenew{failing: &failing{DB: w.db, broken: func(string) error { return nil }}}
		ready := make(chan struct{})
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			if _, err := w.step(ctx, r, "first"); err != nil {
				return 0, err
			}
			<-ready
			if _, err := task.Wait[int](ctx, r, "paid", 0); err != nil {
				return 0, err
			}
			return task.Step(ctx, r, "second", func(ctx context.Context, _ string) (int, error) {
				select {
				case <-time.After(10 * time.Second):
					return 0, nil
				case <-ctx.Done():
					return 0, ctx.Err()
				}
			}, nil)
		})
		renewing := func() {
			close(ready)
			w.becomes("a", task.Waiting)
			w.answer("a", "paid", "m1", "1")
			w.becomes("a", task.Claimed)
			time.Sleep(time.Second) // its handler runs
		}
		db.before.Store(&renewing)
		w.start(w.workerOf(db, task.WorkerConfig{Lease: time.Minute}, kind))
		w.enqueue(kind.New("a", 1))
		began := time.Now()
		got := w.becomes("a", task.Done)
		require.Less(w, time.Since(began), time.Minute, "the new claim was left to its lease")
		require.Equal(w, 1, got.Attempts+1, "%+v", got)
		require.NotEqual(w, provider.CodeVanished, got.Code)
	})
}

// A canceled task that has not begun has nothing to undo, and its handler is not called: a timer
// that was canceled does not ring.
// Promise: T7.1
func TestCancelOfATaskThatHasNotBegunCallsNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("mail/remind", func(_ context.Context, r run, _ int) (int, error) {
			w.call(r.Key())
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1).Later(90 * 24 * time.Hour))
		w.in(func(ctx context.Context, tx task.Tx) {
			ok, err := tx.Cancel(ctx, "a")
			require.NoError(w, err)
			require.True(w, ok)
		})
		w.becomes("a", task.Undone)
		require.Empty(w, w.called())
	})
}

// A task without steps that is canceled while its handler runs is not called a second time.
func TestCancelDuringACallDoesNotRepeatIt(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("mail/remind", func(_ context.Context, r run, _ int) (int, error) {
			w.call(r.Key())
			time.Sleep(time.Second)
			return 0, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(500 * time.Millisecond)
		w.in(func(ctx context.Context, tx task.Tx) {
			_, err := tx.Cancel(ctx, "a")
			require.NoError(w, err)
		})
		w.becomes("a", task.Undone)
		require.Equal(w, []string{"a"}, w.called())
	})
}

// A handler that gives up when a step fails does not give up because its worker stops.
// Promise: T7.1
func TestAShutdownIsNoDecisionToGiveUp(t *testing.T) {
	charge := func(ctx context.Context) error {
		select {
		case <-time.After(20 * time.Second): // on the clock of a bubble
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for name, kind := range map[string]*task.Definition[tx, int, int]{
		"step": task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.Step(ctx, r, "charge", func(ctx context.Context, _ string) (int, error) { return 0, charge(ctx) }, nil)
			if err != nil {
				return 0, task.GiveUp("charge_failed")
			}
			return 0, nil
		}),
		"call": task.Define("orders/fulfil", func(ctx context.Context, _ run, _ int) (int, error) {
			if charge(ctx) != nil {
				return 0, task.GiveUp("charge_failed")
			}
			return 0, nil
		}),
		"transaction": task.DefineTx("orders/fulfil", func(ctx context.Context, _ tx, _ int) (int, []outbox.Message, error) {
			if charge(ctx) != nil {
				return 0, nil, task.GiveUp("charge_failed")
			}
			return 0, nil, nil
		}),
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				stop := w.start(w.worker(task.WorkerConfig{}, kind))
				w.enqueue(kind.New("a", 1))
				time.Sleep(2 * time.Second)
				require.NoError(w, stop())
				got := w.task("a")
				require.Equal(w, task.Pending, got.Status)
				require.False(w, got.Undo, got.Why)
				require.Zero(w, got.Attempts)
			})
		})
	}
}

// lostReply is a store whose next unit is committed, and its reply lost.
type lostReply struct {
	*failing
	lose atomic.Bool
}

func (l *lostReply) Do(ctx context.Context, u provider.Unit, run func(context.Context, tx, provider.Found) (provider.Closing, error)) error {
	err := l.DB.Do(ctx, u, run)
	if err == nil && l.lose.CompareAndSwap(true, false) {
		return &provider.Error{Class: provider.ClassAmbiguous, Err: errors.New("connection reset")}
	}
	return err
}

// The reply to the commit of a step is lost, and the handler gives up because of that error. The
// step was committed: it is not left as it is.
// Promise: T7.1
func TestALostReplyLeavesNoStepThatIsNotUndone(t *testing.T) {
	inWorld(t, func(w *world) {
		db := &lostReply{failing: &failing{DB: w.db, broken: func(string) error { return nil }}}
		db.lose.Store(true)
		kind := task.Define("orders/fulfil", func(ctx context.Context, r run, _ int) (int, error) {
			_, err := task.StepTx(ctx, r, "reserve",
				func(_ context.Context, tx tx) (int, []outbox.Message, error) {
					tx.Put("stock", "reserved", 1)
					return 1, nil, nil
				},
				func(_ context.Context, tx tx, _ int) ([]outbox.Message, error) {
					tx.Delete("stock", "reserved")
					return nil, nil
				})
			if err != nil {
				return 0, task.GiveUp("not_reserved")
			}
			return 0, nil
		})
		w.start(w.workerOf(db, task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		var got task.Task
		require.Eventually(w, func() bool { got = w.task("a"); return got.Status.Final() }, time.Hour, time.Second)
		w.db.View(func(m tx) {
			_, reserved := m.Get("stock", "reserved")
			require.Equal(w, got.Status == task.Done, reserved, "the task is %s", got.Status)
		})
	})
}

type appends func(ctx context.Context, r task.Record) error

func (s appends) Append(ctx context.Context, r task.Record) error { return s(ctx, r) }

// A task that has killed its workers up to the limit is not run again because the sink is down, or
// because the worker that was to abandon it stops.
func TestASpentTaskIsNeverRunAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("orders/kill", func(_ context.Context, r run, _ int) (int, error) {
			w.call(r.Key())
			return 0, nil
		})
		w.enqueue(kind.New("a", 1))
		require.Len(w, w.take(time.Second, "orders/kill"), 1) // and its worker dies
		time.Sleep(2 * time.Second)
		var tries atomic.Int64
		audit := appends(func(context.Context, task.Record) error {
			if tries.Add(1) < 3 {
				return errors.New("down")
			}
			return nil
		})
		w.start(w.worker(task.WorkerConfig{Audit: audit, Backoff: claim.Backoff{Attempts: 1}}, kind))
		var got task.Task
		require.Eventually(w, func() bool {
			got = w.task("a")
			return got.Status == task.Abandoned || got.Status.Final()
		}, time.Hour, time.Second)
		require.Empty(w, w.called())
		require.Equal(w, task.Abandoned, got.Status)
		require.Equal(w, provider.CodeVanished, got.Code)
	})
}

// RunOnce ends soon after its context, also if the database is away.
func TestRunOnceEndsWithItsContext(t *testing.T) {
	inWorld(t, func(w *world) {
		var away atomic.Bool
		db := &failing{DB: w.db, broken: func(string) error {
			if away.Load() {
				return errors.New("connection refused")
			}
			return nil
		}}
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) {
			away.Store(true)
			return 0, nil
		})
		w.enqueue(kind.New("a", 1))
		ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = w.workerOf(db, task.WorkerConfig{}, kind).RunOnce(ctx)
		}()
		select {
		case <-done:
		case <-time.After(time.Hour):
			t.Error("RunOnce has not returned an hour after its context ended")
		}
		away.Store(false)
		<-done
	})
}

// Run does not return nil while a handler still runs.
func TestRunReportsAHandlerThatDoesNotReturn(t *testing.T) {
	for name, after := range map[string]time.Duration{"in time": time.Second, "after its timeout": time.Minute} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				release := make(chan struct{})
				defer close(release)
				kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) {
					<-release
					return 0, nil
				})
				stop := w.start(w.worker(task.WorkerConfig{Backoff: claim.Backoff{Base: time.Hour}}, kind))
				w.enqueue(kind.New("a", 1))
				time.Sleep(after)
				require.ErrorIs(w, stop(), outbox.ErrDrain)
			})
		})
	}
}

// A sink that does not reply while the worker stops costs no attempt.
// Promise: T9.1
func TestAShutdownWhileTheSinkHangsCountsNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) { return 0, nil })
		audit := appends(func(ctx context.Context, _ task.Record) error {
			<-ctx.Done()
			return ctx.Err()
		})
		stop := w.start(w.worker(task.WorkerConfig{Audit: audit}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(time.Second)
		require.NoError(w, stop())
		got := w.task("a")
		require.Equal(w, task.Pending, got.Status)
		require.Zero(w, got.Attempts)
	})
}

// A sink that ignores its context does not keep a task claimed for ever.
// Promise: T9.1
func TestASinkThatNeverReturnsIsNoticed(t *testing.T) {
	inWorld(t, func(w *world) {
		release := make(chan struct{})
		defer close(release)
		kind := task.Define("mail/welcome", func(context.Context, run, int) (int, error) { return 0, nil })
		var calls atomic.Int64
		audit := appends(func(context.Context, task.Record) error {
			if calls.Add(1) == 1 {
				<-release
			}
			return nil
		})
		w.start(w.worker(task.WorkerConfig{Audit: audit}, kind))
		w.enqueue(kind.New("a", 1))
		require.Eventually(w, func() bool { return w.task("a").Status == task.Done }, 24*time.Hour, time.Minute)
	})
}
