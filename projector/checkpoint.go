package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// beginReading makes sure that each projector that reads the log has a checkpoint, before anything
// is applied: deliveries of a new projector are left to its reader. It waits for a store that does
// not reply.
func (r *Runner) beginReading(ctx context.Context) error {
	if c, ok := r.log.(provider.ReadyChecker); ok {
		if err := c.ReadyFor(ctx, provider.AnyService); err != nil {
			return err
		}
	}
	for _, p := range r.projections {
		if p.reader == nil && !r.src.isZero() && (p.opts.BrokerOnly || !p.opts.Markers) {
			c, err := r.store.Checkpoint(ctx, provider.Build{Projector: p.name})
			if err == nil && c.Mode != 0 {
				return fmt.Errorf("projector %s has a checkpoint, and no markers of events before it: "+
					"it cannot be BrokerOnly or without Markers, unless it reads FromLog", p.name)
			}
		}
		for tries := 1; p.reader != nil; tries++ {
			_, err := p.reader.begin(ctx, p.current.Load())
			if errors.Is(err, provider.ErrEnded) && !r.assigned { // it was retired since it was chosen
				if err = r.chooseFor(ctx, p); err == nil {
					continue
				}
			}
			if err == nil || ctx.Err() != nil {
				break
			}
			for _, final := range []error{ErrNoRebuild, provider.ErrEnded, ErrLogChanged, eventstore.ErrUnsafeLog, eventstore.ErrInvalid, errPruned} {
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

// begin returns the checkpoint of the projector. If it has none, begin creates it. For a program that
// feeds no generation, it only reads the id of the log, which deliveries require.
func (r *reader) begin(ctx context.Context, g *generation) (provider.Checkpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	if g.Generation == 0 {
		return provider.Checkpoint{}, r.checkLog(ctx, provider.Checkpoint{})
	}
	for {
		c, err := r.runner.store.Checkpoint(ctx, g.Build)
		if err != nil {
			return c, err
		}
		if c.Mode == provider.ModeEnded {
			return c, provider.ErrEnded
		}
		err = r.verify(ctx, g.Build, c)
		if errors.Is(err, provider.ErrFenced) {
			continue
		}
		if c.Mode != 0 || err != nil {
			return c, err
		}
		if c.Place, err = r.beginning(ctx, g.Source); err != nil {
			return c, err
		}
		if c.Place.Position == 0 && g.Source == 0 { // markers of other generations do not count
			if err := r.checkPruned(ctx); err != nil {
				return c, err
			}
		}
		c.Mode, c.Lineage = provider.ModeCatchUp, r.runner.logID.Load().Lineage
		c.Handlers = r.handlersFrom(nil, c.Place.Position)
		created, err := r.runner.store.SetCheckpoint(ctx, g.Build, provider.Checkpoint{}, c)
		if created || err != nil {
			return c, err
		}
	}
}

// beginning returns the place after which a generation begins. That is the place after which its source
// began, or Options.From if it has no source.
func (p *projection) beginning(ctx context.Context, source int) (provider.LogPlace, error) {
	from := p.opts.From
	if source != 0 {
		c, err := p.runner.store.Checkpoint(ctx, provider.Build{Projector: p.name, Generation: source})
		if err != nil {
			return provider.LogPlace{}, err
		}
		for i, b := range c.Handlers {
			if i == 0 || b.Position < from.Position {
				from = eventstore.From{Position: b.Position}
			}
		}
	}
	return p.reader.placeOf(ctx, from)
}

// checkPruned returns errPruned if markers of the projector were deleted by age: from the beginning
// it would apply their events again.
func (r *reader) checkPruned(ctx context.Context) error {
	var questions []provider.Question
	for _, handlers := range r.byType {
		for _, h := range handlers {
			questions = append(questions, provider.Question{Handler: h.Name, Was: h.Was, MessageID: "\x00", RecordedAt: time.Unix(1, 0)})
		}
	}
	outcomes, err := r.runner.store.Outcomes(ctx, questions)
	if err == nil && slices.Contains(outcomes, provider.OutcomePruned) {
		err = errPruned
	}
	return err
}

var errPruned = errors.New("the projector has applied events without a log, and their markers were deleted by age: " +
	"set Options.From to where it begins to read the log, or Options.BrokerOnly")

// placeOf returns the place after which from begins. That of From.Now is settled: otherwise events
// of open appends would be missed. So it is before visible events that are behind an open append.
func (r *reader) placeOf(ctx context.Context, from eventstore.From) (place provider.LogPlace, err error) {
	if from.Now {
		for q := (provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{}}}); ; q.After = place.Position {
			page, err := r.log.LogPage(ctx, q)
			if err != nil || page.End.Position == q.After {
				return place, err
			}
			place = page.End
		}
	}
	head, err := r.log.LogPosition(ctx, eventstore.From{Now: true})
	if err == nil {
		place.Position, err = r.log.LogPosition(ctx, from)
	}
	switch {
	case err != nil || place.Position == 0:
		return place, err
	case place.Position > head || from.Time.After(time.Now().Add(time.Minute)): //nolint:forbidigo // a minute is allowed for clocks that differ
		return place, &eventstore.InvalidError{Field: "options.From", Reason: "is after the end of the log: use From.Now for events that come"}
	}
	page, err := r.log.LogPage(ctx, provider.LogQuery{After: place.Position - 1, Limit: 1, Unsettled: true, NoData: true})
	if err == nil && len(page.Events) > 0 && page.Events[0].Position == place.Position {
		place = logPlace(page.Events[0])
	}
	return place, err
}

func logPlace(e eventstore.Raw) provider.LogPlace {
	return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

// verify returns ErrLogChanged if the log is not the one of a checkpoint, or no longer has its event. If
// the store has another checkpoint by then, it returns ErrFenced: a failover or a restored backup may have
// taken the log and the read model back together.
func (r *reader) verify(ctx context.Context, b provider.Build, c provider.Checkpoint) error {
	err := r.checkLog(ctx, c)
	if !errors.Is(err, ErrLogChanged) {
		return err
	}
	stored, readErr := r.runner.store.Checkpoint(ctx, b)
	if readErr != nil {
		return readErr
	}
	stored = stored.InSegment(r.segment)
	if stored.Lineage != c.Lineage || stored.Place.Position != c.Place.Position || stored.Place.ID != c.Place.ID {
		return provider.ErrFenced
	}
	return err
}

// checkLog returns ErrLogChanged if the log does not have what a checkpoint says.
func (r *reader) checkLog(ctx context.Context, c provider.Checkpoint) error {
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
		"and events that it has at these positions now were not applied (the checkpoint is event %s at position %d)",
		ErrLogChanged, min(last, c.Place.Position-1)+1, c.Place.Position, c.Place.ID, c.Place.Position)
}

// handlersFrom returns the handlers and types of this program. Those that are recorded keep the
// positions at which they began, and the others begin at a position.
func (r *reader) handlersFrom(recorded []provider.Began, position int64) (all []provider.Began) {
	began := map[named]int64{}
	for _, was := range recorded {
		for _, handler := range r.named[named{was.Type, was.Handler}] {
			began[named{was.Type, handler}] = was.Position
		}
	}
	for eventType, handlers := range r.byType {
		for _, h := range handlers {
			b := provider.Began{Handler: h.Name, Type: eventType, Position: position}
			if at, ok := began[named{eventType, h.Name}]; ok {
				b.Position = at
			}
			all = append(all, b)
		}
	}
	slices.SortFunc(all, provider.Began.Compare)
	return all
}

// named is a type of events, and the name of a handler that takes it.
type named struct{ eventType, handler string }

// namedBy returns which handlers have or had a name. There may be thousands.
func namedBy(byType map[string][]provider.Handler) map[named][]string {
	all := map[named][]string{}
	for eventType, handlers := range byType {
		for _, h := range handlers {
			for _, name := range h.Names() {
				all[named{eventType, name}] = append(all[named{eventType, name}], h.Name)
			}
		}
	}
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
	if r.segment > 0 {
		return r.attachSegment(ctx)
	}
	c, err := r.begin(ctx, r.serving)
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
	if err := r.resetLost(ctx, c); err != nil {
		return err
	}
	if c.Split().Count > 0 && !c.Restored && !r.hasHandlers(c.Handlers) {
		// Handlers begin and end at a position that all segments stand still at.
		if c, err = r.standStill(ctx, c); err != nil {
			return err
		}
	}
	to := c
	if c.Restored && c.Split().Count > 0 {
		to.Splits = splits(&c, 0)
	}
	if to.Lost, err = r.beginRestored(ctx, c); err != nil {
		return err
	}
	to.Restoring = c.Restoring || c.Restored
	to.Restored, to.Token, to.Handlers = false, r.terms.Token, r.handlersFrom(c.Handlers, furthest(&c))
	if r.isSource || !r.serving.isLive() {
		to.Mode = provider.ModeCatchUp
	}
	ok, err := r.runner.store.SetCheckpoint(ctx, r.build(), c, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return err
	}
	r.at, r.read, r.asked, r.next, r.verified, r.server = to, to.Place.Position, 0, nil, now, ""
	r.applied, r.chases, r.atHead = r.serving.Applied, false, false
	r.stood, r.retrying = time.Time{}, time.Time{}
	clear(r.waiting)
	r.nearEnd, r.endSeen, r.late = false, time.Time{}, lateOf(&to)
	if err := r.setEarlier(ctx); err != nil {
		return err
	}
	r.moved = now.Add(limitAge + limitAge/4 - busyAge)     // busy until trail has looked at the live generation twice
	if c.Token != (claim.Token{}) && c.Token != to.Token { // that reader did not detach
		r.suspects = maxBatch
	}
	r.reportAdded(ctx, c.Handlers)
	return r.checkServing(ctx)
}

// standStill ends the current split of a checkpoint. Its segments do not move any more.
func (r *reader) standStill(ctx context.Context, c provider.Checkpoint) (provider.Checkpoint, error) {
	to := c
	to.Splits = splits(&c, 0)
	ok, err := r.runner.store.SetCheckpoint(ctx, r.build(), c, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return c, err
	}
	return r.runner.store.Checkpoint(ctx, r.build())
}

// furthest returns the highest position of the checkpoint and its segments.
func furthest(c *provider.Checkpoint) int64 {
	position := c.Place.Position
	for _, is := range c.Segments {
		position = max(position, is.Place.Position)
	}
	return position
}

// checkServing returns ErrFenced if the generation has become live, or is no longer live, and this
// program has not noticed yet. A later change makes the units of this reader fail.
func (r *reader) checkServing(ctx context.Context) error {
	g, err := r.runner.generation(ctx, r.serving.Build)
	if err == nil && g.isLive() != r.serving.isLive() {
		r.runner.followNow()
		err = provider.ErrFenced
	}
	return err
}

// detach records that this reader ended cleanly, and releases its lease. If that fails, the lease
// expires, and the next reader suspects the next events of having crashed this one.
func (r *reader) detach(ctx context.Context) {
	if r.segment > 0 {
		r.detachSegment(ctx)
		return
	}
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if to := r.at; to.Token == r.terms.Token {
		to.Token = claim.Token{}
		_, _ = r.runner.store.SetCheckpoint(limited, r.build(), r.at, to)
	}
	r.at = provider.Checkpoint{}
	r.runner.release(ctx, r.lease, r.terms)
}

// removed returns the recorded handlers and types that this program does not have.
func (r *reader) removed(recorded []provider.Began) (missing []string) {
	for _, was := range recorded {
		if len(r.named[named{was.Type, was.Handler}]) == 0 {
			missing = append(missing, was.Handler+" "+was.Type)
		}
	}
	return missing
}

// reportAdded logs how many earlier events the handlers that begin now do not get. It counts up to
// 10,000 of each type.
func (r *reader) reportAdded(ctx context.Context, recorded []provider.Began) {
	if len(recorded) == 0 {
		return
	}
	had := map[named]bool{}
	for _, was := range recorded {
		for _, handler := range r.named[named{was.Type, was.Handler}] {
			had[named{was.Type, handler}] = true
		}
	}
	const most = 10_000
	counted := map[string]int{}
	for _, b := range r.at.Handlers {
		if b.Position != r.at.Place.Position || had[named{b.Type, b.Handler}] {
			continue
		}
		missed, ok := counted[b.Type]
		for q := (provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{b.Type}}, Limit: most, NoData: true}); !ok && missed < most; {
			page, err := r.pageAfter(ctx, q)
			if err != nil {
				return
			}
			for _, e := range page.Events {
				if e.Position <= b.Position {
					missed++
				}
			}
			if page.End.Position <= q.After || page.End.Position >= b.Position {
				break
			}
			q.After = page.End.Position
		}
		if counted[b.Type] = missed; missed > 0 {
			r.runner.cfg.Logger.Warn("a new handler does not get earlier events: rebuild the projector to apply them",
				"projector", r.name, "handler", b.Handler, "type", b.Type, "events", missed, "or_more", missed >= most)
		}
	}
}

// setMode changes the mode of the checkpoint, after open units have ended.
func (r *reader) setMode(ctx context.Context, mode provider.Mode) error {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	to := r.at
	to.Mode = mode
	ok, err := r.runner.store.SetCheckpoint(ctx, r.build(), r.at, to)
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
