package task_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// sink is an audit sink that can be down.
type sink struct {
	*world
	down atomic.Bool
	all  []string
}

func (s *sink) Append(_ context.Context, r task.Record) error {
	if s.down.Load() {
		return errors.New("down")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	line := r.Task + "/" + r.What
	if r.Detail != "" {
		line += " " + r.Detail
	}
	s.all = append(s.all, line)
	return nil
}

func (s *sink) got() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := slices.Clone(s.all)
	slices.Sort(got)
	return got
}

func (w *world) row(table, key string) (v any) {
	w.db.View(func(m *memory.Model) { v, _ = m.Get(table, key) })
	return v
}

// The writes of DefineTx, its messages and the end of the task commit together, once.
// Promise: T4.1
func TestDefineTx(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs atomic.Int64
		kind := task.DefineTx("orders/book", func(_ context.Context, tx tx, in string) (string, []outbox.Message, error) {
			n, _ := tx.Get("booked", in)
			old, _ := n.(int)
			tx.Put("booked", in, old+1)
			if runs.Add(1); in == "fails" && runs.Load() < 3 {
				return "", nil, errors.New("unavailable")
			}
			if in == "refused" {
				return "", nil, task.GiveUp("refused")
			}
			return "ok", []outbox.Message{{ID: in, Topic: "booked", Payload: []byte(in)}}, nil
		})
		w.start(w.worker(task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", "fails"))
		got := w.becomes("a", task.Done)
		out, err := kind.Result(got)
		require.NoError(w, err)
		require.Equal(w, "ok", out)
		require.Equal(w, 1, w.row("booked", "fails"))
		entries, err := w.db.Entries(w.Context(), outbox.Filter{})
		require.NoError(w, err)
		require.Len(w, entries, 1)

		w.enqueue(kind.New("b", "refused"))
		got = w.becomes("b", task.Undone)
		require.Equal(w, "refused", got.Why)
		require.Nil(w, w.row("booked", "refused"))
		_, err = kind.Result(got)
		require.ErrorIs(w, err, task.ErrNotDone)
	})
}

// A step in a transaction whose reply was lost is not done again.
// Promise: T4.1
func TestALostReplyToTheCommitOfAStep(t *testing.T) {
	inWorld(t, func(w *world) {
		lost := &losing{DB: w.db}
		lost.lose.Store(1)
		kind := task.Define("orders/book", func(ctx context.Context, r run, in int) (int, error) {
			return task.StepTx(ctx, r, "book", func(_ context.Context, tx tx) (int, []outbox.Message, error) {
				n, _ := tx.Get("booked", "x")
				old, _ := n.(int)
				tx.Put("booked", "x", old+in)
				return old + in, nil, nil
			}, nil)
		})
		w.start(w.workerOf(lost, task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 5))
		got := w.becomes("a", task.Done)
		out, err := kind.Result(got)
		require.NoError(w, err)
		require.Equal(w, 5, out)
		require.Equal(w, 5, w.row("booked", "x"))
		require.EqualValues(w, 0, lost.lose.Load())
	})
}

// losing loses the replies of some commits.
type losing struct {
	*memory.DB
	lose atomic.Int64
}

func (l *losing) Do(ctx context.Context, u provider.Unit, run func(context.Context, tx, provider.Found) (provider.Closing, error)) error {
	err := l.DB.Do(ctx, u, run)
	if err == nil && l.lose.Load() > 0 {
		l.lose.Add(-1)
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: errors.New("no reply")}
	}
	return err
}

// A task that is canceled while its transaction runs has no effect.
// Promise: T4.1
func TestCancelDuringATransaction(t *testing.T) {
	inWorld(t, func(w *world) {
		began, canceled := make(chan struct{}), make(chan struct{})
		once := &pausing{DB: w.db, before: func() { close(began); <-canceled }}
		kind := task.DefineTx("orders/book", func(_ context.Context, tx tx, _ int) (int, []outbox.Message, error) {
			tx.Put("booked", "x", 1)
			return 0, nil, nil
		})
		w.start(w.workerOf(once, task.WorkerConfig{}, kind))
		w.enqueue(kind.New("a", 1))
		<-began
		n, err := w.db.CancelTasks(w.Context(), task.Filter{Status: []task.Status{task.Pending, task.Claimed, task.Failed, task.Waiting, task.Abandoned}}, decision)
		require.NoError(w, err)
		require.Equal(w, 1, n)
		close(canceled)
		w.becomes("a", task.Undone)
		require.Nil(w, w.row("booked", "x"))
	})
}

// pausing calls before once, before a transaction begins.
type pausing struct {
	*memory.DB
	before func()
	done   atomic.Bool
}

func (p *pausing) Do(ctx context.Context, u provider.Unit, run func(context.Context, tx, provider.Found) (provider.Closing, error)) error {
	if p.done.CompareAndSwap(false, true) {
		p.before()
	}
	return p.DB.Do(ctx, u, run)
}

// A group is completed once, by its last success, in that transaction. Abandoned and undone tasks
// keep it open, until an operator decides.
// Promise: T8.1
func TestGroups(t *testing.T) {
	inWorld(t, func(w *world) {
		var down, refuse atomic.Bool
		down.Store(true)
		forget := task.Define("erasure/forget", func(_ context.Context, r run, system string) (bool, error) {
			if system == "billing" && down.Load() {
				return false, task.Permanent(errors.New("held"))
			}
			w.call(r.Key())
			return true, nil
		})
		local := task.DefineTx("erasure/local", func(context.Context, tx, int) (int, []outbox.Message, error) { return 0, nil, nil })
		var completions atomic.Int64
		subject := task.DefineGroup("erasure/subject", func(_ context.Context, tx tx, id string, name string) ([]outbox.Message, error) {
			completions.Add(1)
			tx.Put("erased", id, name)
			if refuse.CompareAndSwap(true, false) {
				return nil, errors.New("unavailable")
			}
			return []outbox.Message{{ID: id, Topic: "erased", Payload: []byte(name)}}, nil
		})
		w.start(w.worker(task.WorkerConfig{}, forget, local, subject))
		group := subject.New("s1", "ann", forget.New("s1-crm", "crm"), forget.New("s1-billing", "billing"), local.New("s1-local", 1))
		for range 2 {
			w.in(func(ctx context.Context, tx task.Tx) { require.NoError(w, tx.EnqueueGroup(ctx, group)) })
		}
		w.becomes("s1-billing", task.Abandoned)
		w.becomes("s1-crm", task.Done)
		w.becomes("s1-local", task.Done)
		g, ok, err := w.db.TaskGroup(w.Context(), "s1")
		require.NoError(w, err)
		require.True(w, ok)
		require.Equal(w, []int{3, 1}, []int{g.Total, g.Open})
		require.Zero(w, completions.Load())
		refuse.Store(true) // the first completion fails, and with it the task
		require.NoError(w, w.db.CompleteTask(w.Context(), "s1-billing", []byte("true"), decision))
		w.becomes("s1-billing", task.Failed)
		require.Nil(w, w.row("erased", "s1"))
		w.becomes("s1-billing", task.Done)
		require.EqualValues(w, 2, completions.Load())
		require.Equal(w, "ann", w.row("erased", "s1"))
		entries, err := w.db.Entries(w.Context(), outbox.Filter{})
		require.NoError(w, err)
		require.Len(w, entries, 1)
		require.Equal(w, []string{"s1-crm"}, w.called(), "the completed task did not run")
	})
}

// No task ends without its record, and a sink that is down costs no attempts.
// Promise: T9.1
func TestTheAuditSink(t *testing.T) {
	inWorld(t, func(w *world) {
		calls := map[string]*atomic.Int64{"call": {}, "command": {}, "step": {}}
		kind := call("calls/some", func(context.Context, run) error { calls["call"].Add(1); return nil })
		command := task.DefineTx("calls/command", func(_ context.Context, tx tx, _ int) (int, []outbox.Message, error) {
			n := calls["command"].Add(1)
			tx.Put("commands", "x", n)
			return 0, nil, nil
		})
		gives := call("calls/gives", func(context.Context, run) error { return task.GiveUp("no") })
		bad := call("calls/bad", func(context.Context, run) error { return task.Permanent(errors.New("no")) })
		s := &sink{world: w}
		s.down.Store(true)
		w.start(w.worker(task.WorkerConfig{Audit: s, Lease: 10 * time.Second}, kind, command, gives, bad))
		w.enqueue(kind.New("call", 1), command.New("command", 1), gives.New("gives", 1), bad.New("bad", 1))
		time.Sleep(105 * time.Second) // ten leases; the limit is 3 attempts
		for _, id := range []string{"call", "command", "gives", "bad"} {
			got := w.task(id)
			require.Equal(w, task.Pending, got.Status, id)
			require.Equal(w, "audit", got.Code, id)
		}
		require.Empty(w, s.got())
		require.Nil(w, w.row("commands", "x"))
		require.EqualValues(w, 1, calls["call"].Load(), "its result is kept")
		s.down.Store(false)
		for id, status := range map[string]task.Status{"call": task.Done, "command": task.Done, "gives": task.Undone, "bad": task.Abandoned} {
			w.becomes(id, status)
		}
		require.Equal(w, []string{"bad/abandoned permanent", "call/done", "command/done", "gives/undone"}, s.got())
	})
}

// A group is completed with its record, and not before. While the sink is down, the task that is its last one
// is not done, and its handler does not run again.
// Promise: T9.2
func TestTheSinkGetsTheEndOfAGroup(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs, completions atomic.Int64
		kind := call("calls/some", func(context.Context, run) error { runs.Add(1); return nil })
		book := task.DefineTx("calls/book", func(context.Context, tx, int) (int, []outbox.Message, error) { return 0, nil, nil })
		subject := task.DefineGroup("people/erased", func(_ context.Context, tx tx, id string, _ string) ([]outbox.Message, error) {
			completions.Add(1)
			tx.Put("erased", id, true)
			return nil, nil
		})
		s := &groupSink{sink: sink{world: w}}
		s.refuse.Store(true)
		w.start(w.worker(task.WorkerConfig{Audit: s, Lease: 10 * time.Second}, kind, book, subject))
		w.in(func(ctx context.Context, tx task.Tx) {
			require.NoError(w, tx.EnqueueGroup(ctx, subject.New("ann", "", kind.New("a", 1).Later(time.Minute), book.New("b", 1))))
		})
		w.becomes("b", task.Done)
		time.Sleep(3 * time.Minute)
		require.Equal(w, task.Pending, w.task("a").Status)
		require.Equal(w, "audit", w.task("a").Code)
		require.Nil(w, w.row("erased", "ann"))
		require.EqualValues(w, 1, runs.Load())
		require.Greater(w, completions.Load(), int64(1), "each was rolled back")
		s.refuse.Store(false)
		w.becomes("a", task.Done)
		require.Equal(w, true, w.row("erased", "ann"))
		require.EqualValues(w, 1, runs.Load())
		require.Equal(w, []task.Record{{
			ID: "ann/group_done", Kind: "people/erased", Group: "ann", What: "group_done", By: s.groups[0].By, At: s.groups[0].At,
		}}, s.groups)
		require.Contains(w, s.got(), "a/done")
	})
}

// groupSink has the records of groups apart.
type groupSink struct {
	sink
	refuse atomic.Bool
	groups []task.Record
}

func (s *groupSink) Append(ctx context.Context, r task.Record) error {
	if r.Task != "" {
		return s.sink.Append(ctx, r)
	}
	if s.refuse.Load() {
		return errors.New("down")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.groups = append(s.groups, r)
	return nil
}

// The sink gets ends only: no attempt that failed, no wait, no release.
// Promise: T9.1
func TestTheSinkGetsNoAttemptThatFailed(t *testing.T) {
	inWorld(t, func(w *world) {
		var runs atomic.Int64
		kind := task.Define("calls/flaky", func(ctx context.Context, r run, _ int) (int, error) {
			if runs.Add(1) <= 2 {
				return 0, errors.New("refused")
			}
			return 0, r.Sleep(ctx, "pause", time.Minute)
		})
		s := &sink{world: w}
		w.start(w.worker(task.WorkerConfig{Audit: s}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Waiting)
		require.Empty(w, s.got())
		w.becomes("a", task.Done)
		require.EqualValues(w, 4, runs.Load())
		require.Equal(w, []string{"a/done"}, s.got())
	})
}

// A refused transaction leaves no record of an end in the sink.
// Promise: T9.1
func TestTheSinkIsNotToldOfATransactionThatFails(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := task.DefineTx("calls/command", func(context.Context, tx, int) (int, []outbox.Message, error) {
			return 0, nil, task.Permanent(errors.New("refused"))
		})
		s := &sink{world: w}
		w.start(w.worker(task.WorkerConfig{Audit: s}, kind))
		w.enqueue(kind.New("a", 1))
		w.becomes("a", task.Abandoned)
		require.Equal(w, []string{"a/abandoned permanent"}, s.got())
	})
}

// A timer that is postponed or canceled before it has fired does not fire.
// Promise: T13.1
func TestTimers(t *testing.T) {
	inWorld(t, func(w *world) {
		dormant := task.DefineTx("customers/dormant", func(_ context.Context, tx tx, id string) (bool, []outbox.Message, error) {
			tx.Put("dormant", id, true)
			return true, nil, nil
		})
		worker := w.worker(task.WorkerConfig{}, dormant)
		work := func() {
			_, err := worker.RunOnce(w.Context())
			require.NoError(w, err)
		}
		day := 24 * time.Hour
		at := time.Now()
		w.enqueue(dormant.New("a", "a").Due(at.Add(90*day)), dormant.New("b", "b").Due(at.Add(90*day)))
		time.Sleep(60 * day)
		w.in(func(ctx context.Context, tx task.Tx) {
			ok, err := tx.Postpone(ctx, "a", time.Now().Add(90*day))
			require.NoError(w, err)
			require.True(w, ok)
			ok, err = tx.Cancel(ctx, "b")
			require.NoError(w, err)
			require.True(w, ok)
		})
		time.Sleep(89 * day)
		work()
		require.Nil(w, w.row("dormant", "a"))
		require.Equal(w, task.Undone, w.task("b").Status)
		time.Sleep(2 * day)
		work()
		require.Equal(w, task.Done, w.task("a").Status)
		require.Equal(w, true, w.row("dormant", "a"))
		require.Nil(w, w.row("dormant", "b"))
	})
}

// A sink that panics is a sink that is down.
func TestASinkThatPanics(t *testing.T) {
	inWorld(t, func(w *world) {
		kind := call("calls/some", func(context.Context, run) error { return nil })
		s := &panicking{sink: sink{world: w}}
		w.start(w.worker(task.WorkerConfig{Audit: s, Lease: 10 * time.Second}, kind))
		w.enqueue(kind.New("a", 1))
		time.Sleep(time.Second)
		require.Equal(w, "audit", w.task("a").Code)
		w.becomes("a", task.Done)
		require.Equal(w, []string{"a/done"}, s.got())
	})
}

type panicking struct {
	sink
	before atomic.Bool
}

func (p *panicking) Append(ctx context.Context, r task.Record) error {
	if p.before.CompareAndSwap(false, true) {
		panic("no")
	}
	return p.sink.Append(ctx, r)
}
