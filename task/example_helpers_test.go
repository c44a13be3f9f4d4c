package task_test

import (
	"context"
	"io"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func open() *memory.DB { return must(memory.New(nil)) }

// handClock is a clock that an example advances.
type handClock struct {
	mu sync.Mutex
	at time.Time
}

func (c *handClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *handClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

func openAt(at time.Time) (*memory.DB, *handClock) {
	c := &handClock{at: at}
	return must(memory.New(&memory.Config{Clock: c.now})), c
}

func transact(db *memory.DB, fn func(ctx context.Context, tx *memory.Model) error) {
	must(0, db.Transact(context.Background(), fn))
}

func enqueue(db *memory.DB, drafts ...task.Draft) {
	transact(db, func(ctx context.Context, tx *memory.Model) error { return db.TasksIn(tx).Enqueue(ctx, drafts...) })
}

// work runs the tasks that are due, one after another. A service calls Worker.Run.
func work(db *memory.DB, kinds ...task.Kind[*memory.Model]) {
	w := must(task.NewWorker(db, task.WorkerConfig{Concurrency: 1, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}, kinds...))
	for must(w.RunOnce(context.Background())) > 0 {
	}
}

// tasks returns all tasks in order of id.
func tasks(db *memory.DB) iter.Seq[task.Task] {
	return slices.Values(must(db.Tasks(context.Background(), task.Filter{})))
}
