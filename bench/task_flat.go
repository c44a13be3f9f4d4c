package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

const (
	timerCount  = 50_000
	timerRounds = 3
	timerFill   = 1000 // timers that are added in one transaction

	// Half of the tasks wait without end, and half are timers.
	waitingTasks = `insert into %[1]s.tasks (id, kind, input, status, waits, next_at)
		select 'waiting-' || g, 'bench/task', '1', case when g %% 2 = 0 then 'waiting' else 'pending' end, case when g %% 2 = 0 then 'answer' else '' end,
			case when g %% 2 = 0 then 'infinity' else now() + interval '1 day' + g * interval '1 s' end
		from generate_series(1, 1000000) g`
)

// claimLine compares claims that find nothing, in a table with a million waiting tasks of the kind, and
// in an empty table.
func (t *taskBed) claimLine(ctx context.Context) (line, error) {
	const schema = "waiting"
	beside, err := postgres.New(t.pool, &postgres.Config{Schema: schema})
	if err != nil {
		return line{}, err
	}
	fill := sync.OnceValue(func() error {
		if err := beside.Migrate(ctx); err != nil {
			return err
		}
		for _, stmt := range []string{fmt.Sprintf(waitingTasks, schema), "vacuum analyze " + schema + ".tasks"} {
			if _, err := t.pool.Exec(ctx, stmt); err != nil {
				return err
			}
		}
		return nil
	})
	filled := func(ctx context.Context) error {
		if err := fill(); err != nil {
			return err
		}
		return t.fresh(ctx)
	}
	return line{"task/claim-beside-1M", "claims/s", "", program{filled, claims(beside)}, program{}, program{t.fresh, claims(t.db)}}, nil
}

// claims claims again and again, and finds nothing.
func claims(db *postgres.DB) work {
	return func(ctx context.Context, _ *bed) (done int64, err error) {
		hard := context.WithoutCancel(ctx)
		q := provider.TaskQuery{Kinds: []string{"bench/task"}, Attempts: 8}
		for ; ctx.Err() == nil; done++ {
			got, err := provider.ClaimTasks(hard, db, q, claim.Terms{Holder: "bench", Lease: time.Minute, Limit: taskAtOne})
			if err != nil {
				return 0, err
			}
			if len(got) > 0 {
				return 0, fmt.Errorf("a claim found %d tasks", len(got))
			}
		}
		return done, nil
	}
}

// timers measures the 99th percentile of the time of a claim while one worker drains 50,000 timers
// that are due at the same time. Claims that find nothing do not count.
func (t *taskBed) timers(ctx context.Context) (result, error) {
	var p99s, worst, rates []float64
	for range timerRounds {
		if err := t.fresh(ctx); err != nil {
			return result{}, err
		}
		took, rate, err := t.drain(ctx)
		if err != nil {
			return result{}, err
		}
		slices.Sort(took)
		ms := func(share float64) float64 {
			return float64(took[int(share*float64(len(took)-1))].Microseconds()) / 1000
		}
		p99s, worst, rates = append(p99s, ms(0.99)), append(worst, ms(1)), append(rates, rate)
	}
	slog.Info("timers drained", "timers", timerCount, "per_second", median(rates), "slowest_claim_ms", median(worst))
	return result{Name: "task/timers-50k: p99 of a claim", Unit: "ms (lower is better)", Ours: median(p99s), Rounds: timerRounds}, nil
}

// drain adds timers that are due soon, and returns how long the claims of them took.
func (t *taskBed) drain(ctx context.Context) (took []time.Duration, rate float64, err error) {
	of := stepping(0)
	var due time.Time
	if err := t.pool.QueryRow(ctx, "select now() + interval '15 s'").Scan(&due); err != nil {
		return nil, 0, err
	}
	for from := 0; from < timerCount; from += timerFill {
		drafts := make([]task.Draft, timerFill)
		for i := range drafts {
			drafts[i] = of.New(fmt.Sprintf("timer-%d", from+i), i).Due(due)
		}
		tx, err := t.pool.Begin(ctx)
		if err != nil {
			return nil, 0, err
		}
		if err := t.db.TasksIn(tx).Enqueue(ctx, drafts...); err != nil {
			return nil, 0, err
		}
		if err := tx.Commit(ctx); err != nil {
			return nil, 0, err
		}
	}
	ended := newCountdown(timerCount)
	var mu sync.Mutex
	var begin time.Time
	stop, err := t.work(ctx, task.WorkerObserver{
		Claimed: func(tasks []task.Task, d time.Duration, _ error) {
			mu.Lock()
			defer mu.Unlock()
			if len(tasks) > 0 {
				took = append(took, d)
			}
			if begin.IsZero() && len(tasks) > 0 {
				begin = time.Now()
			}
		},
		Ended: func(_ string, to task.Status, code string, _ time.Duration) { ended.one(to == task.Done, code) },
	}, of)
	if err != nil {
		return nil, 0, err
	}
	limited, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := ended.wait(limited); err != nil {
		return nil, 0, err
	}
	rate = timerCount / time.Since(begin).Seconds()
	return took, rate, stop()
}
