package feed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/provider"
)

// All are the feeders of the projectors of a runner.
type All struct {
	Host    *model.Host
	Feeders []*Feeder
	needs   needs
	left    int // lanes of the last scan that another program applies
}

// Pauses between two looks at the generations: while a rebuild is going on, and otherwise.
const (
	followFast = model.LookAgain
	followSlow = 2 * time.Second
)

// Choose chooses the generation of each projector, at the start. It waits for a store that does not
// reply.
func (a *All) Choose(ctx context.Context) error {
	for tries := 1; ; tries++ {
		err := a.ChooseOnce(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, model.ErrNoRebuild) || errors.Is(err, model.ErrGeneration) || errors.Is(err, generation.ErrForgotten) || rebuild.IsFinal(err) {
			return err
		}
		delay, _ := a.Host.Retry.Delay(tries)
		a.Host.Report(slog.LevelWarn, "generations not read", err, "again_in", delay)
		model.Wait(ctx, delay)
	}
}

// ChooseOnce is Choose without another try.
func (a *All) ChooseOnce(ctx context.Context) error {
	for _, f := range a.Feeders {
		if err := f.Choose(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Begin makes sure that each projector that reads the log has a checkpoint, before anything
// is applied: deliveries of a new projector are left to its reader. It waits for a store that does
// not reply.
func (a *All) Begin(ctx context.Context) error {
	for _, f := range a.Feeders {
		if err := f.checkUnlogged(ctx); err != nil {
			return err
		}
		for tries := 1; f.main.post != nil; tries++ {
			_, err := f.main.post.Begin(ctx, f.Current())
			if errors.Is(err, provider.ErrEnded) && !f.Kept { // it was retired since it was chosen
				if err = f.Choose(ctx); err == nil {
					continue
				}
			}
			if err == nil || ctx.Err() != nil {
				break
			}
			for _, final := range []error{
				generation.ErrForgotten, model.ErrNoRebuild, provider.ErrEnded, model.ErrLogChanged, eventstore.ErrUnsafeLog, eventstore.ErrInvalid, follow.ErrPruned,
			} {
				if errors.Is(err, final) {
					return fmt.Errorf("projector %s: %w", f.Projector.Name, err)
				}
			}
			delay, _ := a.Host.Retry.Delay(tries)
			a.Host.Report(slog.LevelWarn, "checkpoint not read", err, "projector", f.Projector.Name, "again_in", delay)
			model.Wait(ctx, delay)
		}
	}
	return nil
}

// checkUnlogged returns an error if the projector reads no log any more, and has markers only of the events behind its
// checkpoint.
func (f *Feeder) checkUnlogged(ctx context.Context) error {
	if o := f.Projector.Rules; f.main.post != nil || f.Me.Tool || o.Markers && !o.BrokerOnly {
		return nil
	}
	c, err := f.Host.Store.Checkpoint(ctx, provider.Build{Projector: f.Projector.Name})
	if err == nil && c.Mode != 0 {
		return fmt.Errorf("projector %s has a checkpoint, and no markers of events before it: "+
			"it cannot be BrokerOnly or without Markers, unless it reads FromLog", f.Projector.Name)
	}
	return nil
}

// Follow looks at the generations until ctx ends: it takes requests up, and feeds the
// generations that are for this version of the program.
func (a *All) Follow(ctx, hard context.Context) {
	defer func() {
		for _, f := range a.Feeders {
			f.stopOthers(nil)
		}
	}()
	for ctx.Err() == nil {
		pause, err := a.look(ctx, hard)
		if err != nil && ctx.Err() == nil {
			a.Host.Report(slog.LevelWarn, "generations not read", err)
		}
		select {
		case <-ctx.Done():
		case <-a.Host.Follow:
			model.Wait(ctx, model.Soon)
		case <-time.After(pause):
		}
	}
}

// look looks at the generations of all projectors once. It returns the pause until the next look.
func (a *All) look(ctx, hard context.Context) (pause time.Duration, err error) {
	limited, cancel := a.Host.Limited(ctx)
	rows, err := a.Host.Store.Generations(limited, "")
	cancel()
	if err != nil {
		return followSlow, err
	}
	pause = followSlow
	for _, f := range a.Feeders {
		now := a.Host.Clock()
		if now.Before(f.watch.retryAt) {
			continue
		}
		all, err := generation.Of(f.Projector.Name, rows)
		if errors.Is(err, generation.ErrForgotten) {
			a.Host.End(err)
			return pause, nil
		}
		if err == nil {
			var changed bool
			if changed, err = f.look(ctx, hard, all); changed {
				a.Host.Follow.Send()
			}
		}
		if f.watch.tries++; err == nil || errors.Is(err, provider.ErrFenced) { // fenced: another runner was first
			f.watch.tries, err = 0, nil
		} else {
			delay, _ := a.Host.Retry.Delay(f.watch.tries)
			f.watch.retryAt = now.Add(delay)
		}
		if generation.Find(all, func(g *generation.Row) bool { return g.IsBuild() || g.State == provider.GenerationStandby }) != nil {
			pause = followFast
		}
		if err != nil && ctx.Err() == nil {
			reason := "" // other errors may have data of users
			if errors.Is(err, model.ErrNoRebuild) {
				reason = err.Error()
			}
			a.Host.Report(slog.LevelWarn, "generation not changed", err, "projector", f.Projector.Name, "reason", reason)
		}
	}
	return pause, nil
}

func (a *All) feeding() (all []*crew) {
	for _, f := range a.Feeders {
		all = append(all, f.feeding()...)
	}
	return all
}

// DispatchDue dispatches due parked messages to the workers that have no due messages yet. It returns
// false if no message is due, and no worker has due messages.
func (a *All) DispatchDue(ctx context.Context) (some bool, err error) {
	batch := cmp.Or(a.Host.Batch, model.DeliveryBatch)
	due, all := provider.DueFilter{Keys: 4*batch + a.left, Each: batch}, a.feeding()
	for _, c := range all {
		if !a.Host.Paused(c.feeder.Projector.Name) {
			due.Builds = append(due.Builds, c.current.Load().Build)
			some = some || c.pool.IsBusy()
		}
	}
	ctx, cancel := a.Host.Limited(ctx)
	defer cancel()
	if due.Needs, err = a.needs.of(ctx, a.Host, all, due.Builds); err != nil {
		return some, err
	}
	rows, err := a.Host.Store.Due(ctx, due)
	if err != nil {
		return some, err
	}
	left := map[provider.Lane]bool{} // whose first message another program applies
	defer func() {                   // they may have hidden others from this scan
		some, a.left = some || len(left) > a.left, len(left)
	}()
	for _, c := range all {
		b := c.current.Load().Build
		own := slices.DeleteFunc(slices.Clone(rows), func(row provider.Parked) bool {
			return row.Projector != b.Projector || row.Generation != b.Generation
		})
		if len(own) == 0 {
			continue
		}
		msgs, err := c.parked.Messages(ctx, own)
		if err != nil {
			return some, err
		}
		msgs = slices.DeleteFunc(msgs, func(m *model.Message) bool {
			if parked.Leaves(m) {
				left[m.Lane], a.needs.lack = true, m.Aside.Cause
			}
			return left[m.Lane]
		})
		if len(msgs) > 0 {
			some = true
			c.pool.GiveDue(msgs)
		}
	}
	return some, nil
}

const (
	pruneEvery = time.Minute
	pruneLimit = 500 // rows of each kind per transaction
)

// Maintain prunes old rows until ctx ends. Markers that are older than window are deleted.
func (a *All) Maintain(ctx context.Context, window time.Duration) {
	for ; ctx.Err() == nil; model.Wait(ctx, pruneEvery) {
		a.prune(ctx, window)
		a.clearRetired(ctx)
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
		h.Report(slog.LevelWarn, what+" not deleted", err, "projector", f.Projector.Name, "again_in", pruneEvery)
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
					n, _, err := rebuild.Clear(ctx, f.Host, g)
					return n, err
				})
			}
		}
	}
}

// ErrFinished: no parked message is due.
var ErrFinished = errors.New("nothing is due")

// Finish dispatches due messages until nothing is due. It returns ErrFinished, or an error of ClassUnable if messages need
// what this program lacks.
func (a *All) Finish(ctx context.Context) error {
	for ; ctx.Err() == nil; model.Wait(ctx, model.Soon) {
		a.needs.read = time.Time{}
		some, err := a.DispatchDue(ctx)
		switch {
		case err != nil:
			return err
		case !some:
			return cmp.Or(a.needs.lack, ErrFinished)
		}
	}
	return nil
}
