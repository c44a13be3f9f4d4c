package projector

import (
	"context"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A read model may go back to an earlier state, for example if Redis is killed before it has written its
// last changes. Its checkpoint and markers go back with it. Then the projector catches up with the log:
// events that are not applied any more are applied again, in order.

// reasonLost: the event had been applied, and the read model had lost it.
const reasonLost = "lost"

// beginRestored is called with the checkpoint before this reader begins.
func (r *reader) beginRestored(ctx context.Context, c provider.Checkpoint) error {
	if !c.Restored {
		return nil
	}
	head, err := r.log.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	r.restored, r.lost, r.cameAgain = true, max(r.lost, head), 0
	r.runner.cfg.Logger.Warn("the store of the read model was restarted or replaced: events that it has lost are applied again",
		"projector", r.name, "generation", r.serving.Generation, "position", c.Place.Position)
	return nil
}

// checkModel returns ErrFenced if the read model may have gone back. Units notice that themselves, but
// there may be none.
func (r *reader) checkModel(ctx context.Context) error {
	if _, ok := r.runner.store.(provider.Restorer); !ok {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	c, err := r.runner.store.Checkpoint(limited, r.build())
	if err == nil && (c.Restored || c.Token != r.at.Token) {
		err = provider.ErrFenced
	}
	return err
}

// countAgain reports events that were applied again. Events that were appended since the read model went
// back are not counted.
func (r *reader) countAgain(applied []*inbound) {
	if !r.restored && !r.restores {
		return
	}
	for _, m := range applied {
		if m.position > r.lost && !r.restores {
			continue
		}
		r.cameAgain++
		if r.runner.cfg.Observer.Completed != nil {
			r.runner.cfg.Observer.Completed(r.name, reasonLost)
		}
	}
}

// endRestored is called after each page: the end of the events that were lost.
func (r *reader) endRestored() {
	if r.restored && r.read >= r.lost {
		r.restored = false
		r.runner.cfg.Logger.Info("the read model has again what it had lost", "projector", r.name, "events", r.cameAgain)
	}
}

// restore applies events again that are recorded as parked, and were applied since: the read model has
// lost that. They are before the checkpoint, so the reader would not read them.
func (r *reader) restore(ctx, hard context.Context) error {
	s, ok := r.runner.store.(provider.Restorer)
	if !ok {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	ids, err := s.Lost(limited, r.build())
	if err != nil || len(ids) == 0 {
		return err
	}
	places, err := r.log.LogPlaces(limited, ids)
	if err != nil {
		return err
	}
	var events []eventstore.Raw
	for _, id := range ids {
		place, ok := places[id]
		if !ok {
			continue // the log was restored too
		}
		page, err := r.pageAfter(ctx, provider.LogQuery{After: place.Position - 1, Limit: 1, Unsettled: true})
		if err != nil {
			return err
		}
		if len(page.Events) > 0 && page.Events[0].ID == id {
			events = append(events, page.Events[0])
		}
	}
	r.restores = true
	defer func() { r.restores = false }()
	return r.complete(ctx, hard, events)
}
