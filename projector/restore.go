package projector

import (
	"context"
	"slices"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A read model may go back to an earlier state, for example if Redis is killed before it has written its
// last changes. Its checkpoint and markers go back with it. Then the projector catches up with the log:
// events that are not applied any more are applied again, in order.

// reasonLost: the event had been applied, and the read model had lost it.
const reasonLost = "lost"

// beginRestored is called with the checkpoint before this reader begins. It returns the position up to
// which events may have been applied before, or 0.
func (r *reader) beginRestored(ctx context.Context, c provider.Checkpoint) (lost int64, err error) {
	_, mayGoBack := r.runner.store.(provider.Restorer)
	r.unshown, r.cameAgain, r.skips = mayGoBack && r.showsTables(), 0, nil
	if lost = c.Lost; c.Restored {
		head, err := r.log.LogPosition(ctx, eventstore.From{Now: true})
		if err != nil {
			return 0, err
		}
		lost = max(lost, head)
		r.runner.cfg.Logger.Warn("the store of the read model was restarted or replaced: events that it may have lost are applied again",
			"projector", r.name, "generation", r.serving.Generation, "position", c.Place.Position)
	}
	if lost > c.Place.Position {
		r.skips, err = r.skippedIn(ctx, r.serving)
	}
	return lost, err
}

// resetLost empties the read model if it has gone back to a time before it was rebuilt in place: it has the
// events of an earlier generation then, and none of the checkpoint of this one.
func (r *reader) resetLost(ctx context.Context, c provider.Checkpoint) error {
	if !c.Restored || c.Place.ID != "" || c.Token != (claim.Token{}) {
		return nil
	}
	all, err := r.runner.generationsOf(ctx, r.name)
	if err != nil {
		return err
	}
	for _, g := range all {
		if g.Build == r.serving.Build || g.Suffix != r.serving.Suffix {
			continue
		}
		is, err := r.runner.store.Checkpoint(ctx, g.Build)
		if err != nil {
			return err
		}
		if is.Mode == 0 || is.Mode == provider.ModeEnded {
			continue
		}
		if !r.resets {
			return refuse("the read model has gone back to generation %d, and the projector has no OnReset: delete its keys", g.Generation)
		}
		return r.alone(ctx, r.serving, reset, provider.Switch{})
	}
	return nil
}

// isRestored reports whether the read model has less than it had.
func (r *reader) isRestored() bool { return r.at.Lost > r.at.Place.Position }

// showsTables reports whether readers find the tables of the generation by their plain names.
func (r *reader) showsTables() bool { return r.serving.isLive() && r.serving.Suffix != "" }

// checkModel returns ErrFenced if the read model may have gone back. Units notice that themselves, but
// there may be none.
func (r *reader) checkModel(ctx context.Context) error {
	s, ok := r.runner.store.(provider.Restorer)
	if !ok {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	c, err := r.runner.store.Checkpoint(limited, r.build())
	if err == nil && (c.Restored || c.InSegment(r.segment).Token != r.at.Token) {
		err = provider.ErrFenced
	}
	if err == nil && r.showsTables() && !r.unshown {
		var shows bool
		shows, err = s.Shows(limited, r.shown(r.serving.Suffix))
		r.unshown = err == nil && !shows
	}
	return err
}

// countAgain reports events that were applied again. Events that were appended since the read model went
// back are not counted.
func (r *reader) countAgain(applied []*inbound) {
	for _, m := range applied {
		if m.position > r.at.Lost && !r.restores {
			continue
		}
		r.cameAgain++
		if r.runner.cfg.Observer.Completed != nil {
			r.runner.cfg.Observer.Completed(r.name, reasonLost)
		}
	}
}

// endRestored is called after each page: the end of the events that were lost.
func (r *reader) endRestored(was bool) {
	if was && !r.isRestored() {
		r.skips = nil
		r.runner.cfg.Logger.Info("the read model has again what it had lost", "projector", r.name, "events", r.cameAgain)
	}
}

// showLive shows the tables of the live generation, because the store may have lost which these are. It
// does so once for each reader, when the events that were lost are applied again.
func (r *reader) showLive(ctx, hard context.Context) error {
	if !r.unshown || r.isRestored() {
		return nil
	}
	err := r.alone(hard, r.serving, "", provider.Switch{
		Show: r.shown(r.serving.Suffix),
		Last: func(_ context.Context, live provider.Live) ([]provider.Message, error) {
			if live.Checkpoint.Generation != r.serving.Generation {
				return nil, &Error{Class: ClassTransient, Code: provider.CodeFenced, Err: provider.ErrFenced}
			}
			return nil, nil
		},
	})
	if provider.CodeOf(err) == provider.CodeBusy {
		wait(ctx, followFast)
		return nil
	}
	r.unshown = err != nil
	return err
}

// restorePage is the most events that restore looks up at a time.
const restorePage = 500

// restore applies events again that are recorded as parked, and were applied since: the read model has
// lost that. They are before the checkpoint, so the reader would not read them.
func (r *reader) restore(ctx, hard context.Context) error {
	s, ok := r.runner.store.(provider.Restorer)
	if !ok {
		return nil
	}
	if r.at.Restoring {
		if err := r.dropAhead(ctx, s); err != nil {
			return err
		}
	}
	r.restores = true
	defer func() { r.restores = false }()
	n := 0
	err := r.eachLost(ctx, s, func(events []eventstore.Raw) error {
		n += len(events)
		return r.complete(ctx, hard, events)
	})
	if n > 0 {
		r.runner.cfg.Logger.Info("events that were parked, and applied since, are applied again", "projector", r.name, "events", n)
	}
	if err != nil || !r.at.Restoring {
		return err
	}
	to := r.at
	to.Restoring = false
	set, err := r.runner.store.SetCheckpoint(ctx, r.build(), r.at, to)
	if err == nil && !set {
		err = provider.ErrFenced
	}
	if err == nil {
		r.at = to
	}
	return err
}

// dropAhead deletes parked messages that the log or restore apply again. They may have been parked before
// messages that were lost and come again now, and would be applied before them.
func (r *reader) dropAhead(ctx context.Context, s provider.Restorer) error {
	drop := func(lost map[provider.Lane]bool) error {
		limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
		defer cancel()
		return s.DropAhead(limited, r.build(), r.at.Place.Position, lost)
	}
	if err := drop(nil); err != nil {
		return err
	}
	lost := map[provider.Lane]bool{}
	err := r.eachLost(ctx, s, func(events []eventstore.Raw) error {
		for _, m := range r.messages(events) {
			lost[m.lane] = true
		}
		return nil
	})
	if err != nil || len(lost) == 0 {
		return err
	}
	return drop(lost)
}

// eachLost calls f with pages of the events that the read model has lost, and that are recorded as parked.
func (r *reader) eachLost(ctx context.Context, s provider.Restorer, f func([]eventstore.Raw) error) error {
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	ids, err := s.Lost(limited, r.build())
	cancel()
	if err != nil {
		return err
	}
	for page := range slices.Chunk(ids, restorePage) {
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

// canReplay reports whether parked messages can be applied now.
func (p *projection) canReplay(ctx context.Context) bool {
	s, ok := p.runner.store.(provider.Restorer)
	if !ok {
		return true
	}
	limited, cancel := context.WithTimeout(ctx, p.runner.cfg.Timeout)
	defer cancel()
	can, err := s.CanReplay(limited, p.build())
	return err == nil && can
}

// eventsOf returns the events with these ids, as far as the log has them.
func (r *reader) eventsOf(ctx context.Context, ids []string) (events []eventstore.Raw, err error) {
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	places, err := r.log.LogPlaces(limited, ids)
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		if places[id].Position == 0 {
			continue // the log was restored too
		}
		page, err := r.pageAfter(ctx, provider.LogQuery{After: places[id].Position - 1, Limit: 1, Unsettled: true})
		if err != nil {
			return nil, err
		}
		if len(page.Events) > 0 && page.Events[0].ID == id {
			events = append(events, page.Events[0])
		}
	}
	return events, nil
}
