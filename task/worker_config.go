package task

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/provider"
)

// WorkerConfig configures a Worker. The zero value is the default.
type WorkerConfig struct {
	// Concurrency is the number of tasks that run at the same time. No more are claimed, except while
	// the ends of done tasks are recorded: then at most as many others. Zero means 16.
	Concurrency int
	// Lease is how long a claim protects a task, at least 10ms. It is renewed while the task runs.
	// The tasks of a worker that crashed wait until it ends. Zero means 1m.
	Lease time.Duration
	// Timeout is how long each step may take, and the handler between two steps. Then the context of
	// the handler is canceled, and the task has failed. That context has no deadline: context.Cause
	// returns why it was canceled. The context of a Step has a deadline. Zero means 30s.
	Timeout time.Duration
	// Backoff is the delay after a failure. Attempts are those since the task last made progress.
	// Zero means 30s doubling to 1h, 8 attempts.
	Backoff claim.Backoff
	// Poll is the longest pause of an idle worker. Zero means 1s.
	Poll time.Duration
	// Drain is how long Run may continue after its ctx ends. Zero means 10s.
	Drain time.Duration
	// Keep is how long ended tasks are kept. The worker deletes older ones.
	Keep Retention
	// Audit gets a record of each task before it becomes done, undone or abandoned, and of each group
	// before it is complete. Nil means none
	// besides the trail, which the database keeps (Inspector.TaskTrail).
	Audit AuditSink
	// Holder is the worker's name in claims, trails and logs. Empty means host and process.
	Holder string

	Observer  WorkerObserver // receives what the worker does
	Logger    *slog.Logger   // nil means slog.Default()
	LogErrors bool           // also log the texts of errors, which may contain user data
}

// AuditSink stores records of how tasks and groups end, in a system of the user's.
type AuditSink interface {
	// Append stores a record. If it returns an error, the task does not end: it is released for the
	// length of a lease, and no attempt is counted. So no task ends without its record. The result of
	// a handler of Define is kept meanwhile: the handler does not run again.
	//   - A record may be passed again, with the same ID: then store it once.
	//   - A record may be followed by another one of its task, if a crash kept the task from ending.
	//   - For tasks of DefineTx, and for the end of a group (provider.WhatGroupDone), Append is called in
	//     the transaction, after the handler or the completion, which then may run again. So it must
	//     not write to the same SQLite or memory database, which has one writer, and it needs
	//     connections of its own to a PostgreSQL database.
	Append(ctx context.Context, r Record) error
}

// WorkerObserver has functions that a worker calls, for metrics. A nil function is not called and
// costs nothing. Several goroutines call them at the same time: they must be quick, and must not
// change their arguments.
type WorkerObserver struct {
	// Claimed: a claim has ended; it may have no tasks. A task has waited from NextAt, before the
	// claim.
	Claimed func(tasks []Task, took time.Duration, err error)
	// Step: a step has run. A step whose result was recorded before is not reported.
	Step func(kind, step string, took time.Duration, err error)
	// Ended: a run has ended, and its task has this status now; code is that of a failure.
	Ended func(kind string, to Status, code string, took time.Duration)
	// Changed: a statement with this number of changes has ended; it may have waited for locks.
	// refused is the number of those that changed nothing.
	Changed func(changes, refused int, took time.Duration, err error)
	// Fenced: a change came too late, because another worker had taken the task over.
	Fenced func(kind string)
	// Counted: a done task was counted in its group. took is mostly the wait for the group's row.
	Counted func(groupKind string, took time.Duration)
	// Deleted: this number of tasks was deleted at the end of their retention.
	Deleted func(tasks int)
}

func (c *WorkerConfig) validate() (err error) {
	c.Lease, c.Timeout = cmp.Or(c.Lease, time.Minute), cmp.Or(c.Timeout, 30*time.Second)
	c.Poll, c.Drain = cmp.Or(c.Poll, time.Second), cmp.Or(c.Drain, 10*time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 16)
	if c.Concurrency < 0 || c.Timeout < 0 || c.Poll < 0 || c.Drain < 0 {
		return fmt.Errorf("concurrency %d, timeout %s, poll %s, drain %s: must not be negative", c.Concurrency, c.Timeout, c.Poll, c.Drain)
	}
	if c.Lease < 10*time.Millisecond {
		return fmt.Errorf("lease %s: must be at least 10ms", c.Lease)
	}
	c.Holder = cmp.Or(c.Holder, presence.Process())
	if err := provider.CheckText("holder", c.Holder, provider.MaxIDBytes); err != nil {
		return err
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Keep, err = c.Keep.WithDefaults(); err != nil {
		return err
	}
	c.Backoff, err = c.Backoff.WithDefaults()
	return err
}
