package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// The peers have their defaults, except for the number of tasks at a time, the logger, and the time
// between two fetches: with the defaults, River would run 160 jobs a second, and DBOS 16. Of 1, 5 and
// 20 ms these are the fastest.
const (
	riverCooldown = 5 * time.Millisecond
	riverPoll     = 20 * time.Millisecond
	dbosPoll      = 5 * time.Millisecond
)

type riverArgs struct {
	N int `json:"n"`
}

func (riverArgs) Kind() string { return "bench" }

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
}

func (riverWorker) Work(context.Context, *river.Job[riverArgs]) error { return nil }

// peerPool returns a pool of as many connections as the one of Kinora has.
func (t *taskBed) peerPool(ctx context.Context) (*pgxpool.Pool, error) {
	return pgxpool.New(ctx, t.dsn+"&pool_max_conns=16")
}

// river runs jobs. Its completer records them in batches.
func (t *taskBed) river(ctx context.Context) (taskWorker, error) {
	pool, err := t.peerPool(ctx)
	if err != nil {
		return taskWorker{}, err
	}
	driver := riverpgxv5.New(pool)
	migrator, err := rivermigrate.New(driver, nil)
	if err != nil {
		return taskWorker{}, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return taskWorker{}, err
	}
	if _, err := pool.Exec(ctx, "truncate river_job"); err != nil {
		return taskWorker{}, err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{})
	client, err := river.NewClient(driver, &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: taskAtOne}}, Workers: workers,
		Logger: slog.New(slog.DiscardHandler), FetchCooldown: riverCooldown, FetchPollInterval: riverPoll,
	})
	if err != nil {
		return taskWorker{}, err
	}
	done, unsubscribe := client.SubscribeConfig(&river.SubscribeConfig{Kinds: []river.EventKind{river.EventKindJobCompleted}, ChanSize: taskCount})
	if err := client.Start(ctx); err != nil {
		return taskWorker{}, err
	}
	return taskWorker{
		add: func(ctx context.Context, i int) error {
			_, err := client.Insert(ctx, riverArgs{i}, nil)
			return err
		},
		wait: func(ctx context.Context) error {
			for n := range taskCount {
				select {
				case <-done:
				case <-ctx.Done():
					return fmt.Errorf("%d jobs have not ended: %w", taskCount-n, ctx.Err())
				}
			}
			return nil
		},
		stop: func() error {
			unsubscribe()
			err := client.Stop(ctx)
			pool.Close()
			return err
		},
	}, nil
}

// dbos runs workflows that wait in a queue.
func (t *taskBed) dbos(steps int) func(ctx context.Context) (taskWorker, error) {
	return func(ctx context.Context) (taskWorker, error) {
		pool, err := t.peerPool(ctx)
		if err != nil {
			return taskWorker{}, err
		}
		own, err := dbos.NewContext(ctx, dbos.Config{AppName: "bench", SystemDBPool: pool, Logger: slog.New(slog.DiscardHandler), ApplicationVersion: "1"})
		if err != nil {
			return taskWorker{}, err
		}
		ran := newCountdown(taskCount)
		flow := func(ctx dbos.Context, in int) (int, error) {
			defer ran.one(true, "")
			for s := range steps {
				if _, err := dbos.RunAsStep(ctx, func(context.Context) (int, error) { return s, nil }, dbos.WithStepName(fmt.Sprintf("step-%d", s))); err != nil {
					return 0, err
				}
			}
			return in, nil
		}
		dbos.RegisterWorkflow(own, flow, dbos.WithWorkflowName("bench"))
		if err := dbos.Launch(own); err != nil {
			return taskWorker{}, err
		}
		if _, err := pool.Exec(ctx, "truncate dbos.workflow_status cascade"); err != nil {
			return taskWorker{}, err
		}
		queue, err := dbos.RegisterQueue(own, "bench", dbos.WithWorkerConcurrency(taskAtOne), dbos.WithQueueBasePollingInterval(dbosPoll))
		if err != nil {
			return taskWorker{}, err
		}
		return taskWorker{
			add: func(_ context.Context, i int) error {
				_, err := dbos.RunWorkflow(own, flow, i, dbos.WithQueue(queue))
				return err
			},
			wait: func(ctx context.Context) error {
				for left := 1; left > 0; {
					if err := ran.wait(ctx); err != nil { // the statuses are recorded later
						return err
					}
					if err := pool.QueryRow(ctx, `select count(*) from dbos.workflow_status where status <> 'SUCCESS'`).Scan(&left); err != nil {
						return err
					}
				}
				return nil
			},
			stop: func() error {
				err := dbos.Shutdown(own, 10*time.Second)
				pool.Close()
				return err
			},
		}, nil
	}
}
