package feed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/provider"
)

const (
	reviveEvery = 10 * time.Second
	pruneEach   = 6   // prune once per this number of revivals
	pruneLimit  = 500 // rows of each kind per transaction
)

// Maintain revives parked messages and prunes old rows until ctx ends. Markers that are older than window are deleted.
func (a *All) Maintain(ctx context.Context, window time.Duration) {
	for n := 0; ctx.Err() == nil; n++ {
		a.revive(ctx)
		if n%pruneEach == 0 {
			a.prune(ctx, window)
			a.clearRetired(ctx)
		}
		model.Wait(ctx, reviveEvery)
	}
}

// revive makes messages due that other programs parked because they did not have the type or the
// handler, if this program has it.
func (a *All) revive(ctx context.Context) {
	for _, c := range a.feeding() {
		if err := c.parked.Revive(ctx, c.current.Load().Build); err != nil && ctx.Err() == nil {
			a.Host.Report(slog.LevelWarn, "parked messages of unknown types not revived", err, "projector", c.feeder.Projector.Name)
		}
	}
}

// prune deletes old rows in small transactions, with pauses so that the units are not slowed:
// resolved messages, and markers that are old or not needed behind a checkpoint.
func (a *All) prune(ctx context.Context, window time.Duration) {
	for _, c := range a.feeding() {
		p, b := c.feeder.Projector, c.current.Load().Build
		if p.Logged {
			c.feeder.pruneRows(ctx, b, oldMarkers, func(ctx context.Context) (int, error) {
				return a.Host.Store.PruneApplied(ctx, b, p.Marked, pruneLimit)
			})
		}
		if c == c.feeder.main { // it prunes by age
			c.feeder.pruneRows(ctx, b, oldMarkers, func(ctx context.Context) (int, error) {
				return a.Host.Store.Prune(ctx, p.Name, p.Marked, window, pruneLimit)
			})
		}
	}
}

const oldMarkers = "old markers"

// pruneRows calls prune until it deletes nothing. Of the runners of a projector, one at a time does
// that, so that their pauses add up to the intended ones. what is the word for the rows in the log.
func (f *Feeder) pruneRows(ctx context.Context, b provider.Build, what string, prune func(context.Context) (int, error)) {
	h := f.Host
	turn := sweep.Turn{Leases: h.Store, Name: "prune-markers/" + b.String(), Holder: h.ID, Clock: h.Clock}
	err := sweep.Run(ctx, turn, func(ctx context.Context) (bool, error) {
		began := h.Clock()
		crash.Point("prune: before")
		n, err := prune(ctx)
		crash.Point("prune: after")
		if n > 0 && h.Observer.Pruned != nil {
			h.Observer.Pruned(n)
		}
		if n > 0 {
			model.Wait(ctx, 4*h.Clock().Sub(began))
		}
		return n > 0 && ctx.Err() == nil, err
	})
	if err != nil && ctx.Err() == nil {
		h.Report(slog.LevelWarn, what+" not deleted", err, "projector", f.Projector.Name, "again_in", pruneEach*reviveEvery)
	}
}

// clearRetired deletes the rows and the tables of retired generations.
func (a *All) clearRetired(ctx context.Context) {
	for _, f := range a.Feeders {
		if !f.Me.Reads {
			continue
		}
		all, err := a.Host.Generations(ctx, f.Projector.Name)
		if err != nil {
			return
		}
		for _, g := range all {
			asked := generation.Find(all, func(of *generation.Row) bool { return of.Asks(g.Generation) }) != nil
			if g.State == provider.GenerationRetired && !g.Cleared && !asked {
				what := fmt.Sprintf("rows and tables (%s) of generation %d", strings.Join(g.Tables, ", "), g.Generation)
				f.pruneRows(ctx, f.Current().Build, what, func(ctx context.Context) (int, error) {
					n, _, err := rebuild.Clear(ctx, f.Host, g, g.Handlers)
					return n, err
				})
			}
		}
	}
}

// ErrFinished: no parked message is due.
var ErrFinished = errors.New("nothing is due")

// Finish dispatches due messages until nothing is due, and returns ErrFinished, or model.ErrNoDecoder.
func (a *All) Finish(ctx context.Context) error {
	for a.revive(ctx); ctx.Err() == nil; model.Wait(ctx, model.Soon) {
		some, err := a.DispatchDue(ctx)
		switch {
		case err != nil:
			return err
		case !some && a.Undecoded:
			return model.ErrNoDecoder
		case !some:
			return ErrFinished
		}
	}
	return nil
}
