package follow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Begin returns the checkpoint of a generation. If it has none, Begin creates it. For a program that
// feeds no generation, it only reads the id of the log, which deliveries require.
func (p *Post) Begin(ctx context.Context, g *generation.Row) (provider.Checkpoint, error) {
	ctx, cancel := p.Host.Limited(ctx)
	defer cancel()
	if g.Generation == 0 {
		return provider.Checkpoint{}, p.checkLog(ctx, provider.Checkpoint{})
	}
	for {
		c, err := p.Host.Store.Checkpoint(ctx, g.Build)
		if err != nil {
			return c, err
		}
		if c.Mode == provider.ModeEnded {
			return c, provider.ErrEnded
		}
		err = p.verifyLog(ctx, g.Build, c)
		if errors.Is(err, provider.ErrFenced) {
			continue
		}
		if c.Mode != 0 || err != nil {
			return c, err
		}
		if c.Place, err = p.Beginning(ctx, g.Source); err != nil {
			return c, err
		}
		if c.Place.Position == 0 && g.Source == 0 { // markers of other generations do not count
			if err := p.checkPruned(ctx); err != nil {
				return c, err
			}
		}
		c.Mode, c.Lineage = provider.ModeCatchUp, p.Host.LogID.Load().Lineage
		c.Handlers = p.Handlers.From(nil, c.Place.Position)
		created, err := p.Host.Store.SetCheckpoint(ctx, g.Build, provider.Checkpoint{}, c)
		if created || err != nil {
			return c, err
		}
	}
}

// Beginning returns the place after which a generation begins. That is the place after which its source
// began, or Options.From if it has no source.
func (p *Post) Beginning(ctx context.Context, source int) (provider.LogPlace, error) {
	from := p.Projector.Rules.From
	if source != 0 {
		c, err := p.Host.Store.Checkpoint(ctx, provider.Build{Projector: p.Projector.Name, Generation: source})
		if err != nil {
			return provider.LogPlace{}, err
		}
		for i, b := range c.Handlers {
			if i == 0 || b.Position < from.Position {
				from = eventstore.From{Position: b.Position}
			}
		}
	}
	return placeOf(ctx, p.Host.Log, from)
}

// checkPruned returns ErrPruned if markers of the projector were deleted by age: from the beginning
// it would apply their events again.
func (p *Post) checkPruned(ctx context.Context) error {
	var questions []provider.Question
	for _, handlers := range p.Projector.ByType {
		for _, h := range handlers {
			questions = append(questions, provider.Question{Handler: h.Name, Was: h.Was, MessageID: "\x00", RecordedAt: time.Unix(1, 0)})
		}
	}
	outcomes, err := p.Host.Store.Outcomes(ctx, questions)
	if err == nil && slices.Contains(outcomes, provider.OutcomePruned) {
		err = ErrPruned
	}
	return err
}

// ErrPruned: a new checkpoint would let events be applied twice.
var ErrPruned = errors.New("the projector has applied events without a log, and their markers were deleted by age: " +
	"set Options.From to where it begins to read the log, or Options.BrokerOnly")

// placeOf returns the place after which from begins. That of From.Now is settled: otherwise events
// of open appends would be missed. So it is before visible events that are behind an open append.
func placeOf(ctx context.Context, log provider.Log, from eventstore.From) (place provider.LogPlace, err error) {
	if from.Now {
		for q := (provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{}}}); ; q.After = place.Position {
			page, err := log.LogPage(ctx, q)
			if err != nil || page.End.Position == q.After {
				return place, err
			}
			place = page.End
		}
	}
	head, err := log.LogPosition(ctx, eventstore.From{Now: true})
	if err == nil {
		place.Position, err = log.LogPosition(ctx, from)
	}
	switch {
	case err != nil || place.Position == 0:
		return place, err
	case place.Position > head || from.Time.After(time.Now().Add(time.Minute)): //nolint:forbidigo // a minute is allowed for clocks that differ
		return place, &eventstore.InvalidError{Field: "options.From", Reason: "is after the end of the log: use From.Now for events that come"}
	}
	page, err := log.LogPage(ctx, provider.LogQuery{After: place.Position - 1, Limit: 1, Unsettled: true, NoData: true})
	if err == nil && len(page.Events) > 0 && page.Events[0].Position == place.Position {
		place = logPlace(page.Events[0])
	}
	return place, err
}

func logPlace(e eventstore.Raw) provider.LogPlace {
	return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

// verifyLog returns ErrLogChanged if the log is not the one of a checkpoint, or no longer has its event. If
// the store has another checkpoint by then, it returns ErrFenced: a failover or a restored backup may have
// taken the log and the read model back together.
func (p *Post) verifyLog(ctx context.Context, b provider.Build, c provider.Checkpoint) error {
	err := p.checkLog(ctx, c)
	if !errors.Is(err, model.ErrLogChanged) {
		return err
	}
	stored, readErr := p.Host.Store.Checkpoint(ctx, b)
	if readErr != nil {
		return readErr
	}
	stored = stored.InSegment(p.Segment)
	if stored.Lineage != c.Lineage || stored.Place.Position != c.Place.Position || stored.Place.ID != c.Place.ID {
		return provider.ErrFenced
	}
	return err
}

// checkLog returns ErrLogChanged if the log does not have what a checkpoint says.
func (p *Post) checkLog(ctx context.Context, c provider.Checkpoint) error {
	id, err := p.Host.ReadLogID(ctx)
	if err != nil {
		return err
	}
	if c.Lineage != "" && c.Lineage != id.Lineage {
		return fmt.Errorf("%w: the read model was built from log %s, and this is log %s", model.ErrLogChanged, c.Lineage, id.Lineage)
	}
	if c.Place.ID == "" {
		return nil
	}
	places, err := p.Host.Log.LogPlaces(ctx, []string{c.Place.ID})
	if err != nil || places[c.Place.ID].Position == c.Place.Position {
		return err
	}
	last, err := p.Host.Log.LogPosition(ctx, eventstore.From{Time: c.Place.RecordedAt})
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: it was probably restored from a backup: the effects of positions %d to %d have no event in it, "+
		"and events that it has at these positions now were not applied (the checkpoint is event %s at position %d)",
		model.ErrLogChanged, min(last, c.Place.Position-1)+1, c.Place.Position, c.Place.ID, c.Place.Position)
}
