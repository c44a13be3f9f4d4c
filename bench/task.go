package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

const (
	taskCount = 5000 // so many because each connection plans its statements again in each round
	taskAtOne = 16   // starters, and tasks that run at the same time
	taskLimit = 2 * time.Minute

	// The limit has no claims, fences, versions and trail.
	limitTaskTables = `
create table lim.tasks (id text collate "C" primary key, kind text collate "C" not null, input jsonb not null, state jsonb not null default '{}',
	result jsonb, status text not null default 'pending', open boolean not null default true, next_at timestamptz not null,
	created_at timestamptz not null default clock_timestamp(), ended_at timestamptz) with (fillfactor = 70);
create index on lim.tasks (kind, next_at, id) where open;
create index on lim.tasks (ended_at) where status = 'done'`

	limitTaskInsert = `insert into lim.tasks (id, kind, input, next_at) values ($1, 'bench/task', $2, now())`
	limitTaskStep   = `update lim.tasks set state = state || jsonb_build_object($2::text, $3::jsonb) where id = $1`
	limitTaskEnd    = `update lim.tasks set status = 'done', open = false, result = $2, ended_at = now() where id = $1`
)

// taskBed is the environment of the lines of tasks.
type taskBed struct {
	*bed
	db      *postgres.DB
	running taskWorker // of the program that was prepared last
}

// taskWorker is a running worker, of Kinora or of a peer.
type taskWorker struct {
	add  func(ctx context.Context, i int) error // starts a task in a transaction of its own
	wait func(ctx context.Context) error        // until all tasks have ended
	stop func() error
}

func newTaskBed(ctx context.Context, b *bed) (*taskBed, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return nil, err
	}
	_, err = b.pool.Exec(ctx, limitTaskTables)
	return &taskBed{bed: b, db: db}, err
}

func (t *taskBed) lines(ctx context.Context) ([]line, error) {
	river, dbos := t.program(t.river), "DBOS, a queue"
	claims, err := t.claimLine(ctx)
	return []line{
		{"task/call", "tasks/s", "River, one job", t.program(t.ours(0)), river, t.byHand(0)},
		{"task/call-dbos", "tasks/s", dbos, t.program(t.ours(0)), t.program(t.dbos(0)), program{}},
		{"task/steps-3", "tasks/s", dbos, t.program(t.ours(3)), t.program(t.dbos(3)), t.byHand(3)},
		claims,
	}, err
}

// program starts a worker before each round. The rate counts from the first start of a task to the
// last end.
func (t *taskBed) program(start func(ctx context.Context) (taskWorker, error)) program {
	return program{
		prepare: func(ctx context.Context) (err error) {
			if err := t.fresh(ctx); err != nil {
				return err
			}
			t.running, err = start(context.WithoutCancel(ctx))
			return err
		},
		work: func(ctx context.Context, _ *bed) (int64, error) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), taskLimit)
			defer cancel()
			if err := startTasks(ctx, t.running.add); err != nil {
				return 0, err
			}
			return taskCount, t.running.wait(ctx)
		},
	}
}

// fresh stops the worker of the program before, and empties the tables. It does not analyze them: then
// the plans of the limit, which are made when few rows are there, would be sequential scans.
func (t *taskBed) fresh(ctx context.Context) error {
	if t.running.stop != nil {
		if err := t.running.stop(); err != nil {
			return err
		}
		t.running = taskWorker{}
	}
	for _, stmt := range []string{"truncate lim.tasks, kinora.tasks, kinora.task_groups, kinora.task_trail", "checkpoint"} {
		if _, err := t.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	return nil
}

// startTasks calls start for each task, in 16 goroutines.
func startTasks(ctx context.Context, start func(ctx context.Context, i int) error) error {
	var all sync.WaitGroup
	var next atomic.Int64
	errs := make([]error, taskAtOne)
	for k := range errs {
		all.Go(func() {
			for i := next.Add(1); i <= taskCount && errs[k] == nil; i = next.Add(1) {
				errs[k] = start(ctx, int(i))
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// byHand runs each task on one connection at a time, in 16 goroutines.
func (t *taskBed) byHand(steps int) program {
	one := func(ctx context.Context, i int) error {
		id := fmt.Sprintf("task-%d", i)
		if _, err := t.pool.Exec(ctx, limitTaskInsert, id, "1"); err != nil {
			return err
		}
		for s := range steps {
			if _, err := t.pool.Exec(ctx, limitTaskStep, id, fmt.Sprintf("step-%d", s), "1"); err != nil {
				return err
			}
		}
		_, err := t.pool.Exec(ctx, limitTaskEnd, id, "1")
		return err
	}
	return program{t.fresh, func(ctx context.Context, _ *bed) (int64, error) {
		return taskCount, startTasks(context.WithoutCancel(ctx), one)
	}}
}

// stepping is a kind of tasks with steps that do nothing.
func stepping(steps int) *task.Definition[pgx.Tx, int, int] {
	return task.Define("bench/task", func(ctx context.Context, r *task.Run[pgx.Tx], in int) (int, error) {
		for s := range steps {
			_, err := task.Step(ctx, r, fmt.Sprintf("step-%d", s), func(context.Context, string) (int, error) { return s, nil }, nil)
			if err != nil {
				return 0, err
			}
		}
		return in, nil
	})
}

func (t *taskBed) ours(steps int) func(ctx context.Context) (taskWorker, error) {
	return func(ctx context.Context) (taskWorker, error) {
		of := stepping(steps)
		ended := newCountdown(taskCount)
		stop, err := t.work(ctx, task.WorkerObserver{Ended: func(_ string, to task.Status, code string, _ time.Duration) { ended.one(to == task.Done, code) }}, of)
		add := func(ctx context.Context, i int) error {
			err := pgx.BeginFunc(ctx, t.pool, func(tx pgx.Tx) error {
				return t.db.TasksIn(tx).Enqueue(ctx, of.New(fmt.Sprintf("task-%d", i), i))
			})
			t.db.Wake()
			return err
		}
		return taskWorker{add, ended.wait, stop}, err
	}
}

// work starts a worker.
func (t *taskBed) work(ctx context.Context, observer task.WorkerObserver, of *task.Definition[pgx.Tx, int, int]) (stop func() error, err error) {
	w, err := task.NewWorker(t.db, task.WorkerConfig{Concurrency: taskAtOne, Logger: slog.New(slog.DiscardHandler), Observer: observer}, of)
	if err != nil {
		return nil, err
	}
	run, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- w.Run(run) }()
	select {
	case <-w.Running():
		return func() error { end(); return <-done }, nil
	case err := <-done:
		end()
		return nil, err
	}
}

// countdown waits until a number of tasks has ended.
type countdown struct {
	left   atomic.Int64
	zero   chan struct{}
	failed atomic.Pointer[string]
}

func newCountdown(n int64) *countdown {
	c := &countdown{zero: make(chan struct{})}
	c.left.Store(n)
	return c
}

func (c *countdown) one(ok bool, code string) {
	if !ok {
		c.failed.Store(&code)
	}
	if c.left.Add(-1) == 0 {
		close(c.zero)
	}
}

func (c *countdown) wait(ctx context.Context) error {
	select {
	case <-c.zero:
	case <-ctx.Done():
		return fmt.Errorf("%d tasks have not ended: %w", c.left.Load(), ctx.Err())
	}
	if code := c.failed.Load(); code != nil {
		return fmt.Errorf("a task was not done: %s", *code)
	}
	return nil
}
