package follow

import (
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// A read model may go back to an earlier state, for example if Redis is killed before it has written its
// last changes. Its checkpoint and markers go back with it. Then the projector catches up with the log:
// events that are not applied any more are applied again, in order.

// restore is what a reader knows of a read model that has gone back.
type restore struct {
	cameAgain int      // events up to Checkpoint.Lost that were applied again
	running   bool     // events that were parked are applied again
	unshown   bool     // the store may show other tables
	skips     []string // sorted ids of events that operators have skipped
}

// beginRestored is called before the reader begins. It returns the position up to which events may have been
// applied before, or 0.
func (r *Reader) beginRestored(ctx context.Context, g *generation.Row) (lost int64, err error) {
	c := &r.at
	_, mayGoBack := r.Host.Store.(provider.Restorer)
	r.restore = restore{unshown: mayGoBack && showsTables(g)}
	if lost = c.Lost; c.Restored {
		head, err := r.Host.Log.LogPosition(ctx, eventstore.From{Now: true})
		if err != nil {
			return 0, err
		}
		lost = max(lost, head)
		r.Host.Logger.Warn("the store of the read model was restarted or replaced: events that it may have lost are applied again",
			"projector", r.Projector.Name, "generation", r.Build.Generation, "position", c.Place.Position)
	}
	if lost > c.Place.Position {
		r.restore.skips, err = Skipped(ctx, r.Host.Store, g)
	}
	return lost, err
}

// Skipped returns the ids of the events that operators have skipped in a generation and in earlier ones,
// sorted.
func Skipped(ctx context.Context, s provider.Parking, g *generation.Row) ([]string, error) {
	ids := slices.Clone(g.Skipped)
	f := provider.ParkedFilter{Projector: g.Projector, Generation: g.Generation, States: []provider.ParkedState{provider.StateSkipped}, Limit: 1000}
	err := model.EachParked(ctx, s, f, func(row provider.Parked) { ids = append(ids, row.MessageID) })
	slices.Sort(ids)
	return slices.Compact(ids), err
}

// resetLost empties the read model if it has gone back to a time before it was rebuilt in place: it has the
// events of an earlier generation then, and none of the checkpoint of this one.
func (r *Reader) resetLost(ctx context.Context, g *generation.Row) error {
	if !r.at.Restored || r.at.Place.ID != "" || r.at.Token != (claim.Token{}) {
		return nil
	}
	all, err := r.Host.Generations(ctx, r.Projector.Name)
	if err != nil {
		return err
	}
	for _, one := range all {
		if one.Build == g.Build || one.Suffix != g.Suffix {
			continue
		}
		c, err := r.Host.Store.Checkpoint(ctx, one.Build)
		if err != nil {
			return err
		}
		if c.Mode == 0 || c.Mode == provider.ModeEnded {
			continue
		}
		if !r.Projector.Resets {
			return fmt.Errorf("%w: the read model has gone back to generation %d, and the projector has no OnReset: delete its keys",
				model.ErrNoRebuild, one.Generation)
		}
		return r.Applier.Worker.Alone(ctx, g.Build, g.Suffix, model.Reset, provider.Switch{})
	}
	return nil
}

// isRestored reports whether the read model has less than it had.
func (r *Reader) isRestored() bool { return r.at.Lost > r.at.Place.Position }

// showsTables reports whether readers find the tables of the generation by their plain names.
func showsTables(g *generation.Row) bool { return g.IsLive() && g.Suffix != "" }

// checkModel returns ErrFenced if the read model may have gone back. Units notice that themselves, but
// there may be none.
func (r *Reader) checkModel(ctx context.Context, g *generation.Row) error {
	s, ok := r.Host.Store.(provider.Restorer)
	if !ok {
		return nil
	}
	limited, cancel := r.Host.Limited(ctx)
	defer cancel()
	c, err := r.Host.Store.Checkpoint(limited, r.Build)
	if err == nil && (c.Restored || c.InSegment(r.Segment).Token != r.at.Token) {
		err = provider.ErrFenced
	}
	if err == nil && showsTables(g) && !r.restore.unshown {
		var shows bool
		shows, err = s.Shows(limited, r.Projector.ViewsOf(g.Suffix))
		r.restore.unshown = err == nil && !shows
	}
	return err
}

// countAgain reports events that were applied again. Events that were appended since the read model went
// back are not counted.
func (r *Reader) countAgain(applied []*model.Message) {
	for _, m := range applied {
		if m.Position > r.at.Lost && !r.restore.running {
			continue
		}
		r.restore.cameAgain++
		if r.Host.Observer.Completed != nil {
			r.Host.Observer.Completed(r.Projector.Name, "lost")
		}
	}
}

// endRestored is called after each page: the end of the events that were lost.
func (r *Reader) endRestored(was bool) {
	if was && !r.isRestored() {
		r.restore.skips = nil
		r.Host.Logger.Info("the read model has again what it had lost", "projector", r.Projector.Name, "events", r.restore.cameAgain)
	}
}

// showLive shows the tables of the live generation, because the store may have lost which these are. It
// does so once for each reader, when the events that were lost are applied again.
func (r *Reader) showLive(ctx, hard context.Context, g *generation.Row) error {
	if !r.restore.unshown || r.isRestored() {
		return nil
	}
	err := r.Applier.Worker.Alone(hard, g.Build, g.Suffix, "", provider.Switch{
		Show: r.Projector.ViewsOf(g.Suffix),
		Last: func(_ context.Context, live provider.Live) ([]provider.Message, error) {
			if live.Checkpoint.Generation != g.Generation {
				return nil, &provider.Error{Class: provider.ClassTransient, Code: provider.CodeFenced, Err: provider.ErrFenced}
			}
			return nil, nil
		},
	})
	if provider.CodeOf(err) == provider.CodeBusy {
		model.Wait(ctx, model.LookAgain)
		return nil
	}
	r.restore.unshown = err != nil
	return err
}

// Restore applies events again that are recorded as parked, and were applied since: the read model has
// lost that. They are before the checkpoint, so the reader would not read them. Call it before the first step.
func (r *Reader) Restore(ctx, hard context.Context, g *generation.Row) error {
	s, ok := r.Host.Store.(provider.Restorer)
	if !ok || r.Segment > 0 {
		return nil
	}
	if r.at.Restoring {
		if err := r.dropAhead(ctx, s); err != nil {
			return err
		}
	}
	r.restore.running = true
	defer func() { r.restore.running = false }()
	n := 0
	err := r.eachLost(ctx, s, func(events []eventstore.Raw) error {
		n += len(events)
		_, err := r.Complete(ctx, hard, g, events)
		return err
	})
	if n > 0 {
		r.Host.Logger.Info("events that were parked, and applied since, are applied again", "projector", r.Projector.Name, "events", n)
	}
	if err != nil || !r.at.Restoring {
		return err
	}
	to := r.at
	to.Restoring = false
	return r.set(ctx, to)
}

// dropAhead deletes parked messages that the log or Restore apply again. They may have been parked before
// messages that were lost and come again now, and would be applied before them.
func (r *Reader) dropAhead(ctx context.Context, s provider.Restorer) error {
	drop := func(lost map[provider.Lane]bool) error {
		limited, cancel := r.Host.Limited(ctx)
		defer cancel()
		return s.DropAhead(limited, r.Build, r.at.Place.Position, lost)
	}
	if err := drop(nil); err != nil {
		return err
	}
	lost := map[provider.Lane]bool{}
	err := r.eachLost(ctx, s, func(events []eventstore.Raw) error {
		for _, m := range r.taken(events) {
			lost[m.Lane] = true
		}
		return nil
	})
	if err != nil || len(lost) == 0 {
		return err
	}
	return drop(lost)
}

// eachLost calls f with pages of the events that the read model has lost, and that are recorded as parked.
func (r *Reader) eachLost(ctx context.Context, s provider.Restorer, f func([]eventstore.Raw) error) error {
	limited, cancel := r.Host.Limited(ctx)
	ids, err := s.Lost(limited, r.Build)
	cancel()
	if err != nil {
		return err
	}
	for page := range slices.Chunk(ids, 500) {
		events, err := r.eventsOf(ctx, page)
		if err == nil {
			err = f(events)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Reader) eventsOf(ctx context.Context, ids []string) (events []eventstore.Raw, err error) {
	limited, cancel := r.Host.Limited(ctx)
	defer cancel()
	places, err := r.Host.Log.LogPlaces(limited, ids)
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		if places[id].Position == 0 {
			continue // the log was restored too
		}
		page, err := r.Host.Page(ctx, provider.LogQuery{After: places[id].Position - 1, Limit: 1, Unsettled: true})
		if err != nil {
			return nil, err
		}
		if len(page.Events) > 0 && page.Events[0].ID == id {
			events = append(events, page.Events[0])
		}
	}
	return events, nil
}
