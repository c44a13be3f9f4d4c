// Package every does something at regular times.
package every

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// Tick is the input of a run.
type Tick struct{ At time.Time }

// Job does something in a transaction, once for each interval.
type Job[Tx any] struct {
	db       provider.TaskProvider[Tx]
	kind     *task.Definition[Tx, Tick, bool]
	interval time.Duration
	do       func(ctx context.Context, tx Tx, at time.Time) error
}

// New returns a job. kind is the kind of its tasks.
func New[Tx any](db provider.TaskProvider[Tx], kind string, interval time.Duration,
	do func(ctx context.Context, tx Tx, at time.Time) error,
) *Job[Tx] {
	j := &Job[Tx]{db: db, interval: interval, do: do}
	j.kind = task.DefineTx(kind, j.run)
	return j
}

// run does the work of one interval and adds the next run, in one transaction.
func (j *Job[Tx]) run(ctx context.Context, tx Tx, t Tick) (bool, []outbox.Message, error) {
	if err := j.do(ctx, tx, t.At); err != nil {
		return false, nil, err
	}
	return true, nil, j.Start(ctx, tx, t.At.Add(j.interval))
}

// Start adds the run at this time, rounded down to the interval. Call it whenever the program starts:
// a run that exists is not added again.
func (j *Job[Tx]) Start(ctx context.Context, tx Tx, at time.Time) error {
	at = at.UTC().Truncate(j.interval)
	return j.db.TasksIn(tx).Enqueue(ctx, j.kind.New(j.id(at), Tick{at}).Due(at))
}

// id is the id of a run: another one for each.
func (j *Job[Tx]) id(at time.Time) string { return "tick-" + at.Format(time.RFC3339) }

// Worker returns a worker of the job.
func (j *Job[Tx]) Worker(cfg task.WorkerConfig) (*task.Worker, error) {
	return task.NewWorker(j.db, cfg, j.kind)
}
