package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// beginReading makes sure that each projector that reads the log has a checkpoint, before anything
// is applied: deliveries of a new projector are left to its reader. It waits for a store that does
// not reply.
func (r *Runner) beginReading(ctx context.Context) error {
	for _, p := range r.projections {
		for tries := 1; p.reader != nil; tries++ {
			_, err := p.reader.begin(ctx)
			if err == nil || ctx.Err() != nil {
				break
			}
			for _, final := range []error{ErrLogChanged, eventstore.ErrUnsafeLog, eventstore.ErrInvalid} {
				if errors.Is(err, final) {
					return fmt.Errorf("projector %s: %w", p.name, err)
				}
			}
			delay, _ := r.cfg.Retry.Delay(tries)
			r.report(slog.LevelWarn, "checkpoint not read", err, "projector", p.name, "again_in", delay)
			wait(ctx, delay)
		}
	}
	return nil
}

// begin returns the checkpoint of the projector. If it has none, begin creates it.
func (r *reader) begin(ctx context.Context) (provider.Checkpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	for {
		c, err := r.runner.store.Checkpoint(ctx, r.name)
		if err != nil {
			return c, err
		}
		if c.Mode != 0 {
			return c, r.verify(ctx, c)
		}
		if err := r.verify(ctx, c); err != nil {
			return c, err
		}
		if c.Place, err = r.placeOf(ctx, r.opts.From); err != nil {
			return c, err
		}
		c.Mode, c.Lineage = provider.ModeCatchUp, r.runner.logID.Load().Lineage
		c.Handlers = r.handlersFrom(nil, c.Place.Position)
		created, err := r.runner.store.SetCheckpoint(ctx, r.name, provider.Checkpoint{}, c)
		if created || err != nil {
			return c, err
		}
	}
}

// placeOf returns the place after which from begins.
func (r *reader) placeOf(ctx context.Context, from eventstore.From) (place provider.LogPlace, err error) {
	if place.Position, err = r.log.LogPosition(ctx, from); err != nil || place.Position == 0 {
		return place, err
	}
	page, err := r.log.LogPage(ctx, provider.LogQuery{After: place.Position - 1, Limit: 1, NoData: true})
	if err == nil && len(page.Events) > 0 && page.Events[0].Position == place.Position {
		place.ID, place.RecordedAt = page.Events[0].ID, page.Events[0].RecordedAt
	}
	return place, err
}

// verify returns ErrLogChanged if the log is not the one of the checkpoint, or no longer has its
// event.
func (r *reader) verify(ctx context.Context, c provider.Checkpoint) error {
	id, err := r.log.LogID(ctx)
	if err != nil {
		return err
	}
	r.runner.logID.Store(&id)
	if c.Lineage != "" && c.Lineage != id.Lineage {
		return fmt.Errorf("%w: the read model was built from log %s, and this is log %s", ErrLogChanged, c.Lineage, id.Lineage)
	}
	if c.Place.ID == "" {
		return nil
	}
	places, err := r.log.LogPlaces(ctx, []string{c.Place.ID})
	if err != nil || places[c.Place.ID].Position == c.Place.Position {
		return err
	}
	last, err := r.log.LogPosition(ctx, eventstore.From{Time: c.Place.RecordedAt})
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: it was probably restored from a backup: the effects of positions %d to %d have no event in it, "+
		"and events at these positions were not applied (the checkpoint is event %s at position %d)",
		ErrLogChanged, min(last, c.Place.Position-1)+1, c.Place.Position, c.Place.ID, c.Place.Position)
}

// handlersFrom returns the handlers and types of this program. Those that are recorded keep the
// positions at which they began, and the others begin at a position.
func (r *reader) handlersFrom(recorded []provider.Began, position int64) (all []provider.Began) {
	for eventType, handlers := range r.byType {
		for _, h := range handlers {
			b := provider.Began{Handler: h.Name, Type: eventType, Position: position}
			for _, was := range recorded {
				if was.Type == eventType && slices.Contains(h.Names(), was.Handler) {
					b.Position = was.Position
				}
			}
			all = append(all, b)
		}
	}
	slices.SortFunc(all, provider.Began.Compare)
	return all
}

// removeAfter is the number of leases after which a program records that handlers were removed.
const removeAfter = 2

// errOlder: a program with other handlers may be running that is newer than this one.
var errOlder = errors.New("handlers of another program are recorded")

// attach makes this reader the one that moves the checkpoint, and records the handlers of this
// program. If this program does not have all recorded handlers, it may be an old one that was
// restarted during a deployment: then attach returns errOlder, until no other reader has taken the
// lease for some leases.
func (r *reader) attach(ctx context.Context) error {
	c, err := r.begin(ctx)
	if err != nil {
		return err
	}
	now := r.runner.cfg.Clock()
	if removed := r.removed(c.Handlers); len(removed) > 0 {
		if r.older.IsZero() {
			r.older = now
		}
		if now.Sub(r.older) < removeAfter*r.runner.cfg.Lease {
			return errOlder
		}
		r.runner.cfg.Logger.Warn("handlers were removed: they take no more events", "projector", r.name, "handlers", removed)
	}
	to := c
	to.Token, to.Handlers = r.terms.Token, r.handlersFrom(c.Handlers, c.Place.Position)
	if r.isSource {
		to.Mode = provider.ModeCatchUp
	}
	ok, err := r.runner.store.SetCheckpoint(ctx, r.name, c, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return err
	}
	r.at, r.read, r.asked, r.next, r.verified = to, to.Place.Position, 0, nil, now
	if r.suspects = 0; c.Token != (claim.Token{}) && c.Token != to.Token { // that reader did not detach
		r.suspects = maxBatch
	}
	r.reportAdded(ctx, c.Handlers)
	return nil
}

// detach records that this reader ended cleanly, and releases its lease. If that fails, the lease
// expires, and the next reader suspects the next events of having crashed this one.
func (r *reader) detach(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	to := r.at
	to.Token = claim.Token{}
	if r.at.Token == r.terms.Token {
		_, _ = r.runner.store.SetCheckpoint(ctx, r.name, r.at, to)
	}
	r.at = provider.Checkpoint{}
	_ = r.runner.store.ReleaseLease(ctx, r.leaseName(), r.terms.Token)
}

// removed returns the recorded handlers and types that this program does not have.
func (r *reader) removed(recorded []provider.Began) (missing []string) {
	for _, was := range recorded {
		has := slices.ContainsFunc(r.byType[was.Type], func(h provider.Handler) bool { return slices.Contains(h.Names(), was.Handler) })
		if !has {
			missing = append(missing, was.Handler+" "+was.Type)
		}
	}
	return missing
}

// reportAdded logs how many earlier events the handlers that begin now do not get.
func (r *reader) reportAdded(ctx context.Context, recorded []provider.Began) {
	isNew := func(b provider.Began) bool {
		return !slices.ContainsFunc(recorded, func(was provider.Began) bool {
			return was.Type == b.Type && was.Position == b.Position
		})
	}
	for _, b := range r.at.Handlers {
		if len(recorded) == 0 || b.Position == 0 || b.Position != r.at.Place.Position || !isNew(b) {
			continue
		}
		const most = 10_000
		page, err := r.pageAfter(ctx, provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{b.Type}}, Limit: most, NoData: true})
		missed := slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return e.Position > b.Position })
		if err == nil && len(missed) > 0 {
			r.runner.cfg.Logger.Warn("a new handler does not get earlier events: rebuild the projector to apply them",
				"projector", r.name, "handler", b.Handler, "type", b.Type, "events", len(missed), "or_more", len(missed) == most)
		}
	}
}

// setMode changes the mode of the checkpoint, after open units have ended.
func (r *reader) setMode(ctx context.Context, mode provider.Mode) error {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	to := r.at
	to.Mode = mode
	ok, err := r.runner.store.SetCheckpoint(ctx, r.name, r.at, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return err
	}
	r.at = to
	switch {
	case mode == provider.ModeCatchUp && !r.isSource:
		r.runner.cfg.Logger.Info("the projector catches up with the log", "projector", r.name, "position", r.read)
	case mode == provider.ModeLive && r.read > 0:
		r.runner.cfg.Logger.Info("the projector is live", "projector", r.name, "position", r.read)
	}
	return nil
}

var errWaitsForReader = &Error{
	Class: ClassTransient, Code: provider.CodeClosing, Err: errors.New("the event waits until the projector is live"),
}
