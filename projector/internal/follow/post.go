// Package follow reads the log for a projector, and applies its events: it has the roles of a reader.
package follow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/provider"
)

// Post is the checkpoint of a generation, or a segment of it: one program at a time moves it, under a lease. Each
// time that this program gets the lease, it gets a Reader.
type Post struct {
	Host      *model.Host
	Projector *model.Projector
	Current   *atomic.Pointer[generation.Row] // as this program knows it; it may become another generation
	Applier   *apply.Applier
	Parked    *parked.Parked
	Missed    *Missed
	Yield     *Yield
	Resplit   pauses.Signal // sent when the segments have changed
	Segment   int           // its number; 0: all events, or none while there are segments
	Token     claim.Token
	Pace      func(*Reader) Pace // of a reader of a generation that is not live
	closings  closings
}

// Lease returns the name of the lease of a post.
func (p *Post) Lease(g *generation.Row) string {
	if p.Segment == 0 {
		return ReaderLease + g.String()
	}
	return SegmentLeases(g.Build) + strconv.Itoa(p.Segment)
}

func (p *Post) handlers() Handlers { return HandlersOf(p.Projector) }

// Beginnings of the names of leases. The name of the projector, or of its generation, follows.
const (
	ReaderLease  = "reader/"
	SegmentLease = "segments/"
	VerifyLease  = "verify/"
)

// SegmentLeases returns the prefix of the names of all leases that concern the segments of a generation.
func SegmentLeases(b provider.Build) string { return SegmentLease + b.String() + "/" }

// Attach makes this program the one that moves the checkpoint, and records its handlers. A reader that it returns with an
// error must be detached too.
func (p *Post) Attach(ctx context.Context, g *generation.Row) (*Reader, error) {
	if p.Segment > 0 {
		return p.attachSegment(ctx, g)
	}
	c, err := p.Begin(ctx, g)
	if err != nil {
		return nil, err
	}
	r := p.Open(g, c)
	if err := r.resetLost(ctx, g); err != nil {
		return nil, err
	}
	change := len(p.handlers().merge(c.Handlers, g.Coming, 0)) > len(c.Handlers) || !p.handlers().Match(c.Handlers)
	if change && c.Split().Count > 0 && !c.Restored {
		// Handlers begin and end at a position that all segments stand still at.
		if err := r.standStill(ctx); err != nil {
			return nil, err
		}
	}
	c = r.at
	to := c
	if c.Restored && c.Split().Count > 0 {
		to.Splits = splits(&c, 0)
	}
	if to.Lost, err = r.beginRestored(ctx, g); err != nil {
		return nil, err
	}
	to.Restoring = c.Restoring || c.Restored
	position := furthest(&c)
	to.Restored, to.Token, to.Handlers = false, p.Token, p.handlers().From(p.handlers().merge(c.Handlers, g.Coming, position), position)
	if p.Projector.Rules.OnlyLog || !g.IsLive() {
		to.Mode = provider.ModeCatchUp
	}
	if err := r.set(ctx, to); err != nil {
		return nil, err
	}
	r.cursor.late, r.lacking = lateOf(&r.at), p.handlers().Lacking(to.Handlers)
	if err := r.clearComing(ctx, g); err != nil {
		return r, err
	}
	if err := r.setEarlier(ctx); err != nil {
		return r, err
	}
	if c.Token != (claim.Token{}) && c.Token != to.Token { // that reader did not detach
		r.suspects = model.MaxBatch
	}
	r.reportAdded(ctx, c.Handlers)
	return r, r.checkServing(ctx, g)
}

// Open returns a reader at a checkpoint, without a change of the store.
func (p *Post) Open(g *generation.Row, c provider.Checkpoint) *Reader {
	r := &Reader{Post: p, Build: g.Build, at: c, lacking: p.handlers().Lacking(c.Handlers), cursor: cursor{read: c.Place.Position, verified: p.Host.Clock()}}
	r.Progress = &Progress{host: p.Host, projector: p.Projector, current: p.Current, Applied: g.Applied, seen: map[version]bool{}}
	if p.Pace != nil && !g.IsLive() {
		r.Pace = p.Pace(r)
	}
	return r
}

// attachSegment is Attach for a segment.
func (p *Post) attachSegment(ctx context.Context, g *generation.Row) (*Reader, error) {
	limited, cancel := p.Host.Limited(ctx)
	defer cancel()
	c, err := p.Host.Store.Checkpoint(limited, g.Build)
	if err != nil {
		return nil, err
	}
	if c.Restored || c.Restoring || !p.handlers().Match(c.Handlers) {
		return nil, provider.ErrFenced
	}
	was, ok, err := p.Host.Store.TakeSegment(limited, g.Build, p.Segment, p.Token)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return nil, err
	}
	at := c
	at.Place, at.Token = was.Place, p.Token
	r := p.Open(g, at)
	r.cursor.late = lateOf(&at)
	if len(c.Splits) > 1 {
		r.cursor.before = &provider.Checkpoint{Splits: c.Splits[1:], Segments: c.Segments}
	}
	if was.Token != (claim.Token{}) && was.Token != p.Token { // that reader did not detach
		r.suspects = model.MaxBatch
	}
	if err := r.verifyLog(ctx, r.Build, r.at); err != nil {
		return r, err
	}
	return r, r.checkServing(ctx, g)
}

func furthest(c *provider.Checkpoint) int64 {
	position := c.Place.Position
	for _, s := range c.Segments {
		position = max(position, s.Place.Position)
	}
	return position
}

// checkServing returns ErrFenced if the generation has become live, or is no longer live, and this
// program has not noticed yet. A later change makes the units of this reader fail.
func (r *Reader) checkServing(ctx context.Context, g *generation.Row) error {
	now, err := r.Host.Generation(ctx, g.Build)
	if err == nil && now.IsLive() != g.IsLive() {
		r.Host.Follow.Send()
		err = provider.ErrFenced
	}
	return err
}

// Detach records that this reader ended cleanly. If that fails, the next reader suspects the next events
// of having crashed this one. The lease must still be held.
func (r *Reader) Detach(ctx context.Context) {
	r.cursor.wait()
	r.Progress.flush(ctx, r.Build)
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if r.at.Token != r.Token {
		return
	}
	if r.Segment == 0 {
		to := r.at
		to.Token = claim.Token{}
		_, _ = r.Host.Store.SetCheckpoint(limited, r.Build, r.at, to)
		return
	}
	terms := claim.Terms{Holder: r.Host.ID, Token: r.Token, Lease: r.Host.Lease}
	if has, err := r.Host.Store.AcquireLease(limited, r.Lease(&generation.Row{Build: r.Build}), terms); err == nil && has {
		_, _, _ = r.Host.Store.TakeSegment(limited, r.Build, r.Segment, claim.Token{})
	}
}

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
		if c.Place.Position == 0 && g.Generation == 1 { // markers of other generations do not count
			if err := p.checkPruned(ctx); err != nil {
				return c, err
			}
		}
		c.Mode, c.Lineage = provider.ModeCatchUp, p.Host.LogID.Load().Lineage
		recorded, err := p.sourceHandlers(ctx, g, c.Place.Position)
		if err != nil {
			return c, err
		}
		c.Handlers = p.handlers().From(recorded, c.Place.Position)
		created, err := p.Host.Store.SetCheckpoint(ctx, g.Build, provider.Checkpoint{}, c)
		if created || err != nil {
			return c, err
		}
	}
}

// sourceHandlers returns the handlers of the generation that a new one replaces, if both are of one version of the program: this may be
// an older program, which lacks some of them.
func (p *Post) sourceHandlers(ctx context.Context, g *generation.Row, position int64) ([]provider.Began, error) {
	if g.Source == 0 {
		return nil, nil
	}
	was, err := p.Host.Generation(ctx, provider.Build{Projector: g.Projector, Generation: g.Source})
	if err != nil || was.Newest != g.Newest {
		return nil, err
	}
	c, err := p.Host.Store.Checkpoint(ctx, was.Build)
	for i := range c.Handlers {
		c.Handlers[i].Position = position
	}
	return c.Handlers, err
}

// Announce tells the reader of a generation which handlers of this program the checkpoint lacks. It may belong to an older
// program, and leaves their events to this one from then on.
func (p *Post) Announce(ctx context.Context, b provider.Build) error {
	for {
		limited, cancel := p.Host.Limited(ctx)
		c, err := p.Host.Store.Checkpoint(limited, b)
		cancel()
		added := p.handlers().Added(c.Handlers)
		if err != nil || c.Mode == 0 || len(added) == 0 {
			return err
		}
		g, err := p.Host.Generation(ctx, b)
		if err != nil {
			return err
		}
		all := p.handlers().merge(g.Coming, added, 0)
		if len(all) == len(g.Coming) {
			return nil
		}
		limited, cancel = p.Host.Limited(ctx)
		changed, err := generation.Change(limited, p.Host.Store, g, func(g *generation.Row) { g.Coming = all })
		cancel()
		if changed || err != nil {
			return err
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
