package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/provider"
)

const (
	reviveEvery = 10 * time.Second
	pruneEach   = 6   // prune once per this number of revivals
	pruneLimit  = 500 // rows of each kind per transaction
)

// maintain revives parked messages and prunes old rows until ctx ends.
func (r *Runner) maintain(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		r.revive(ctx)
		if n%pruneEach == 0 {
			r.prune(ctx)
			r.clearRetired(ctx)
		}
		wait(ctx, reviveEvery)
	}
}

// revive makes messages due that other programs parked because they did not have the type or the
// handler, if this program has it.
func (r *Runner) revive(ctx context.Context) {
	for _, p := range r.feeding() {
		for _, code := range []string{codeUnregistered, codeNoHandler} {
			if err := p.revive(ctx, code); err != nil && ctx.Err() == nil {
				r.report(slog.LevelWarn, "parked messages of unknown types not revived", err, "projector", p.name)
			}
		}
	}
}

func (p *projection) revive(ctx context.Context, code string) error {
	f := ParkedFilter{
		Projector: p.name, Generation: p.build().Generation, Code: code, Types: p.types.Names(), States: []ParkedState{StateStuck}, Limit: 100,
	}
	for {
		rows, err := p.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		var known []int64
		for _, row := range rows {
			f.After = row.Seq
			if _, ok := p.handlersFor(row.Type, row.Handlers); !ok {
				continue
			}
			// An older program may try the message first, or this program may not have its schema
			// version. So it is revived when it is seen for the first time, the second, the
			// fourth and so on.
			p.revived[row.Seq]++
			if n := p.revived[row.Seq]; n&(n-1) == 0 {
				known = append(known, row.Seq)
			}
		}
		if len(known) == 0 {
			continue
		}
		due := ParkedFilter{Projector: p.name, Seqs: known}
		if _, err := p.runner.store.Decide(ctx, due, StateWaiting, Decision{}); err != nil {
			return err
		}
		p.runner.scanNow()
	}
}

// prune deletes old rows in small transactions, with pauses so that the units are not slowed:
// resolved messages, and markers that are old or not needed behind a checkpoint.
func (r *Runner) prune(ctx context.Context) {
	for _, p := range r.feeding() {
		if p.reader != nil {
			r.pruneRows(ctx, p, oldMarkers, func(ctx context.Context) (int, error) {
				return r.store.PruneApplied(ctx, p.build(), p.marked, pruneLimit)
			})
		}
		if p != r.byName[p.name] {
			continue // the main one prunes by age
		}
		r.pruneRows(ctx, p, oldMarkers, func(ctx context.Context) (int, error) {
			return r.store.Prune(ctx, p.name, p.marked, r.cfg.Markers.Window, pruneLimit)
		})
	}
}

const oldMarkers = "old markers"

// pruneRows calls prune until it deletes nothing. Of the runners of a projector, one at a time does
// that, so that their pauses add up to the intended ones. what is the word for the rows in the log.
func (r *Runner) pruneRows(ctx context.Context, p *projection, what string, prune func(context.Context) (int, error)) {
	turn := sweep.Turn{Leases: r.store, Name: "prune-markers/" + p.build().String(), Holder: r.id, Clock: r.cfg.Clock}
	err := sweep.Run(ctx, turn, func(ctx context.Context) (bool, error) {
		began := r.cfg.Clock()
		crash.Point("prune: before")
		n, err := prune(ctx)
		crash.Point("prune: after")
		if n > 0 && r.cfg.Observer.Pruned != nil {
			r.cfg.Observer.Pruned(n)
		}
		if n > 0 {
			wait(ctx, 4*r.cfg.Clock().Sub(began))
		}
		return n > 0 && ctx.Err() == nil, err
	})
	if err != nil && ctx.Err() == nil {
		r.report(slog.LevelWarn, what+" not deleted", err, "projector", p.name, "again_in", pruneEach*reviveEvery)
	}
}

// clearRetired deletes the rows and the tables of retired generations.
func (r *Runner) clearRetired(ctx context.Context) {
	for _, p := range r.projections {
		if p.reader == nil {
			continue
		}
		all, err := r.generationsOf(ctx, p.name)
		if err != nil {
			return
		}
		for _, g := range all {
			isSource := find(all, func(of *generation) bool { return of.replays(g.Generation) }) != nil
			if g.state == provider.GenerationRetired && !g.Cleared && !isSource {
				p.clear(ctx, g)
			}
		}
	}
}

func (p *projection) clear(ctx context.Context, g *generation) {
	r := p.runner
	isDone := false
	what := fmt.Sprintf("rows and tables (%s) of generation %d", strings.Join(g.Tables, ", "), g.Generation)
	r.pruneRows(ctx, p, what, func(ctx context.Context) (int, error) {
		n, err := r.store.ClearGeneration(ctx, g.Build, g.Handlers, g.Tables, pruneLimit)
		isDone = err == nil && n == 0
		return n, err
	})
	if isDone {
		if _, err := change(ctx, r.store, g, func(g *generation) { g.Cleared = true }); err != nil && ctx.Err() == nil {
			r.report(slog.LevelWarn, "generation not changed", err, "projector", p.name)
		}
	}
}

var errFinished = errors.New("nothing is due")

// finish dispatches due messages until nothing is due, and returns errFinished, or errNoDecoder.
func (r *Runner) finish(ctx context.Context) error {
	for r.revive(ctx); ctx.Err() == nil; wait(ctx, scanPause) {
		some, err := r.dispatchDue(ctx)
		switch {
		case err != nil:
			return err
		case !some && r.undecoded.Load():
			return errNoDecoder
		case !some:
			return errFinished
		}
	}
	return nil
}
