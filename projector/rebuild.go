package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/provider"
)

// RebuildHow is a way to rebuild a read model.
type RebuildHow int

const (
	// NoRebuild: the read model is kept, and new events are applied by the new handlers.
	NoRebuild RebuildHow = iota
	// InPlace: the read model is emptied, and all events are applied again. Readers see an incomplete
	// read model meanwhile. It requires OnReset or Options.Tables.
	InPlace
	// BlueGreen: new tables are filled while readers see the old ones. Then one transaction makes the
	// views show the new tables. Programs that still have the old Version keep the old tables up to
	// date, for a rollback (Promote), until Drop or the next rebuild. It requires OnCreate and
	// Options.Tables.
	BlueGreen
)

// String returns "none", "in-place" or "blue-green".
func (h RebuildHow) String() string { return generation.How(h).String() }

// Rebuild is a request to rebuild the read model of a projector from the log.
type Rebuild struct {
	How      RebuildHow // InPlace or BlueGreen
	Decision            // who asks for it, and why; required
	// Rate is the most events per second. Zero means no limit. Without a limit, a blue/green rebuild
	// pauses for half of the time while the live generation applies events, until it has applied the
	// events that existed when it began.
	Rate int
	// Check: a blue/green rebuild compares the new read model with the live one before it becomes
	// live. If they differ, the rebuild waits for Promote or Cancel.
	Check bool
	// Anyway: the rebuild may lose the messages that the read model has applied and that are not in
	// the log. Without it, a rebuild that would lose any is refused (ErrNoRebuild).
	Anyway bool
}

var (
	// ErrNoRebuild: the projector cannot be rebuilt. The text says why.
	ErrNoRebuild = model.ErrNoRebuild
	// ErrGeneration: the generation is not in a state that allows this, or it does not exist.
	ErrGeneration = model.ErrGeneration
)

// RebuildStore stores requests. Every provider implements it.
type RebuildStore interface {
	provider.Builds
	provider.Progress
}

// RequestRebuild stores a request that a running runner of the projector takes up within about two
// seconds, and returns the number of the new generation. If a rebuild is requested or is going on,
// RequestRebuild returns its number and stores nothing. But during a rebuild in place, a blue/green one
// can be requested. See Projector.Generations for the progress.
//   - ErrGeneration: the read model is being verified.
//   - ErrNoCheckpoint: no runner has read a log for a projector with this name.
//   - ErrInput: r.How is neither InPlace nor BlueGreen, r.Rate is negative, or the Decision is not
//     complete.
//
// If the projector cannot be rebuilt, the runner ends the request: see Generation.Failed.
func RequestRebuild(ctx context.Context, b RebuildStore, projector string, r Rebuild) (n int, err error) {
	defer check.Wrap(&err, "rebuild %s", projector)
	return requestRebuild(ctx, b, projector, r)
}

func requestRebuild(ctx context.Context, b RebuildStore, projector string, r Rebuild) (int, error) {
	if err := r.validate(); err != nil {
		return 0, err
	}
	for {
		all, err := generation.All(ctx, b, projector)
		if err != nil {
			return 0, err
		}
		if g := generation.Find(all, (*generation.Row).IsBuild); g != nil {
			if g.How == generation.Scratch {
				return 0, fmt.Errorf("%w: it is being verified", ErrGeneration)
			}
			return g.Generation, nil
		}
		if live := generation.Live(all); r.How == InPlace && isRebuiltInPlace(all, live) {
			return live.Generation, nil
		}
		if c, err := b.Checkpoint(ctx, provider.Build{Projector: projector}); err != nil || c.Mode == 0 {
			return 0, cmp.Or(err, ErrNoCheckpoint)
		}
		g := generation.Next(all, generation.Order{
			How: generation.How(r.How), Rate: r.Rate, Check: r.Check, Anyway: r.Anyway, By: r.By, Reason: r.Reason,
		})
		if created, err := b.SetGeneration(ctx, g.Stored()); err != nil {
			return 0, err
		} else if created {
			return g.Generation, nil
		}
	}
}

// isRebuiltInPlace reports whether the live generation is being rebuilt in place: it has the tables of
// the one that was live before. After a rollback, it has other ones.
func isRebuiltInPlace(all []*generation.Row, live *generation.Row) bool {
	return live.How == generation.InPlace && live.IsReplaying() &&
		generation.Find(all, func(g *generation.Row) bool { return g.Generation == live.Source && g.Suffix == live.Suffix }) != nil
}

func (r *Rebuild) validate() error {
	if r.How != InPlace && r.How != BlueGreen || r.Rate < 0 {
		return fmt.Errorf("%w: rebuild.How is %s and Rate %d: use InPlace or BlueGreen, and at least 0", ErrInput, r.How, r.Rate)
	}
	return r.Validate()
}

// Rebuild requests a rebuild, and returns when it has ended: when the read model has caught up with
// the log (InPlace), or the new one is live (BlueGreen). If a rebuild is going on, it waits for that
// one. The runner must run. After the end of ctx the rebuild continues, in any runner of the projector.
//   - ErrNoRebuild: the projector cannot be rebuilt.
//   - ErrGeneration: the rebuild was canceled, or it waits for Promote (Rebuild.Check).
//   - ErrInput: see RequestRebuild.
func (r *Runner) Rebuild(ctx context.Context, projector string, how Rebuild) error {
	f := r.feeder(projector)
	if f == nil {
		return fmt.Errorf("rebuild: %w: the runner has no projector %q", ErrInput, projector)
	}
	if err := rebuild.CanRebuild(f.Projector, generation.How(how.How)); err != nil {
		return fmt.Errorf("rebuild %s: %w", projector, err)
	}
	n, err := requestRebuild(ctx, r.host.Store, projector, how)
	for ; err == nil; model.Wait(ctx, 100*time.Millisecond) {
		r.host.Follow.Send()
		var g *generation.Row
		if g, err = r.host.Generation(ctx, provider.Build{Projector: projector, Generation: n}); err != nil {
			break
		}
		switch {
		case g.IsLive() && g.Done:
			return nil
		case g.State == provider.GenerationRetired && g.Failed != "":
			err = fmt.Errorf("%w: %s", ErrNoRebuild, g.Failed)
		case g.State == provider.GenerationRetired:
			err = fmt.Errorf("%w: the rebuild was canceled", ErrGeneration)
		case g.Failed != "" && !g.Promoted:
			err = fmt.Errorf("%w: %s", ErrGeneration, g.Failed)
		default:
			err = ctx.Err()
		}
	}
	return fmt.Errorf("rebuild %s: %w", projector, err)
}

// checkRebuild returns an error if the options, OnCreate and OnReset do not fit together or to the
// store.
func (p *Projector[Tx]) checkRebuild(keeps provider.Keeps) error {
	err := provider.CheckTables(p.opts.Tables...)
	how, creates, resets := p.opts.RebuildOnChange, p.hasSetup(model.Created), p.hasSetup(model.Reset)
	if creates && err == nil {
		err = model.CheckSuffixed(p.opts.Tables...)
	}
	if p.opts.Version < 0 || how < NoRebuild || how > BlueGreen {
		return errors.Join(err, fmt.Errorf("options.Version is %d and options.RebuildOnChange %s: use at least 0, and a constant", p.opts.Version, how))
	}
	empties := how == InPlace && !resets
	switch {
	case empties && keeps.Tables && !keeps.Reset:
		err = errors.Join(err, errors.New("options.RebuildOnChange InPlace requires OnReset: the store cannot empty tables"))
	case empties && len(p.opts.Tables) == 0:
		err = errors.Join(err, errors.New("options.RebuildOnChange InPlace requires OnReset or options.Tables"))
	case how == BlueGreen && !creates:
		err = errors.Join(err, errors.New("options.RebuildOnChange BlueGreen requires OnCreate"))
	case creates && len(p.opts.Tables) == 0:
		err = errors.Join(err, errors.New("OnCreate requires options.Tables: the tables that it creates"))
	case (creates || empties) && !keeps.Tables:
		err = errors.Join(err, errors.New("OnCreate and options.Tables require a store whose read models are tables"))
	}
	return err
}

// Plan is what a rebuild of a projector would do.
type Plan struct {
	Events int64    // of its types, from the beginning of the live generation on
	Reset  []string // the tables that a rebuild in place empties; nil with OnReset, and with BlueGreen
	Parked int      // number of messages that are waiting or stuck: they are tried again
	// PerSecond is how many events per second the handlers applied in a sample of at most 500 events.
	// Zero if there are no events, or if the sample failed: without OnCreate, the handlers may
	// conflict with rows that exist.
	PerSecond float64
	Duration  time.Duration // Events / PerSecond
}

// Plan returns what a rebuild would do, and changes nothing. It counts the events, which takes
// about a second per million, and applies a sample of them in a transaction that is rolled back: to
// new tables if p has OnCreate, else to those of the live read model, whose rows it locks for that
// time. A nil cfg means the default.
//   - ErrNoRebuild: p cannot be rebuilt in this way. The text says why.
func (p *Projector[Tx]) Plan(ctx context.Context, db provider.Units[Tx], how RebuildHow, cfg *RunnerConfig) (plan *Plan, err error) {
	defer check.Wrap(&err, "plan a rebuild of %s", p.name)
	r, err := runnerOfLog(db, cfg, p)
	if err != nil {
		return nil, err
	}
	return r.plan(ctx, how)
}

func (r *Runner) plan(ctx context.Context, how RebuildHow) (*Plan, error) {
	f := r.all.Feeders[0]
	p := f.Projector
	if err := rebuild.CanRebuild(p, generation.How(how)); err != nil {
		return nil, err
	}
	all, err := r.host.Generations(ctx, p.Name)
	if err != nil {
		return nil, err
	}
	live, plan := generation.Live(all), &Plan{}
	if err := f.Maker.Unlogged(ctx, live); err != nil {
		return nil, err
	}
	from, err := f.Beginning(ctx, live.Generation)
	if err != nil {
		return nil, err
	}
	if plan.Events, err = follow.Count(ctx, r.host.Log, p.Rules.Filter.Types, from.Position, math.MaxInt64); err != nil {
		return nil, err
	}
	if how == InPlace && !p.Resets {
		plan.Reset = p.TablesOf(live.Suffix)
	}
	q := ParkedFilter{Projector: p.Name, Generation: live.Generation, Limit: 1000}
	if err := model.EachParked(ctx, r.host.Store, q, func(provider.Parked) { plan.Parked++ }); err != nil {
		return nil, err
	}
	next := generation.Next(all, generation.Order{})
	next.State, next.Suffix = provider.GenerationBuilding, live.Suffix
	if plan.PerSecond = rebuild.Sample(ctx, f.Reader(next, provider.Checkpoint{}), next, from.Position); plan.PerSecond > 0 {
		plan.Duration = time.Duration(float64(plan.Events) / plan.PerSecond * float64(time.Second)).Round(time.Millisecond)
	}
	return plan, nil
}
