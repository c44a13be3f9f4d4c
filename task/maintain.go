package task

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/provider"
)

const (
	lookEvery    = 5 * time.Second  // for unknown kinds and suspect tasks
	requeueEvery = 30 * time.Second // tasks that were abandoned because their kind was unknown
	deleteEvery  = time.Minute
	deleteBatch  = 1000
)

// maintain does, until ctx ends, what is needed every few seconds or minutes.
func (e *engine[Tx]) maintain(ctx context.Context) {
	var requeued, deleted time.Time
	for ctx.Err() == nil {
		e.findUnknown(ctx)
		e.findSuspect(ctx)
		if began := now(); began.Sub(requeued) >= requeueEvery {
			requeued = began
			e.requeueKnown(ctx)
		}
		if began := now(); began.Sub(deleted) >= deleteEvery {
			deleted = began
			e.deleteOld(ctx)
		}
		e.sleep(ctx, lookEvery, nil, nil)
	}
}

// statement returns a context for a statement of maintenance.
func (e *engine[Tx]) statement(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, claimLimit)
}

// findUnknown looks for tasks of its domains whose kinds it does not define. They are claimed, and
// abandoned.
func (e *engine[Tx]) findUnknown(ctx context.Context) {
	if e.cfg.Kinds != nil {
		return
	}
	var unknown []string
	seen := map[string]bool{}
	for kind := range e.kinds.handlers {
		domain, _, _ := strings.Cut(kind, "/")
		if seen[domain] {
			continue
		}
		seen[domain] = true
		limited, cancel := e.statement(ctx)
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
	limited, cancel := e.statement(ctx)
	defer cancel()
	e.mu.Lock()
	q := provider.TaskQuery{Kinds: append([]string(nil), append(e.names, e.unknown...)...), Attempts: e.cfg.Backoff.Attempts, Alone: true}
	e.mu.Unlock()
	found, err := e.db.TaskCandidates(limited, q, 1)
	if err != nil {
		e.failed(ctx, "suspect tasks not listed", err)
		return
	}
	if len(found) > 0 {
		e.setSuspect(true)
	}
}

func (e *engine[Tx]) suspectWaits() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiting
}

// setSuspect sets whether a suspect task waits.
func (e *engine[Tx]) setSuspect(waits bool) {
	e.mu.Lock()
	e.waiting = waits
	e.mu.Unlock()
	if waits {
		signal(e.soon)
	}
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
		limited, cancel := e.statement(ctx)
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

// deleteOld deletes tasks at the end of their retention.
func (e *engine[Tx]) deleteOld(ctx context.Context) {
	for n := deleteBatch; n == deleteBatch && ctx.Err() == nil; {
		limited, cancel := e.statement(ctx)
		var err error
		n, err = e.db.DeleteTasks(limited, e.cfg.Keep, deleteBatch)
		cancel()
		if err != nil {
			e.failed(ctx, "tasks not deleted", err)
			return
		}
		if n > 0 && e.cfg.Observer.Deleted != nil {
			e.cfg.Observer.Deleted(n)
		}
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
