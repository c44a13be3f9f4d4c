package task

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/provider"
)

const (
	lookEvery    = 5 * time.Second  // for unknown kinds and suspect tasks
	requeueEvery = 30 * time.Second // tasks that were abandoned because their kind was unknown
	deleteEvery  = time.Minute
	deleteBatch  = 1000
)

// maintain looks for tasks that need attention every few seconds or minutes, until ctx ends.
func (e *engine[Tx]) maintain(ctx context.Context) {
	for ctx.Err() == nil {
		e.findSuspect(ctx)
		e.maintainOnce(ctx)
		pauses.Wait(ctx, lookEvery)
	}
}

// maintainOnce does the parts of it that are due.
func (e *engine[Tx]) maintainOnce(ctx context.Context) {
	e.findUnknown(ctx)
	if began := now(); began.Sub(e.requeued) >= requeueEvery {
		e.requeued = began
		e.requeueKnown(ctx)
	}
	if began := now(); began.Sub(e.deleted) >= deleteEvery {
		e.deleted = began
		e.deleteOld(ctx)
	}
}

// findUnknown looks for tasks of its domains whose kinds it does not define. They are claimed, and
// abandoned.
func (e *engine[Tx]) findUnknown(ctx context.Context) {
	var unknown []string
	seen := map[string]bool{}
	for kind := range e.kinds.handlers {
		domain, _, _ := strings.Cut(kind, "/")
		if seen[domain] {
			continue
		}
		seen[domain] = true
		limited, cancel := context.WithTimeout(ctx, claimLimit)
		stored, err := e.db.TaskKinds(limited, domain)
		cancel()
		if err != nil {
			e.failed(ctx, "kinds not listed", err)
			return
		}
		for _, kind := range stored {
			if _, ok := e.kinds.handlers[kind]; !ok {
				unknown = append(unknown, kind)
			}
		}
	}
	e.mu.Lock()
	e.unknown = unknown
	e.mu.Unlock()
}

// findSuspect looks for a suspect task. The loop claims it when no other task runs, and meanwhile
// claims no others. After it, others have their turn, and then the loop looks for the next one.
func (e *engine[Tx]) findSuspect(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, claimLimit)
	defer cancel()
	found, err := e.db.TaskCandidates(limited, e.query(true), 1)
	if err != nil {
		e.failed(ctx, "suspect tasks not listed", err)
		return
	}
	if len(found) > 0 {
		e.suspectFound()
	}
}

// suspects says when suspect tasks have their turn.
type suspects struct {
	waits bool      // one is due: no other tasks are claimed
	since time.Time // it waits
	rest  time.Time // until then none has a turn
}

func (e *engine[Tx]) suspectFound() {
	e.mu.Lock()
	if s, at := &e.suspect, now(); !s.waits && !at.Before(s.rest) {
		s.waits, s.since = true, at
	}
	e.mu.Unlock()
	e.soon.Send()
}

// suspectTaken records that a suspect task was claimed, or that there is none.
func (e *engine[Tx]) suspectTaken() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.suspect.waits = false
}

// suspectFirst reports whether a suspect task is to run next. It waits for the running tasks at most for
// one timeout: they may take longer. Then no suspect task has a turn for ten timeouts.
func (e *engine[Tx]) suspectFirst() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, at := &e.suspect, now()
	if s.waits && e.active > 0 && at.Sub(s.since) > e.cfg.Timeout {
		s.waits, s.rest = false, at.Add(10*e.cfg.Timeout)
	}
	return s.waits
}

// requeueKnown requeues tasks that were abandoned because their kind, or that of their group, was
// unknown: for example if the program that adds them was deployed first.
func (e *engine[Tx]) requeueKnown(ctx context.Context) {
	inspector, ok := e.db.(Inspector)
	if !ok {
		return
	}
	var filters []Filter
	for _, kind := range e.names {
		filters = append(filters, Filter{Kind: kind, Code: provider.CodeUnknown, Status: []Status{Abandoned}})
	}
	for kind := range e.kinds.groups {
		filters = append(filters, Filter{GroupKind: kind, Code: codeUnknownGroup, Status: []Status{Abandoned}})
	}
	for _, f := range filters {
		limited, cancel := context.WithTimeout(ctx, claimLimit)
		n, err := inspector.RequeueTasks(limited, f, Decision{By: e.cfg.Holder, Reason: "the kind is defined now"})
		cancel()
		if err != nil {
			e.failed(ctx, "tasks not requeued", err)
			return
		}
		if n > 0 {
			e.log.Info("tasks requeued", "tasks", n, "kind", f.Kind+f.GroupKind)
		}
	}
}

// deleteOld deletes tasks at the end of their retention. If there are many, one worker at a time deletes
// them.
func (e *engine[Tx]) deleteOld(ctx context.Context) {
	leases, _ := e.db.(provider.Leases)
	turn := sweep.Turn{Leases: leases, Name: "prune-tasks", Holder: e.cfg.Holder, Clock: now}
	err := sweep.Run(ctx, turn, func(ctx context.Context) (more bool, err error) {
		limited, cancel := context.WithTimeout(ctx, claimLimit)
		defer cancel()
		n, err := e.db.DeleteTasks(limited, e.cfg.Keep, deleteBatch)
		if n > 0 && e.cfg.Observer.Deleted != nil {
			e.cfg.Observer.Deleted(n)
		}
		return n == deleteBatch && ctx.Err() == nil, err
	})
	if err != nil {
		e.failed(ctx, "old tasks not deleted", err)
	}
}

// failed logs that maintenance has failed. It is tried again later.
func (e *engine[Tx]) failed(ctx context.Context, what string, err error) {
	if ctx.Err() == nil {
		e.log.Warn(what, e.attrs(err)...)
	}
}

// attrs are the attributes of an error: its class, and its text only with LogErrors.
func (e *engine[Tx]) attrs(err error, more ...any) []any {
	more = append(more, "class", errclass.Of(err))
	if e.cfg.LogErrors {
		more = append(more, "error", fmt.Sprint(err))
	}
	return more
}
