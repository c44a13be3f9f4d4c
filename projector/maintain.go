package projector

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

const (
	reviveEvery = 10 * time.Second
	pruneEach   = 6   // revivals
	pruneLimit  = 500 // rows of each kind in a transaction
)

// maintain does until ctx ends what a runner does besides applying messages.
func (r *Runner) maintain(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		r.revive(ctx)
		if n%pruneEach == 0 {
			r.prune(ctx)
		}
		wait(ctx, reviveEvery)
	}
}

// revive makes due what other programs parked because they did not know its type, or its handler, and this one does.
func (r *Runner) revive(ctx context.Context) {
	for _, p := range r.projections {
		for _, code := range []string{codeUnregistered, codeNoHandler} {
			if err := p.revive(ctx, code); err != nil && ctx.Err() == nil {
				r.cfg.Logger.Warn("parked messages of types that were unknown were not looked up", "projector", p.name,
					"class", provider.ClassOf(err).String(), "code", provider.CodeOf(err), "err", err)
			}
		}
	}
}

func (p *projection) revive(ctx context.Context, code string) error {
	f := ParkedFilter{Projector: p.name, Code: code, Types: p.types.Names(), States: []ParkedState{StateStuck}, Limit: 100}
	for {
		rows, err := p.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		var known []int64
		for _, row := range rows {
			f.After = row.Seq
			if _, ok := p.taking(row.Type, row.Handlers); ok && p.mayRevive(row.Seq) {
				known = append(known, row.Seq)
			}
		}
		if len(known) == 0 {
			continue
		}
		if _, err := p.store.Decide(ctx, ParkedFilter{Projector: p.name, Seqs: known}, StateWaiting, Decision{}); err != nil {
			return err
		}
		p.runner.look()
	}
}

// revival is when a message may be revived again, and how long that is after the last time.
type revival struct {
	next  time.Time
	pause time.Duration
}

// mayRevive says whether it is time to revive a message. It is so less and less often: an older program may try the
// message first, but this one may not know the version of its type either.
func (p *projection) mayRevive(seq int64) bool {
	now, last := p.runner.cfg.Clock(), p.revived[seq]
	if now.Before(last.next) {
		return false
	}
	pause := max(2*last.pause, reviveEvery)
	p.revived[seq] = revival{now.Add(pause), pause}
	return true
}

// prune deletes what is old enough, in small transactions, with pauses that leave the database to the units.
func (r *Runner) prune(ctx context.Context) {
	for _, p := range r.projections {
		var names []string
		if p.marks {
			for _, h := range p.handlers {
				names = append(append(names, h.Name), h.Was...)
			}
		}
		n, err := r.pruneAll(ctx, p.name, slices.Compact(names))
		if err != nil && ctx.Err() == nil {
			r.cfg.Logger.Warn("pruning failed, it is tried again", "projector", p.name, "again_in", pruneEach*reviveEvery,
				"class", provider.ClassOf(err).String(), "code", provider.CodeOf(err), "err", err)
		}
		if n > 0 && r.cfg.Observer.Pruned != nil {
			r.cfg.Observer.Pruned(n)
		}
	}
}

// pruneAll prunes until nothing is left, and pauses four times as long as each transaction took.
func (r *Runner) pruneAll(ctx context.Context, projector string, handlers []string) (all int, err error) {
	for ctx.Err() == nil {
		began := r.cfg.Clock()
		crash.Point("prune: before")
		n, err := r.store.Prune(ctx, projector, handlers, r.cfg.Markers.Window, pruneLimit)
		crash.Point("prune: after")
		all += n
		if err != nil || n == 0 {
			return all, err
		}
		wait(ctx, 4*r.cfg.Clock().Sub(began))
	}
	return all, nil
}

var errFinished = errors.New("nothing is due")

// finish gives what is due to the workers until nothing is, and returns errFinished.
func (r *Runner) finish(ctx context.Context) error {
	r.revive(ctx)
	for ctx.Err() == nil {
		idle := r.idle()
		n, err := r.giveDue(ctx)
		if err != nil {
			return err
		}
		if idle && n == 0 {
			return errFinished
		}
		wait(ctx, 5*time.Millisecond)
	}
	return nil
}

// idle says whether no worker has parked messages.
func (r *Runner) idle() bool {
	for _, p := range r.projections {
		for _, w := range p.workers {
			if w.busy.Load() {
				return false
			}
		}
	}
	return true
}

func isHalted(err error) bool { return errors.Is(err, ErrHalted) }
