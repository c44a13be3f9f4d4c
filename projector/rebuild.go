package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

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

	scratch // the new tables of Verify
)

// String returns "none", "in-place" or "blue-green".
func (h RebuildHow) String() string {
	if names := [...]string{"none", "in-place", "blue-green", "verify"}; h >= 0 && int(h) < len(names) {
		return names[h]
	}
	return fmt.Sprintf("RebuildHow(%d)", int(h))
}

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
	ErrNoRebuild = errors.New("the projector cannot be rebuilt")
	// ErrGeneration: the generation is not in a state that allows this, or it does not exist.
	ErrGeneration = errors.New("the generation does not allow this")
)

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNoRebuild, fmt.Sprintf(format, args...))
}

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
func RequestRebuild(ctx context.Context, b RebuildStore, projector string, r Rebuild) (int, error) {
	n, err := requestRebuild(ctx, b, projector, r)
	if err != nil {
		return 0, fmt.Errorf("rebuild %s: %w", projector, err)
	}
	return n, nil
}

func requestRebuild(ctx context.Context, b RebuildStore, projector string, r Rebuild) (int, error) {
	if err := r.validate(); err != nil {
		return 0, err
	}
	for {
		all, err := readGenerations(ctx, b, projector)
		if err != nil {
			return 0, err
		}
		if g := find(all, (*generation).isBuild); g != nil {
			if g.How == scratch {
				return 0, fmt.Errorf("%w: it is being verified", ErrGeneration)
			}
			return g.Generation, nil
		}
		if is := live(all); r.How == InPlace && isRebuiltInPlace(all, is) {
			return is.Generation, nil
		}
		if c, err := b.Checkpoint(ctx, provider.Build{Projector: projector}); err != nil || c.Mode == 0 {
			return 0, cmp.Or(err, ErrNoCheckpoint)
		}
		g := request(all, r)
		created, err := b.SetGeneration(ctx, g.stored())
		if created || err != nil {
			return g.Generation, err
		}
	}
}

// isRebuiltInPlace reports whether the live generation is being rebuilt in place: it has the tables of
// the one that was live before. After a rollback, it has other ones.
func isRebuiltInPlace(all []*generation, is *generation) bool {
	return is.How == InPlace && is.isReplaying() &&
		find(all, func(g *generation) bool { return g.Generation == is.Source && g.Suffix == is.Suffix }) != nil
}

func (r *Rebuild) validate() error {
	if r.How != InPlace && r.How != BlueGreen || r.Rate < 0 {
		return fmt.Errorf("%w: rebuild.How is %s and Rate %d: use InPlace or BlueGreen, and at least 0", ErrInput, r.How, r.Rate)
	}
	return r.Validate()
}

// request returns a new generation, with the state requested.
func request(all []*generation, r Rebuild) *generation {
	g := &generation{Build: provider.Build{Projector: all[0].Projector, Generation: newest(all) + 1}, state: provider.GenerationRequested}
	g.How, g.Rate, g.Check, g.Anyway, g.By, g.Reason = r.How, r.Rate, r.Check, r.Anyway, r.By, r.Reason
	return g
}

// Rebuild requests a rebuild, and returns when it has ended: when the read model has caught up with
// the log (InPlace), or the new one is live (BlueGreen). If a rebuild is going on, it waits for that
// one. The runner must run. After the end of ctx the rebuild continues, in any runner of the projector.
//   - ErrNoRebuild: the projector cannot be rebuilt.
//   - ErrGeneration: the rebuild was canceled, or it waits for Promote (Rebuild.Check).
//   - ErrInput: see RequestRebuild.
func (r *Runner) Rebuild(ctx context.Context, projector string, how Rebuild) error {
	p := r.byName[projector]
	if p == nil {
		return fmt.Errorf("rebuild: %w: the runner has no projector %q", ErrInput, projector)
	}
	if err := p.canRebuild(how.How); err != nil {
		return fmt.Errorf("rebuild %s: %w", projector, err)
	}
	n, err := requestRebuild(ctx, r.store, projector, how)
	for ; err == nil; wait(ctx, followFast/2) {
		r.followNow()
		var g *generation
		if g, err = r.generation(ctx, provider.Build{Projector: projector, Generation: n}); err != nil {
			break
		}
		switch {
		case g.isLive() && g.Done:
			return nil
		case g.state == provider.GenerationRetired && g.Failed != "":
			err = refuse("%s", g.Failed)
		case g.state == provider.GenerationRetired:
			err = fmt.Errorf("%w: the rebuild was canceled", ErrGeneration)
		case g.Failed != "" && !g.Promoted:
			err = fmt.Errorf("%w: %s", ErrGeneration, g.Failed)
		default:
			err = ctx.Err()
		}
	}
	return fmt.Errorf("rebuild %s: %w", projector, err)
}

// generation reads a generation. It returns ErrGeneration if there is none.
func (r *Runner) generation(ctx context.Context, b provider.Build) (*generation, error) {
	all, err := r.generationsOf(ctx, b.Projector)
	if err != nil {
		return nil, err
	}
	if g := find(all, func(g *generation) bool { return g.Build == b }); g != nil {
		return g, nil
	}
	return nil, fmt.Errorf("%w: %s does not exist", ErrGeneration, b)
}

// canRebuild returns ErrNoRebuild if the definition does not allow this rebuild.
func (p *projection) canRebuild(how RebuildHow) error {
	switch {
	case p.reader == nil:
		return refuse("its runner reads no log for it: give it Options.Markers, and RunnerConfig.Log or a store with events")
	case !p.keeps.Atomic && !p.keeps.Markers:
		return refuse("its store keeps no markers")
	case how == InPlace && !p.resets && !p.keeps.Reset:
		return refuse("give it OnReset: its store cannot empty tables")
	case how == InPlace && !p.resets && len(p.opts.Tables) == 0:
		return refuse("give it OnReset or Options.Tables")
	case how != InPlace && (!p.creates || len(p.opts.Tables) == 0):
		return refuse("give it OnCreate and Options.Tables")
	case len(p.opts.Tables) > 0 && !p.keeps.Tables && (how != InPlace || !p.resets):
		return refuse("its store has no tables")
	}
	return nil
}

// checkRebuild returns an error if the options, OnCreate and OnReset do not fit together or to the
// store.
func (p *Projector[Tx]) checkRebuild(keeps provider.Keeps) error {
	err := provider.CheckTables(p.opts.Tables...)
	how, creates, resets := p.opts.RebuildOnChange, p.setupOf(created) != nil, p.setupOf(reset) != nil
	if creates && err == nil {
		err = checkSuffixed(p.opts.Tables...)
	}
	switch {
	case p.opts.Version < 0 || how < NoRebuild || how > BlueGreen:
		err = errors.Join(err, fmt.Errorf("options.Version is %d and options.RebuildOnChange %s: use at least 0, and a constant", p.opts.Version, how))
	case how == InPlace && !resets && keeps.Tables && !keeps.Reset:
		err = errors.Join(err, errors.New("options.RebuildOnChange InPlace requires OnReset: the store cannot empty tables"))
	case how == InPlace && !resets && len(p.opts.Tables) == 0:
		err = errors.Join(err, errors.New("options.RebuildOnChange InPlace requires OnReset or options.Tables"))
	case how == BlueGreen && !creates:
		err = errors.Join(err, errors.New("options.RebuildOnChange BlueGreen requires OnCreate"))
	case creates && len(p.opts.Tables) == 0:
		err = errors.Join(err, errors.New("OnCreate requires options.Tables: the tables that it creates"))
	case (creates || how == InPlace && !resets) && !keeps.Tables:
		err = errors.Join(err, errors.New("OnCreate and options.Tables require a store whose read models are tables"))
	}
	return err
}

// unlogged returns ErrNoRebuild if the live generation has applied or parked messages that are not
// in the log.
func (p *projection) unlogged(ctx context.Context, is *generation) error {
	has, err := p.runner.store.Unlogged(ctx, is.Build, p.marked)
	if err != nil {
		return err
	}
	if has {
		return refuse("it has applied messages that are not in the log: a rebuild would lose them (Rebuild.Anyway)")
	}
	f := ParkedFilter{Projector: p.name, Generation: is.Generation, Limit: 100}
	for {
		rows, err := p.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		ids := make([]string, len(rows))
		for i, row := range rows {
			ids[i], f.After = row.MessageID, row.Seq
		}
		places, err := p.reader.log.LogPlaces(ctx, ids)
		if err != nil {
			return err
		}
		if i := slices.IndexFunc(ids, func(id string) bool { return places[id].Position == 0 }); i >= 0 {
			return refuse("a parked message is not in the log: replay or skip it first (id %q, Rebuild.Anyway)", ids[i])
		}
	}
}

// skippedIn returns the ids of the events that operators have skipped in a generation and in earlier
// ones, sorted.
func (p *projection) skippedIn(ctx context.Context, is *generation) ([]string, error) {
	ids := slices.Clone(is.Skipped)
	f := ParkedFilter{Projector: p.name, Generation: is.Generation, States: []ParkedState{StateSkipped}, Limit: 1000}
	for {
		rows, err := p.runner.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			slices.Sort(ids)
			return slices.Compact(ids), err
		}
		for _, row := range rows {
			ids, f.After = append(ids, row.MessageID), row.Seq
		}
	}
}
