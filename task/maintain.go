package task

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/provider"
)

const (
	lookEvery   = 5 * time.Second // for suspect tasks
	sayEvery    = time.Minute     // which kinds lack a worker
	deleteEvery = time.Minute
	deleteBatch = 1000
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
	if began := now(); began.Sub(e.said) >= sayEvery {
		e.said = began
		e.logUndefinedKinds(ctx)
	}
	if began := now(); began.Sub(e.deleted) >= deleteEvery {
		e.deleted = began
		e.deleteOld(ctx)
	}
}

// reportSelf returns what the worker reports about itself.
func (e *engine[Tx]) reportSelf() provider.ServiceReport {
	kinds := slices.AppendSeq(slices.Clone(e.names), maps.Keys(e.kinds.groups))
	slices.Sort(kinds)
	return provider.ServiceReport{Kind: "worker", Holder: e.cfg.Holder, Kinds: slices.Compact(kinds)}
}

// workers returns the reports of services that are alive. There are none if the store does not know them.
func (e *engine[Tx]) workers(ctx context.Context) ([]provider.ServiceReport, error) {
	o := provider.OperationsOf(e.db)
	if o == nil {
		return nil, nil
	}
	return o.Services(ctx)
}

// isDefined reports whether one of these services defines all these kinds.
func isDefined(services []provider.ServiceReport, kinds ...string) bool {
	return slices.ContainsFunc(services, func(r provider.ServiceReport) bool { return r.Defines(kinds...) })
}

// logUndefinedKinds logs the kinds of tasks and of groups that wait for a worker that defines them.
func (e *engine[Tx]) logUndefinedKinds(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, claimLimit)
	defer cancel()
	due, err := e.undefined(limited)
	if err != nil {
		e.failed(ctx, "kinds without a worker not listed", err)
	}
	for _, kind := range slices.Sorted(maps.Keys(due)) {
		e.log.Warn("tasks are due, and no worker that is alive defines their kind", "kind", kind, "since", due[kind])
	}
	e.mu.Lock()
	groups := maps.Clone(e.lacking)
	clear(e.lacking)
	e.mu.Unlock()
	for _, kind := range slices.Sorted(maps.Keys(groups)) {
		e.log.Warn("a group waits for a worker that defines its kind", "kind", kind, "since", groups[kind])
	}
}

// reportLacking warns of kinds of open tasks that neither this worker defines nor one that is alive: it may be older than the
// one that ran before.
func (e *engine[Tx]) reportLacking(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, claimLimit)
	defer cancel()
	kinds, err := e.undefinedKinds(limited)
	if err != nil {
		e.failed(ctx, "kinds without a worker not listed", err)
	}
	if len(kinds) > 0 {
		e.log.Warn("there are tasks of kinds that no worker defines so far: this program may be older than the one before. They wait for one that does", "lacks", kinds)
	}
}

// undefinedKinds returns the kinds of its domains that have open tasks, and that no worker that is alive defines. There are none
// if the store does not know the services.
func (e *engine[Tx]) undefinedKinds(ctx context.Context) (kinds []string, err error) {
	if provider.OperationsOf(e.db) == nil {
		return nil, nil
	}
	workers, err := e.workers(ctx)
	if err != nil {
		return nil, err
	}
	for _, domain := range domains(e.names) {
		stored, err := e.db.TaskKinds(ctx, domain)
		if err != nil {
			return nil, err
		}
		kinds = append(kinds, slices.DeleteFunc(stored, func(kind string) bool {
			return slices.Contains(e.names, kind) || isDefined(workers, kind)
		})...)
	}
	return kinds, nil
}

// undefined returns the undefinedKinds that have tasks that are due, and since when.
func (e *engine[Tx]) undefined(ctx context.Context) (map[string]time.Time, error) {
	kinds, err := e.undefinedKinds(ctx)
	if err != nil || len(kinds) == 0 {
		return nil, err
	}
	due := map[string]time.Time{}
	for _, alone := range []bool{false, true} {
		first, err := e.db.TaskCandidates(ctx, provider.TaskQuery{Kinds: kinds, Alone: alone}, len(kinds))
		if err != nil {
			return nil, err
		}
		for _, t := range first {
			if since, ok := due[t.Kind]; !ok || t.NextAt.Before(since) {
				due[t.Kind] = t.NextAt
			}
		}
	}
	return due, nil
}

// domains returns the parts of kinds before the "/".
func domains(kinds []string) (all []string) {
	for _, kind := range kinds {
		domain, _, _ := strings.Cut(kind, "/")
		all = append(all, domain)
	}
	return slices.Compact(all)
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
