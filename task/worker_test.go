package task_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
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

func call(kind string, fn func(ctx context.Context, r run) error) *task.Definition[tx, int, int] {
	return task.Define(kind, func(ctx context.Context, r run, in int) (int, error) { return in, fn(ctx, r) })
}

func TestNewWorkerRefuses(t *testing.T) {
	inWorld(t, func(w *world) {
		ok := call("orders/fulfil", func(context.Context, run) error { return nil })
		var none *task.Definition[tx, int, int]
		for name, c := range map[string]struct {
			cfg  task.WorkerConfig
			defs []task.Kind[tx]
			want string
		}{
			"no definitions":    {want: "no kinds"},
			"nil":               {defs: []task.Kind[tx]{nil, ok}, want: "nil"},
			"a nil definition":  {defs: []task.Kind[tx]{none, ok}, want: "nil"},
			"twice":             {defs: []task.Kind[tx]{ok, ok}, want: "twice"},
			"twice by Was":      {defs: []task.Kind[tx]{ok, call("orders/new", func(context.Context, run) error { return nil }).Was("orders/fulfil")}, want: "twice"},
			"no domain":         {defs: []task.Kind[tx]{call("fulfil", func(context.Context, run) error { return nil })}, want: "domain/name"},
			"no function":       {defs: []task.Kind[tx]{task.Define[tx, int, int]("orders/x", nil)}, want: "function"},
			"no completion":     {defs: []task.Kind[tx]{ok, task.DefineGroup[tx, int]("orders/g", nil)}, want: "function"},
			"negative":          {cfg: task.WorkerConfig{Concurrency: -1}, defs: []task.Kind[tx]{ok}, want: "concurrency -1"},
			"a short lease":     {cfg: task.WorkerConfig{Lease: 1}, defs: []task.Kind[tx]{ok}, want: "lease"},
			"negative keep":     {cfg: task.WorkerConfig{Keep: task.Retention{Done: -1}}, defs: []task.Kind[tx]{ok}, want: "retention"},
			"a negative delay":  {cfg: task.WorkerConfig{Backoff: claim.Backoff{Base: -1}}, defs: []task.Kind[tx]{ok}, want: "backoff"},
			"the group's twice": {defs: []task.Kind[tx]{ok, task.DefineGroup("orders/g", noCompletion), task.DefineGroup("orders/g", noCompletion)}, want: "twice"},
		} {
			_, err := task.NewWorker(w.db, c.cfg, c.defs...)
			require.ErrorContains(w, err, c.want, name)
		}
		_, err := task.NewWorker(nil, task.WorkerConfig{}, task.Kind[tx](ok))
		require.ErrorContains(w, err, "database")
		worker := w.worker(task.WorkerConfig{}, ok)
		stop := w.start(worker)
		<-worker.Running()
		_, err = worker.RunOnce(w.Context())
		require.ErrorContains(w, err, "running")
		require.NoError(w, stop())
		require.ErrorContains(w, worker.Run(w.Context()), "twice")
	})
}

func noCompletion(context.Context, tx, string, int) ([]outbox.Message, error) { return nil, nil }

func TestFailuresAreRetriedAndThenAbandoned(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.Define("calls/fail", func(ctx context.Context, r run, in string) (any, error) {
			w.call(r.Key())
			switch in {
			case "permanent":
				return nil, task.Permanent(errors.New("secret"))
			case "invalid":
				return nil, fmt.Errorf("append: %w", &eventstore.InvalidError{Field: "x", Reason: "y"})
			case "panic":
				panic("secret")
			case "goexit":
				runtime.Goexit()
			case "result":
				return func() {}, nil
			case "code":
				return nil, &provider.Error{Code: "card_refused", Err: errors.New("secret")}
			}
			return nil, errors.New("secret")
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		wrong := task.Define("calls/fail", func(context.Context, run, []int) (int, error) { return 0, nil }).New("undecodable", []int{1})
		null := kind.New("null", "")
		null.Input = json.RawMessage("null")
		w.enqueue(kind.New("error", "x"), kind.New("permanent", "permanent"), kind.New("invalid", "invalid"), kind.New("panic", "panic"),
			kind.New("goexit", "goexit"), kind.New("result", "result"), kind.New("code", "code"), wrong, null)
		began := time.Now()
		for id, want := range map[string]struct {
			code  string
			calls int
		}{
			"error": {"*errors.errorString", 3}, "permanent": {"permanent", 1}, "invalid": {"invalid", 1}, "panic": {"panic", 3},
			"goexit": {"goexit", 3}, "result": {"unencodable", 1}, "code": {"card_refused", 3}, "undecodable": {"undecodable", 0}, "null": {"undecodable", 0},
		} {
			got := w.becomes(id, task.Abandoned)
			require.Equal(w, want.code, got.Code, id)
			require.Equal(w, want.calls, strings.Count(strings.Join(w.called(), " ")+" ", id+" "), id)
		}
		require.GreaterOrEqual(w, time.Since(began), 3*time.Second, "1s and 2s between the attempts")
		require.NotContains(w, w.log.String(), "secret", "texts of errors may contain user data")
	})
}

// Each attempt is the claim: a task that makes its workers vanish is abandoned, not run, at the
// limit, and other tasks do not run at the same time.
// Promise: T11.1
func TestATaskThatKillsItsWorkers(t *testing.T) {
	inWorld(t, func(w *world) {
		var beside, together atomic.Int64
		kind := task.Define("calls/some", func(ctx context.Context, r run, in int) (int, error) {
			if in == 0 {
				w.call("killer")
				if beside.Load() > 0 {
					together.Add(1)
				}
				time.Sleep(10 * time.Second)
				return 0, nil
			}
			beside.Add(1)
			defer beside.Add(-1)
			time.Sleep(time.Second)
			return 0, nil
		})
		w.enqueue(kind.New("killer", 0))
		for range 2 {
			require.Len(w, w.take(time.Second, "calls/some"), 1)
			time.Sleep(2 * time.Second)
		}
		require.Empty(w, w.take(time.Second, "calls/some"), "it is suspect now")
		require.True(w, w.task("killer").Suspect)
		var drafts []task.Draft
		for i := range 100 {
			drafts = append(drafts, kind.New(fmt.Sprint("innocent-", i), 1))
		}
		w.enqueue(drafts...)
		w.start(w.worker(task.WorkerConfig{Concurrency: 4}, kind))
		w.becomes("killer", task.Done)
		require.Zero(w, together.Load(), "it ran alone")
		require.Positive(w, w.mustCount(task.Pending), "it did not wait until there was no other work")

		w.enqueue(kind.New("again", 0))
		w.mustComplete(kind)
	})
}

// A killer makes those that ran at the same time suspect too.
// Promise: T11.1
func TestManySuspects(t *testing.T) {
	inWorld(t, func(w *world) {
		var all, most atomic.Int64
		kind := call("calls/some", func(context.Context, run) error {
			defer all.Add(-1)
			most.Store(max(most.Load(), all.Add(1)))
			time.Sleep(10 * time.Millisecond)
			return nil
		})
		var drafts []task.Draft
		for i := range 40 {
			drafts = append(drafts, kind.New(fmt.Sprint("suspect-", i), 1))
		}
		w.enqueue(drafts...)
		for range 3 {
			w.take(time.Second, "calls/some")
			time.Sleep(2 * time.Second)
		}
		require.True(w, w.task("suspect-39").Suspect)
		began := time.Now()
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.mustComplete(kind)
		require.Less(w, time.Since(began), 3*time.Second, "one follows the other")
		require.EqualValues(w, 1, most.Load(), "each ran alone")

		w.enqueue(kind.New("last", 1))
		w.becomes("last", task.Done)
	})
}

func (w *world) mustCount(s task.Status) int64 {
	w.Helper()
	counts, err := w.db.TaskCounts(w.Context(), "")
	require.NoError(w, err)
	return counts[s]
}

func (w *world) mustComplete(*task.Definition[tx, int, int]) {
	w.Helper()
	for w.mustCount(task.Pending)+w.mustCount(task.Claimed)+w.mustCount(task.Failed) > 0 {
		time.Sleep(time.Second)
	}
}

// Promise: T11.1
func TestATaskThatVanishedAtTheLimit(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(_ context.Context, r run) error { w.call(r.Key()); return nil })
		w.enqueue(kind.New("a", 1))
		for range 4 {
			q := provider.TaskQuery{Kinds: []string{"calls/some"}, Attempts: 3}
			for _, q.Alone = range []bool{false, true} {
				_, err := provider.ClaimTasks(w.Context(), w.db, q, claim.Terms{Holder: "other", Lease: time.Second})
				require.NoError(w, err)
			}
			time.Sleep(2 * time.Second)
		}
		sink := &sink{world: w}
		w.start(w.worker(task.WorkerConfig{Audit: sink}, kind))
		require.Equal(w, provider.CodeVanished, w.becomes("a", task.Abandoned).Code)
		require.Empty(w, w.called(), "it does not run again")
		require.Equal(w, []string{"a/abandoned vanished"}, sink.got())
	})
}

// A worker that was stopped past its lease changes nothing, and begins no step.
// Promise: T2.1
func TestALateWorkerChangesNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		var renew atomic.Bool
		broken := &failing{DB: w.db, broken: func(method string) error {
			if (method == "renew" || method == "claim" && len(w.called()) > 0) && !renew.Load() {
				return errors.New("stopped")
			}
			return nil
		}}
		var observed atomic.Int64
		kind := task.Define("calls/slow", func(ctx context.Context, r run, _ int) (string, error) {
			_, err := task.Step(ctx, r, "first", func(_ context.Context, key string) (int, error) {
				w.call("first " + key)
				time.Sleep(10 * time.Second)
				return 1, nil
			}, nil)
			if err != nil {
				return "", err
			}
			if _, err := w.step(ctx, r, "second"); err != nil {
				return "", err
			}
			return "late", nil
		})
		w.start(w.workerOf(broken, task.WorkerConfig{Lease: 3 * time.Second, Observer: task.WorkerObserver{Fenced: func(string) { observed.Add(1) }}}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(5 * time.Second)
		other := w.take(time.Hour, "calls/slow")
		require.Len(w, other, 1)
		time.Sleep(time.Minute)
		require.Equal(w, []string{"first a/first"}, w.called())
		require.Equal(w, other[0].Token, w.task("a").Token)
		require.Empty(w, w.task("a").State)
		require.EqualValues(w, 1, observed.Load())
		renew.Store(true)
	})
}

// A worker whose renewals fail may claim its own task again. The earlier run ends first.
func TestAWorkerTakesItsOwnTaskOver(t *testing.T) {
	inWorld(t, func(w *world) {
		broken := &failing{DB: w.db, broken: func(method string) error {
			if method == "renew" {
				return errors.New("refused")
			}
			return nil
		}}
		var runs, together, most atomic.Int64
		kind := call("calls/slow", func(ctx context.Context, _ run) error {
			most.Store(max(most.Load(), together.Add(1)))
			defer together.Add(-1)
			if runs.Add(1) == 1 {
				<-ctx.Done()
				time.Sleep(time.Second)
				return ctx.Err()
			}
			return nil
		})
		w.start(w.workerOf(broken, task.WorkerConfig{Lease: 3 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		got := w.becomes("a", task.Done)
		require.EqualValues(w, 2, runs.Load())
		require.EqualValues(w, 1, most.Load())
		require.Equal(w, task.Done, got.Status)
	})
}

// If the heartbeat learns that another worker has the task, the context of the handler ends.
// Promise: T2.1
func TestALostTaskIsInterrupted(t *testing.T) {
	inWorld(t, func(w *world) {
		ended := make(chan error, 1)
		kind := call("calls/slow", func(ctx context.Context, _ run) error {
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return ctx.Err()
		})
		w.start(w.worker(task.WorkerConfig{Lease: 3 * time.Second, Timeout: time.Hour}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Claimed)
		w.in(func(ctx context.Context, tx task.Tx) {
			ok, err := tx.Postpone(ctx, "a", time.Now().Add(24*time.Hour))
			require.NoError(w, err)
			require.True(w, ok)
		})
		began := time.Now()
		require.ErrorContains(w, <-ended, "another worker")
		require.Less(w, time.Since(began), 2*time.Second)
		got := w.task("a")
		require.Equal(w, task.Pending, got.Status)
		require.Zero(w, got.Attempts)
	})
}

// Promise: T2.1
func TestALongTaskKeepsItsLease(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/slow", func(context.Context, run) error { time.Sleep(time.Minute); return nil })
		w.start(w.worker(task.WorkerConfig{Lease: time.Second, Timeout: time.Hour}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(500 * time.Millisecond)
		for range 100 {
			require.Empty(w, w.take(time.Hour, "calls/slow"))
			time.Sleep(500 * time.Millisecond)
		}
		require.EqualValues(w, 1, w.becomes("a", task.Done).Version-w.task("a").Version+1)
	})
}

// Handlers that take too long, and those that do not return, are failures. The latter do not take a
// place for ever.
func TestTimeouts(t *testing.T) {
	inWorld(t, func(w *world) {
		release := make(chan struct{})
		w.Cleanup(func() { close(release) })
		var slow, between, hangs atomic.Int64
		kind := task.Define("calls/slow", func(ctx context.Context, r run, in string) (int, error) {
			switch in {
			case "step":
				_, err := task.Step(ctx, r, "a", func(ctx context.Context, _ string) (int, error) {
					if slow.Add(1) > 1 {
						return 1, nil
					}
					<-ctx.Done()
					return 0, ctx.Err()
				}, nil)
				return 0, err
			case "between":
				for _, name := range []string{"a", "b", "c"} { // each in time, and all of them not
					_, err := task.Step(ctx, r, name, func(context.Context, string) (int, error) { time.Sleep(8 * time.Second); return 1, nil }, nil)
					if err != nil {
						return 0, err
					}
					time.Sleep(8 * time.Second)
				}
				between.Add(1)
				return 0, nil
			default:
				if hangs.Add(1) == 1 {
					<-release
				}
				return 0, nil
			}
		})
		w.start(w.worker(task.WorkerConfig{Concurrency: 3, Timeout: 10 * time.Second}, kind))
		w.enqueue(kind.New("step", "step"), kind.New("between", "between"), kind.New("hangs", "hangs"))
		require.Equal(w, provider.CodeDeadline, w.becomes("step", task.Failed).Code)
		require.Equal(w, "stuck", w.becomes("hangs", task.Failed).Code)
		for _, id := range []string{"step", "between", "hangs"} {
			w.becomes(id, task.Done)
		}
		require.EqualValues(w, 1, between.Load())
	})
}

// An outage of the database burns no attempts: changes wait until it is back.
// Promise: T12.1
func TestTheDatabaseIsAway(t *testing.T) {
	inWorld(t, func(w *world) {
		var away atomic.Bool
		broken := &failing{DB: w.db, broken: func(string) error {
			if away.Load() {
				return errors.New("away")
			}
			return nil
		}}
		kind := call("calls/some", func(ctx context.Context, r run) error {
			if _, err := w.step(ctx, r, "a"); err != nil {
				return err
			}
			away.CompareAndSwap(false, r.Attempt() == 1 && len(w.called()) == 1)
			_, err := w.step(ctx, r, "b")
			return err
		})
		w.start(w.workerOf(broken, task.WorkerConfig{Lease: 2 * time.Second}, kind))
		w.enqueue(kind.New("x", 1))
		time.Sleep(20 * time.Second)
		require.True(w, away.Load())
		require.Equal(w, task.Claimed, w.task("x").Status)
		away.Store(false)
		w.becomes("x", task.Done)
		require.Equal(w, []string{"x/a", "x/b"}, w.called(), "no step was repeated")
	})
}

// A change that the database refuses fails its task only.
// Promise: T12.1
func TestAChangeThatTheDatabaseRefuses(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(ctx context.Context, r run) error {
			_, err := w.step(ctx, r, "a")
			return err
		})
		broken := &refusing{failing{DB: w.db, broken: func(string) error { return nil }}}
		w.start(w.workerOf(broken, task.WorkerConfig{Lease: 3 * time.Second}, kind))
		w.enqueue(kind.New("bad", 1), kind.New("good", 1))
		w.becomes("good", task.Done)
		require.Equal(w, "*errors.errorString", w.becomes("bad", task.Abandoned).Code)
	})
}

// refusing refuses changes of one task that fill a slot.
type refusing struct{ failing }

func (f *refusing) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	for _, c := range changes {
		if c.ID == "bad" && c.Open != "" {
			return nil, errors.New("refused")
		}
	}
	return f.failing.ChangeTasks(ctx, changes)
}

// The worker stops: no step begins, running steps may end, and the rest is released with its attempt
// given back.
// Promise: T12.1
func TestShutdown(t *testing.T) {
	inWorld(t, func(w *world) {
		began := make(chan struct{}, 2)
		kind := task.Define("calls/some", func(ctx context.Context, r run, in string) (int, error) {
			_, err := task.Step(ctx, r, "a", func(ctx context.Context, key string) (int, error) {
				w.call(key)
				began <- struct{}{}
				if in == "long" {
					<-ctx.Done()
					return 0, ctx.Err()
				}
				time.Sleep(3 * time.Second)
				return 1, nil
			}, nil)
			if err != nil {
				return 0, err
			}
			_, err = w.step(ctx, r, "b")
			return 0, err
		})
		stop := w.start(w.worker(task.WorkerConfig{Timeout: time.Hour}, kind))
		w.enqueue(kind.New("short", "short"), kind.New("long", "long"))
		<-began
		<-began
		at := time.Now()
		require.NoError(w, stop())
		require.Less(w, time.Since(at), 10*time.Second)
		for _, id := range []string{"short", "long"} {
			got := w.task(id)
			require.Equal(w, task.Pending, got.Status, id)
			require.Zero(w, got.Attempts, id)
		}
		require.Contains(w, w.task("short").State, "a", "the step that ended in time is recorded")
		require.ElementsMatch(w, []string{"short/a", "long/a"}, w.called())
	})
}

func TestAHandlerThatDoesNotReturnEndsTheDrain(t *testing.T) {
	inWorld(t, func(w *world) {
		release, began := make(chan struct{}), make(chan struct{})
		w.Cleanup(func() { close(release) })
		kind := call("calls/some", func(context.Context, run) error { close(began); <-release; return nil })
		stop := w.start(w.worker(task.WorkerConfig{Timeout: time.Hour, Drain: 4 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		<-began
		at := time.Now()
		require.ErrorIs(w, stop(), outbox.ErrDrain)
		require.Equal(w, 4*time.Second, time.Since(at))
		require.Equal(w, task.Claimed, w.task("a").Status, "the lease protects it while the handler may run")
	})
}

// No more tasks are claimed than can run.
// Promise: T2.2
func TestTheBoundComesBeforeTheClaim(t *testing.T) {
	inWorld(t, func(w *world) {
		var most atomic.Int64
		kind := call("calls/some", func(context.Context, run) error {
			most.Store(max(most.Load(), w.mustCount(task.Claimed)))
			time.Sleep(time.Second)
			return nil
		})
		var drafts []task.Draft
		for i := range 40 {
			drafts = append(drafts, kind.New(fmt.Sprint(i), 1))
		}
		w.enqueue(drafts...)
		w.start(w.worker(task.WorkerConfig{Concurrency: 4, Lease: 2 * time.Second}, kind))
		w.mustComplete(kind)
		require.EqualValues(w, 4, most.Load())
	})
}

func TestEndedTasksAreDeleted(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(context.Context, run) error { return nil })
		var deleted atomic.Int64
		w.start(w.worker(task.WorkerConfig{Keep: task.Retention{Done: time.Hour}, Observer: task.WorkerObserver{Deleted: func(n int) { deleted.Add(int64(n)) }}}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Done)
		time.Sleep(58 * time.Minute)
		w.task("a")
		time.Sleep(5 * time.Minute)
		all, err := w.db.Tasks(w.Context(), task.Filter{})
		require.NoError(w, err)
		require.Empty(w, all)
		require.EqualValues(w, 1, deleted.Load())
	})
}

// RunOnce runs the due tasks, and returns.
func TestRunOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(_ context.Context, r run) error { w.call(r.Key()); return nil })
		w.enqueue(kind.New("a", 1), kind.New("b", 1), kind.New("later", 1).Later(time.Hour), kind.New("due", 1).Due(time.Now().Add(2*time.Hour)))
		worker := w.worker(task.WorkerConfig{Concurrency: 1}, kind)
		for _, want := range []int{1, 1, 0} {
			n, err := worker.RunOnce(w.Context())
			require.NoError(w, err)
			require.Equal(w, want, n)
		}
		time.Sleep(time.Hour)
		n, err := worker.RunOnce(w.Context())
		require.NoError(w, err)
		require.Equal(w, 1, n)
		time.Sleep(time.Hour)
		_, err = worker.RunOnce(w.Context())
		require.NoError(w, err)
		require.Equal(w, []string{"a", "b", "later", "due"}, w.called())
	})
}
