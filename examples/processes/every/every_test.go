package every_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/every"
)

func TestEveryHour(t *testing.T) {
	t.Parallel()
	midnight := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	hours := atomic.Int64{} // of the clock, since midnight
	clock := func() time.Time { return midnight.Add(time.Duration(hours.Load()) * time.Hour) }
	db, err := memory.New(&memory.Config{Clock: clock})
	check(t, err)
	broken := false // at 5:00
	var ran []int
	job := every.New(db, "stock/count", time.Hour, func(_ context.Context, _ *memory.Model, at time.Time) error {
		if broken && at.Hour() == 5 {
			return task.Permanent(errors.New("a shelf is closed"))
		}
		ran = append(ran, at.Hour())
		return nil
	})
	start := func() {
		t.Helper()
		check(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error { return job.Start(ctx, tx, clock()) }))
	}
	worker, err := job.Worker(task.WorkerConfig{})
	check(t, err)
	at := func(hour int64, want ...int) {
		t.Helper()
		hours.Store(hour)
		for n := 1; n > 0; {
			n, err = worker.RunOnce(t.Context())
			check(t, err)
		}
		if !slices.Equal(ran, want) {
			t.Errorf("at %d:00 the runs are %v, want %v", hour, ran, want)
		}
	}
	start()
	at(0, 0)
	start() // again: nothing is added
	at(0, 0)
	at(1, 0, 1)
	at(3, 0, 1, 2, 3) // no worker ran at 2:00
	broken = true
	at(7, 0, 1, 2, 3, 4) // the run of 5:00 is abandoned, and the next one does not exist
	broken = false
	n, err := db.RequeueTasks(t.Context(), task.Filter{IDs: []string{"tick-2026-01-01T05:00:00Z"}},
		task.Decision{By: "ann", Reason: "the shelf is open"})
	if n != 1 || err != nil {
		t.Errorf("requeued %d, %v", n, err)
	}
	at(7, 0, 1, 2, 3, 4, 5, 6, 7)
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
