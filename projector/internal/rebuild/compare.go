package rebuild

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Compare runs s for a generation, whose tables are right, and the live one. It returns the position of the live
// checkpoint, and the number of events of the last step. The reader does not run, or it calls Compare.
func (s *Switcher) Compare(ctx context.Context, g *generation.Row, with provider.Switch) (position int64, last int, err error) {
	h := s.Reader.Host
	for tries, began := 1, h.Clock(); ; tries++ {
		if position, last, err = s.compareOnce(ctx, g, with); err == nil || ctx.Err() != nil {
			return position, last, err
		}
		switch waits := errors.Is(err, errWaits); {
		case waits && h.Clock().Sub(began) > 20*time.Second: // since then messages of the live read model are parked
			return position, last, fmt.Errorf("%w: %w", model.ErrGeneration, err)
		case !waits && !canRetry(err):
			return position, last, err
		}
		delay, _ := h.Retry.Delay(tries)
		model.Wait(ctx, delay)
	}
}

// canRetry reports whether a comparison may succeed if it is tried again.
func canRetry(err error) bool {
	if errors.Is(err, provider.ErrFenced) || errors.Is(err, provider.ErrEnded) {
		return false
	}
	return errors.Is(err, errMany) || errors.Is(err, unit.ErrParks) || provider.CodeOf(err) == provider.CodeBusy || provider.ClassOf(err) == provider.ClassTransient
}

func (s *Switcher) compareOnce(ctx context.Context, g *generation.Row, with provider.Switch) (position int64, applied int, err error) {
	r := s.Reader
	if err := s.applyBehind(ctx, ctx, g, false); err != nil {
		return 0, 0, err
	}
	all, err := r.Host.Generations(ctx, g.Projector)
	if err != nil {
		return 0, 0, err
	}
	live := generation.Live(all)
	if err := s.checkParked(ctx, g, live.Build); err != nil {
		return 0, 0, err
	}
	if g.How == generation.Scratch && !live.Takes(r.Projector.Version) {
		return 0, 0, fmt.Errorf("%w: the read model of another version has become live", model.ErrGeneration)
	}
	with.Compare = named(with.Compare, r.Projector, g.Suffix, live.Suffix)
	with.Last = func(ctx context.Context, l provider.Live) ([]provider.Message, error) {
		if position = l.Checkpoint.Place.Position; l.Checkpoint.Generation != live.Generation {
			return nil, fmt.Errorf("%w: another generation has become live", model.ErrGeneration)
		}
		if l.Checkpoint.Restored {
			return nil, fmt.Errorf("%w: the read model has gone back to an earlier state: first a runner must apply the lost events again", model.ErrGeneration)
		}
		if lacking := follow.HandlersOf(r.Projector).Lacking(l.Checkpoint.Handlers); g.How == generation.Scratch && len(lacking) > 0 {
			return nil, fmt.Errorf("%w: a program with handlers that this one lacks has started: %s", model.ErrGeneration, slices.Sorted(maps.Keys(lacking)))
		}
		return nil, s.checkParked(ctx, g, live.Build) // not in the snapshot, so it was checked before too
	}
	d, err := s.transact(ctx, g, &with, lookPage)
	_ = s.again(d, err)
	return position, len(d.Unit.Messages), err
}

// named returns a copy of a comparison between tables with these suffixes. Differences have the names of
// Options.Tables.
func named(c *provider.Comparison, p *model.Projector, ours, theirs string) *provider.Comparison {
	one := *c
	one.Pairs = nil
	for _, name := range p.Tables {
		one.Pairs = append(one.Pairs, provider.TablePair{Table: name + ours, Other: name + theirs})
	}
	one.Only = slices.Clone(c.Only)
	for i := range one.Only {
		one.Only[i].Table += theirs
	}
	one.Found = func(d []provider.Difference) {
		for i := range d {
			d[i].Table = strings.TrimSuffix(d[i].Table, theirs)
		}
		c.Found(d)
	}
	return &one
}

// checkParked returns errWaits if messages are parked in the live generation, and not in the other one: the tables
// would differ by these, and a repair would apply them twice. It returns ErrGeneration if a verification cannot apply what
// another program has applied to the live one: a repair would undo that.
func (s *Switcher) checkParked(ctx context.Context, g *generation.Row, live provider.Build) error {
	theirs, err := s.parkedIn(ctx, live)
	if err != nil {
		return err
	}
	ours, err := s.parkedIn(ctx, g.Build)
	if err != nil {
		return err
	}
	for id := range theirs {
		if _, has := ours[id]; !has {
			return fmt.Errorf("%w (id %q)", errWaits, id)
		}
	}
	for id, class := range ours {
		if _, has := theirs[id]; g.How == generation.Scratch && class == provider.ClassUnable && !has {
			return fmt.Errorf("%w (id %q)", errUnable, id)
		}
	}
	return nil
}

var errUnable = fmt.Errorf("%w: this program is unable to apply a message that another one has applied", model.ErrGeneration)

// parkedIn returns the messages of a generation that are waiting or stuck: why, by their id.
func (s *Switcher) parkedIn(ctx context.Context, b provider.Build) (map[string]provider.Class, error) {
	ids := map[string]provider.Class{}
	f := provider.ParkedFilter{
		Projector: b.Projector, Generation: b.Number(), Limit: lookPage,
		States: []provider.ParkedState{provider.StateWaiting, provider.StateStuck},
	}
	err := model.EachParked(ctx, s.Reader.Host.Store, f, func(row provider.Parked) { ids[row.MessageID] = row.Class })
	return ids, err
}

// compareFirst compares a generation that was built with Rebuild.Check with the live one. Without
// differences it is promoted.
func (s *Switcher) compareFirst(ctx context.Context, g *generation.Row) error {
	found := 0
	c := provider.Comparison{Limit: 1000, Found: func(d []provider.Difference) { found = len(d) }}
	if _, _, err := s.Compare(ctx, g, provider.Switch{Snapshot: true, Compare: &c}); err != nil {
		return err
	}
	_, _, err := s.Reader.Progress.Change(ctx, g, func(g *generation.Row) {
		if g.Promoted = found == 0; !g.Promoted {
			g.Failed = fmt.Sprintf("%d rows differ from the live read model: promote it or cancel it", found)
		}
	})
	return err
}
