package projector

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
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
				r.log(slog.LevelWarn, "parked messages of types that were unknown were not looked up", err, "projector", p.name)
			}
		}
	}
}

func (p *projection) revive(ctx context.Context, code string) error {
	f := ParkedFilter{Projector: p.name, Code: code, Types: p.types.Names(), States: []ParkedState{StateStuck}, Limit: 100}
	for {
		rows, err := p.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		var known []int64
		for _, row := range rows {
			f.After = row.Seq
			if _, ok := p.taking(row.Type, row.Handlers); !ok {
				continue
			}
			// An older program may try it first, but this one may not know the version of its type either. So it is revived when
			// it is seen for the first time, the second, the fourth and so on.
			p.revived[row.Seq]++
			if n := p.revived[row.Seq]; n&(n-1) == 0 {
				known = append(known, row.Seq)
			}
		}
		if len(known) == 0 {
			continue
		}
		if _, err := p.runner.store.Decide(ctx, ParkedFilter{Projector: p.name, Seqs: known}, StateWaiting, Decision{}); err != nil {
			return err
		}
		p.runner.scanNow()
	}
}

// prune deletes what is old enough, in small transactions, with pauses that leave the database to the units.
func (r *Runner) prune(ctx context.Context) {
	for _, p := range r.projections {
		for n, err := 1, error(nil); n > 0 && err == nil && ctx.Err() == nil; {
			began := r.cfg.Clock()
			crash.Point("prune: before")
			n, err = r.store.Prune(ctx, p.name, p.marked, r.cfg.Markers.Window, pruneLimit)
			crash.Point("prune: after")
			if err != nil && ctx.Err() == nil {
				r.log(slog.LevelWarn, "pruning failed, it is tried again", err, "projector", p.name, "again_in", pruneEach*reviveEvery)
			}
			if n > 0 && r.cfg.Observer.Pruned != nil {
				r.cfg.Observer.Pruned(n)
			}
			if n > 0 {
				wait(ctx, 4*r.cfg.Clock().Sub(began))
			}
		}
	}
}

var errFinished = errors.New("nothing is due")

// finish gives what is due to the workers until nothing is, and returns errFinished.
func (r *Runner) finish(ctx context.Context) error {
	for r.revive(ctx); ctx.Err() == nil; wait(ctx, scanPause) {
		if some, err := r.giveDue(ctx); err != nil || !some {
			return cmp.Or(err, errFinished)
		}
	}
	return nil
}
