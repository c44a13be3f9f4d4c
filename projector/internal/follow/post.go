// Package follow reads the log for a projector, and applies its events: it has the roles of a reader.
package follow

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/projector/internal/sent"
	"github.com/kinora-go/kinora/provider"
)

// Post is the checkpoint of a generation, or a segment of it: one program at a time moves it, under a lease. Each
// time that this program gets the lease, it gets a Reader.
type Post struct {
	Host      *model.Host
	Projector *model.Projector
	Handlers  *Handlers
	Current   *atomic.Pointer[generation.Row] // as this program knows it; it may become another generation
	Applier   *apply.Applier
	Turn      *sent.Turn
	Parked    *parked.Parked
	Missed    *Missed
	Resplit   model.Signal // sent when the segments have changed
	Segment   int          // its number; 0: all events, or none while there are segments
	Token     claim.Token
	Pace      func(*Reader) Pace // of a reader of a generation that is not live
	older     time.Time          // since when this program is older than the recorded one and could read
	closings  closings
}

// Lease returns the name of the lease of a post.
func (p *Post) Lease(g *generation.Row) string {
	if p.Segment == 0 {
		return "reader/" + g.String()
	}
	return SegmentLeases(g.Build) + strconv.Itoa(p.Segment)
}

// SegmentLeases returns the prefix of the names of all leases that concern the segments of a generation.
func SegmentLeases(b provider.Build) string { return "segments/" + b.String() + "/" }

// removeAfter is the number of leases after which a program records that handlers were removed.
const removeAfter = 2

// ErrOlder: a program with other handlers may be running that is newer than this one.
var ErrOlder = errors.New("handlers of another program are recorded")

// NotHeld is called when another program has the lease.
func (p *Post) NotHeld() { p.older = time.Time{} }

// Attach makes this program the one that moves the checkpoint, and records its handlers. If it does not have
// all recorded handlers, it may be an old one that was restarted during a deployment: then Attach returns
// ErrOlder, until no other program has taken the lease for some leases. A reader that it returns with an error must be
// detached too.
func (p *Post) Attach(ctx context.Context, g *generation.Row) (*Reader, error) {
	if p.Segment > 0 {
		return p.attachSegment(ctx, g)
	}
	c, err := p.Begin(ctx, g)
	if err == nil {
		err = p.mayRemove(p.Handlers.Removed(c.Handlers))
	}
	if err != nil {
		return nil, err
	}
	r := p.Open(g, c)
	if err := r.resetLost(ctx, g); err != nil {
		return nil, err
	}
	if c.Split().Count > 0 && !c.Restored && !p.Handlers.Match(c.Handlers) {
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
	to.Restored, to.Token, to.Handlers = false, p.Token, p.Handlers.From(c.Handlers, furthest(&c))
	if p.Projector.Rules.OnlyLog || !g.IsLive() {
		to.Mode = provider.ModeCatchUp
	}
	if err := r.set(ctx, to); err != nil {
		return nil, err
	}
	r.cursor.late = lateOf(&r.at)
	if err := r.setEarlier(ctx); err != nil {
		return r, err
	}
	if c.Token != (claim.Token{}) && c.Token != to.Token { // that reader did not detach
		r.suspects = model.MaxBatch
	}
	r.reportAdded(ctx, c.Handlers)
	return r, r.checkServing(ctx, g)
}

// mayRemove returns ErrOlder if this program may not record yet that handlers were removed.
func (p *Post) mayRemove(removed []string) error {
	if len(removed) == 0 {
		return nil
	}
	now := p.Host.Clock()
	if p.older.IsZero() {
		p.older = now
	}
	if now.Sub(p.older) < removeAfter*p.Host.Lease {
		return ErrOlder
	}
	p.Host.Logger.Warn("handlers were removed: they take no more events", "projector", p.Projector.Name, "handlers", removed)
	return nil
}

// Open returns a reader at a checkpoint, without a change of the store.
func (p *Post) Open(g *generation.Row, c provider.Checkpoint) *Reader {
	r := &Reader{Post: p, Build: g.Build, at: c, cursor: cursor{read: c.Place.Position, verified: p.Host.Clock()}}
	r.Progress = &Progress{host: p.Host, projector: p.Projector, current: p.Current, applied: g.Applied, seen: map[version]bool{}}
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
	if c.Restored || c.Restoring || !p.Handlers.Match(c.Handlers) {
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
	if err := r.verify(ctx); err != nil {
		return r, err
	}
	return r, r.checkServing(ctx, g)
}

// furthest returns the highest position of the checkpoint and its segments.
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
