package projector

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
)

// ForgetOptions say how a projector is forgotten.
type ForgetOptions struct {
	DropTables bool // drop the tables that OnCreate has created, and their views
	Preview    bool // change nothing, and return what would be deleted
}

// Forgotten is what Forget has deleted, or would delete.
type Forgotten struct {
	Checkpoints map[int]int64  `json:"checkpoints"` // the position of each generation that has a checkpoint
	Handlers    []string       `json:"handlers"`    // that have markers, sorted. Empty if the store does not list them
	Parked      provider.Count `json:"parked"`      // messages, also replayed and skipped ones
	// Tables are those of OnCreate, and their views. Without DropTables they are kept.
	Tables  []string `json:"tables"`
	Deleted int      `json:"deleted"` // markers and parked messages: by this call
}

// Forget deletes what is stored of a projector that no program has any more: markers, parked messages and, with
// DropTables, tables. Its pause ends, and its requests are canceled. d is stored.
//
// First it retires all generations in one transaction, after the end of the units that are open: from then on no unit of
// the projector commits, and a runner of that name does not start, or ends (ErrForgotten), until Release. The rows are
// deleted after that, in small transactions. If Forget fails or is interrupted, call it again. It may also be called
// again with DropTables. The rows of the generations, and their checkpoints, stay as the tombstone.
//   - ErrGeneration: a runner of the projector is alive, as far as reports and leases show, or the projector is being
//     rebuilt blue/green or verified. Nothing was changed.
//   - ErrInput: nothing is stored of a projector with this name, or d is not complete.
//   - If the store is not ready for runners, for example because its role lacks rights, nothing was changed.
//
// Markers of handlers whose names begin with the projector's are deleted: no other projector may have one in its Was.
func Forget(ctx context.Context, s provider.ForgetStore, projector string, o ForgetOptions, d Decision) (f Forgotten, err error) {
	defer check.Wrap(&err, "forget %s", projector)
	if err := d.Validate(); err != nil {
		return f, err
	}
	one := forgetting{ForgetStore: s, name: projector, drop: o.DropTables}
	if err := one.read(ctx); err != nil {
		return f, err
	}
	found, err := one.count(ctx)
	if err != nil {
		return f, err
	}
	if c, ok := s.(provider.ReadyChecker); ok && !o.Preview { // a role that lacks a right must not fail in the middle
		if err := c.ReadyFor(ctx, provider.RunnerService); err != nil {
			return f, err
		}
	}
	for ; err == nil; err = one.read(ctx) { // another program may have changed the generations
		isForgotten, done := generation.Tombstone(one.all) != nil, o.Preview
		switch {
		case !isForgotten:
			if err = one.allowed(ctx, found); err == nil && !done {
				_, err = s.SetGeneration(ctx, one.retired(d)...)
			}
		case !done:
			done, err = one.clear(ctx, d, &found.Deleted)
		}
		if err != nil {
			break
		}
		if done {
			return found, nil
		}
	}
	return f, err
}

// forgetting is a projector that is being forgotten.
type forgetting struct {
	provider.ForgetStore
	name   string
	drop   bool
	all    []*generation.Row
	marked []string // names of handlers with markers
}

// read reads the generations, and the handlers that have markers.
func (o *forgetting) read(ctx context.Context) error {
	if o.name == "" {
		return fmt.Errorf("%w: the projector is missing: name it", ErrInput)
	}
	rows, err := o.Generations(ctx, o.name)
	if err == nil {
		o.all, err = generation.OrForgotten(o.name, rows)
	}
	k, lists := o.ForgetStore.(provider.MarkerMaintainer)
	if err != nil || !lists {
		return err
	}
	all, err := k.MarkedHandlers(ctx)
	o.marked = slices.DeleteFunc(all, func(handler string) bool { return !strings.HasPrefix(handler, o.name+"/") })
	return err
}

// counted is the most rows that Forgotten counts.
const counted = 1000

func (o *forgetting) count(ctx context.Context) (f Forgotten, err error) {
	f = Forgotten{Checkpoints: map[int]int64{}, Handlers: append([]string{}, o.marked...), Tables: []string{}}
	for _, g := range o.all {
		c, err := o.Checkpoint(ctx, g.Build)
		if err != nil {
			return f, err
		}
		if c.Mode != 0 && !g.Cleared {
			f.Checkpoints[g.Generation] = c.Place.Position
		}
		for _, t := range o.tables(g) {
			if f.Tables = append(f.Tables, t.Table); t.Other != "" && !slices.Contains(f.Tables, t.Other) {
				f.Tables = append(f.Tables, t.Other)
			}
		}
	}
	rows, err := o.Parked(ctx, ParkedFilter{
		Projector: o.name, Limit: counted, States: []ParkedState{StateWaiting, StateStuck, StateReplayed, StateSkipped},
	})
	f.Parked = provider.Count{N: int64(len(rows)), AtLeast: len(rows) == counted}
	return f, err
}

// tables returns the tables of a generation, each with the view that may show it.
func (o *forgetting) tables(g *generation.Row) (all []provider.TablePair) {
	for _, table := range slices.Concat(g.Tables, g.Kept) {
		pair := provider.TablePair{Table: table}
		if g.Suffix != "" {
			pair.Other = strings.TrimSuffix(table, g.Suffix)
		}
		all = append(all, pair)
	}
	return all
}

// allowed returns an error if the projector may be in use, or if nothing is stored of it.
func (o *forgetting) allowed(ctx context.Context, f Forgotten) error {
	isRebuilt := func(g *generation.Row) bool { return g.IsBuild() && g.How != generation.Scratch }
	if g := generation.Find(o.all, isRebuilt); g != nil {
		return fmt.Errorf("%w: generation %d is %s (%s): cancel that first", ErrGeneration, g.Generation, g.State, g.How)
	}
	if len(o.all) == 1 && o.all[0].Revision == 0 && len(f.Checkpoints) == 0 && len(o.marked) == 0 && f.Parked.N == 0 {
		return fmt.Errorf("%w: nothing is stored of a projector with this name", ErrInput)
	}
	if ops := provider.OperationsOf(o.ForgetStore); ops != nil {
		services, err := ops.Services(ctx)
		if err != nil {
			return err
		}
		for _, s := range services {
			if s.Serves(o.name) {
				return fmt.Errorf("%w: a runner of the projector is alive: %s", ErrGeneration, s.Process)
			}
		}
	}
	for _, kind := range []string{follow.ReaderLease, follow.SegmentLease, follow.VerifyLease} {
		names, err := o.LeaseNames(ctx, kind+o.name)
		if err != nil {
			return err
		}
		for _, name := range names {
			switch rest := strings.TrimPrefix(name, kind+o.name); {
			case rest != "" && rest[0] != '@' && rest[0] != '/': // of another projector
			case kind == follow.VerifyLease:
				return fmt.Errorf("%w: it is being verified", ErrGeneration)
			default:
				return fmt.Errorf("%w: a runner of the projector has the lease %s", ErrGeneration, name)
			}
		}
	}
	return nil
}

// retired returns the rows of the generations that are to be stored: none is live then.
func (o *forgetting) retired(d Decision) (rows []provider.Generation) {
	for _, g := range o.all {
		to := *g
		to.By, to.Reason, to.State, to.Forgotten = d.By, d.Reason, provider.GenerationRetired, g.IsLive()
		to.Oldest, to.Newest = 0, 0 // after a Release, no version of the program was canceled
		if to.Tables = nil; !g.Cleared {
			to.Kept = slices.Concat(g.Kept, g.Tables) // a runner after a Release must not drop them
		}
		rows = append(rows, to.Stored())
	}
	return rows
}

// clear deletes the rows of all generations, and counts them. done is false if another program has changed them meanwhile.
func (o *forgetting) clear(ctx context.Context, d Decision, deleted *int) (done bool, err error) {
	if err := o.end(ctx, d); err != nil {
		return false, err
	}
	for _, g := range o.all {
		if g.Cleared && (!o.drop || len(g.Kept) == 0) {
			continue
		}
		c, err := o.Checkpoint(ctx, g.Build)
		if err != nil {
			return false, err
		}
		handlers := follow.OwnHandlers(o.name, o.marked, g.Handlers, follow.Names(c.Handlers))
		var tables []provider.TablePair
		if o.drop {
			tables = o.tables(g)
		}
		for n := 1; n > 0; {
			if n, err = o.ClearGeneration(ctx, g.Build, handlers, tables, 500); err != nil {
				return false, err
			}
			*deleted += n
		}
		changed, err := generation.Change(ctx, o, g, func(g *generation.Row) {
			if g.Cleared = true; o.drop {
				g.Kept = nil
			}
		})
		if !changed || err != nil {
			return false, err
		}
	}
	return true, nil
}

// end ends what people have decided about the projector: its pause and its requests.
func (o *forgetting) end(ctx context.Context, d Decision) error {
	ops := provider.OperationsOf(o.ForgetStore)
	if ops == nil {
		return nil
	}
	pauses, err := ops.Pauses(ctx)
	if err != nil {
		return err
	}
	for _, p := range pauses {
		if p.Kind == provider.PauseProjector && p.Name == o.name {
			p.Decision = d
			if _, err := ops.SetPause(ctx, p, false); err != nil {
				return err
			}
		}
	}
	open, err := ops.Acts(ctx, provider.ActFilter{
		Verbs: []string{provider.VerbDryRun, provider.VerbVerify}, Kind: provider.PauseProjector, Name: o.name,
		States: []provider.ActState{provider.ActRequested, provider.ActRunning},
	})
	for _, act := range open {
		if err == nil {
			_, err = ops.CancelAct(ctx, act.ID, d)
		}
	}
	return err
}

// Release lets the name of a forgotten projector be used again: a new one begins at Options.From, with a new generation.
// Tables that were kept stay as they are. d is stored.
//   - ErrGeneration: the projector is not forgotten, or Forget has not come to its end: call that again.
//   - ErrInput: d is not complete.
func Release(ctx context.Context, b provider.Builds, projector string, d Decision) (err error) {
	defer check.Wrap(&err, "release %s", projector)
	if err := d.Validate(); err != nil {
		return err
	}
	for {
		rows, err := b.Generations(ctx, projector)
		if err != nil {
			return err
		}
		all, err := generation.OrForgotten(projector, rows)
		if err != nil {
			return err
		}
		if generation.Tombstone(all) == nil {
			return fmt.Errorf("%w: the projector is not forgotten", ErrGeneration)
		}
		if g := generation.Find(all, func(g *generation.Row) bool { return !g.Cleared }); g != nil {
			return fmt.Errorf("%w: rows of generation %d are left: forget it again", ErrGeneration, g.Generation)
		}
		first := generation.Next(all, generation.Order{By: d.By, Reason: d.Reason})
		first.State, first.Oldest, first.Newest, first.Done, first.Released = provider.GenerationLive, 1, 1, true, true
		if set, err := b.SetGeneration(ctx, first.Stored()); set || err != nil {
			return err
		}
	}
}
