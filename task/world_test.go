package task_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

type (
	tx  = *memory.Model
	run = *task.Run[tx]
)

// world is a store with workers, in virtual time.
type world struct {
	*testing.T
	db  *memory.DB
	log *lockedBuffer

	mu    sync.Mutex
	calls []string // what the other systems were asked, in order
}

type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// inWorld runs f in virtual time.
func inWorld(t *testing.T, f func(w *world)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		f(&world{T: t, db: db, log: &lockedBuffer{}})
	})
}

func (w *world) call(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, what)
}

func (w *world) called() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string{}, w.calls...)
}

// worker returns a worker with short defaults.
func (w *world) worker(cfg task.WorkerConfig, kinds ...task.Kind[tx]) *task.Worker {
	w.Helper()
	return w.workerOf(w.db, cfg, kinds...)
}

func (w *world) workerOf(db provider.TaskProvider[tx], cfg task.WorkerConfig, kinds ...task.Kind[tx]) *task.Worker {
	w.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(w.log, nil))
	if cfg.Backoff == (claim.Backoff{}) {
		cfg.Backoff = claim.Backoff{Base: time.Second, Attempts: 3}
	}
	worker, err := task.NewWorker(db, cfg, kinds...)
	require.NoError(w, err)
	return worker
}

// start runs a worker until stop is called or the test ends.
func (w *world) start(worker *task.Worker) (stop func() error) {
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan error, 1)
	go func() { done <- worker.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	w.Cleanup(func() { _ = stop() })
	return stop
}

// in runs f in a transaction.
func (w *world) in(f func(ctx context.Context, tx task.Tx)) {
	w.Helper()
	require.NoError(w, w.db.Transact(w.Context(), func(ctx context.Context, tx tx) error {
		f(ctx, w.db.TasksIn(tx))
		return nil
	}))
}

func (w *world) enqueue(drafts ...task.Draft) {
	w.Helper()
	w.in(func(ctx context.Context, tx task.Tx) { require.NoError(w, tx.Enqueue(ctx, drafts...)) })
}

func (w *world) answer(id, name, message, out string) (got task.Outcome) {
	w.Helper()
	w.in(func(ctx context.Context, tx task.Tx) {
		var err error
		got, err = tx.Answer(ctx, task.Answer{Task: id, Name: name, ID: message, Out: json.RawMessage(out)})
		require.NoError(w, err)
	})
	return got
}

func (w *world) task(id string) task.Task {
	w.Helper()
	all, err := w.db.Tasks(w.Context(), task.Filter{IDs: []string{id}})
	require.NoError(w, err)
	require.Len(w, all, 1, "task %s", id)
	return all[0]
}

// becomes waits until a task has a status.
func (w *world) becomes(id string, status task.Status) task.Task {
	w.Helper()
	var got task.Task
	for pause := 20 * time.Millisecond; pause < 30*24*time.Hour; pause += pause / 10 {
		if got = w.task(id); got.Status == status {
			return got
		}
		time.Sleep(pause)
	}
	require.Equal(w, status, got.Status, "%+v\n%s", got, w.log)
	return got
}

var decision = task.Decision{By: "ann", Reason: "a test"}

// step returns a step that records its calls.
func (w *world) step(ctx context.Context, r run, name string) (string, error) {
	return task.Step(ctx, r, name, func(_ context.Context, key string) (string, error) {
		w.call(key)
		return "result of " + name, nil
	}, w.undo)
}

func (w *world) undo(_ context.Context, key string, done *string) error {
	if done == nil {
		w.call("undo " + key + " in doubt")
	} else {
		w.call("undo " + key)
	}
	return nil
}

// failing is a store whose methods fail as long as broken returns an error.
type failing struct {
	*memory.DB
	broken func(method string) error
}

func (f *failing) ChangeTasks(ctx context.Context, changes []provider.TaskChange) ([]provider.TaskChanged, error) {
	if err := f.broken("change"); err != nil {
		return nil, err
	}
	return f.DB.ChangeTasks(ctx, changes)
}

func (f *failing) RenewTasks(ctx context.Context, tasks []provider.Task, lease time.Duration) ([]string, error) {
	if err := f.broken("renew"); err != nil {
		return nil, err
	}
	return f.DB.RenewTasks(ctx, tasks, lease)
}

func (f *failing) ClaimTasks(ctx context.Context, q provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	if err := f.broken("claim"); err != nil {
		return nil, err
	}
	return f.DB.ClaimTasks(ctx, q, t)
}

func (f *failing) Do(ctx context.Context, u provider.Unit, run func(context.Context, tx, provider.Found) (provider.Closing, error)) error {
	if err := f.broken("unit"); err != nil {
		return err
	}
	return f.DB.Do(ctx, u, run)
}

// take claims a due task as another worker does, for a lease.
func (w *world) take(lease time.Duration, kinds ...string) []task.Task {
	w.Helper()
	got, err := provider.ClaimTasks(w.Context(), w.db, provider.TaskQuery{Kinds: kinds, Attempts: 3}, claim.Terms{Holder: "other", Lease: lease})
	require.NoError(w, err)
	return got
}
