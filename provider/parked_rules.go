package provider

import (
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// The functions of this file are the rules of parked messages and generations for stores that apply them
// row by row, in a transaction. now is the store's time.

// Selects reports whether f selects p, apart from f.After and f.Limit.
func (f *ParkedFilter) Selects(p *Parked) bool {
	return slices.Contains(f.InStates(), p.State) &&
		(f.Projector == "" || p.Projector == f.Projector) &&
		(f.Generation == 0 || p.Generation == f.Generation) &&
		(f.Handler == "" || p.Handler == f.Handler) &&
		(f.Key == "" || p.Key == f.Key) &&
		(f.Class == nil || p.Class == *f.Class) &&
		(f.Code == "" || p.Code == f.Code) &&
		(f.Types == nil || slices.Contains(f.Types, p.Type)) &&
		(f.Seqs == nil || slices.Contains(f.Seqs, p.Seq))
}

// IsDue reports whether p, which is the first message of its lane, can be tried.
func (p *Parked) IsDue(now time.Time) bool { return !p.DueAt.IsZero() && !p.DueAt.After(now) }

// Due returns the messages of a build that f selects. firsts are the first messages of all its lanes, and
// lane returns the first messages of a lane, at most n.
func (f *DueFilter) Due(firsts []Parked, lane func(first Parked, n int) []Parked, now time.Time) (due []Parked) {
	firsts = slices.DeleteFunc(firsts, func(p Parked) bool {
		return !p.IsDue(now) || f.Lanes != nil && !slices.Contains(f.Lanes, p.Lane)
	})
	slices.SortStableFunc(firsts, func(a, b Parked) int { return a.DueAt.Compare(b.DueAt) })
	for _, first := range firsts[:min(f.Keys, len(firsts))] {
		for i, p := range lane(first, f.Each) {
			waits := p.Class == ClassHeld && p.State == StateWaiting
			if i == 0 || waits {
				p.DueAt = first.DueAt
				due = append(due, p)
			}
			if !waits {
				break
			}
		}
	}
	return due
}

// Try is the rule of Parking.Try. p is the first message of its lane, which Due returned as listed. It returns
// whether p can be tried, and whether p was changed.
func (p *Parked) Try(listed *Parked, limit int, again time.Duration, now time.Time) (ok, changed bool) {
	if !p.IsDue(now) || p.Seq != listed.Seq || !p.Unchanged(listed) {
		return false, false
	}
	if limit >= 0 && p.Attempts >= limit {
		p.Wait(-1, now)
		return false, true
	}
	p.Attempts++
	p.Wait(again, now)
	return true, true
}

// Wait makes p a message that may be tried after this time from now, once it is the first of its lane. If
// after is negative, it is stuck.
func (p *Parked) Wait(after time.Duration, now time.Time) {
	if p.State, p.DueAt = StateWaiting, now.Add(after); after < 0 {
		p.State, p.DueAt = StateStuck, time.Time{}
	}
}

// Fail gives p what a unit has set in an Aside.
func (p *Parked) Fail(as Parked) {
	p.Class, p.Code, p.Error, p.Attempts, p.Handler, p.Version = as.Class, as.Code, as.Error, as.Attempts, as.Handler, as.Version
	if len(as.Handlers) > 0 {
		p.Handlers = slices.Clone(as.Handlers)
	}
}

// AddHandlers adds the handlers of a delivery to those of the same message, which is parked.
func (p *Parked) AddHandlers(handlers []string) {
	isThere := func(handler string) bool { return slices.Contains(p.Handlers, handler) }
	p.Handlers = slices.Concat(p.Handlers, slices.DeleteFunc(slices.Clone(handlers), isThere))
}

// Facts are what a store knows about the message of a Question.
type Facts struct {
	Parked     *Parked // the message, if it is parked or skipped
	First      *Parked // the first message of its lane
	Checkpoint Checkpoint
	// Marked reports whether a handler has a marker of the message.
	Marked func(handler string) bool
	// Pruned returns the time up to which markers of a handler may have been deleted.
	Pruned func(handler string) time.Time
}

// Outcome returns the answer.
func (q *Question) Outcome(f Facts) Outcome {
	names := q.Names()
	if p := f.Parked; p != nil {
		isAsked := func(handler string) bool { return slices.Contains(names, handler) }
		switch {
		case len(p.Handlers) > 0 && !slices.ContainsFunc(p.Handlers, isAsked): // parked for other handlers
		case p.State == StateSkipped:
			return OutcomeSkipped
		case p.State == StateStuck, f.First.State == StateStuck:
			return OutcomeStuck
		default:
			return OutcomeWaiting
		}
	}
	isPlaced := q.Position > 0 && f.Checkpoint.Mode != 0
	if isPlaced && q.Position <= f.Checkpoint.Place.Position || slices.ContainsFunc(names, f.Marked) {
		return OutcomeApplied
	}
	recorded, _ := StoredTime(q.RecordedAt)
	for _, name := range names {
		if !isPlaced && !recorded.IsZero() && !recorded.After(f.Pruned(name)) {
			return OutcomePruned
		}
	}
	return OutcomeUnseen
}

// Replaces returns g as SetGeneration stores it in the place of was, which is zero if there is none. Its
// revision was compared (CanSet).
func (g Generation) Replaces(was Generation, now time.Time) Generation {
	if g.CreatedAt, g.ChangedAt = was.CreatedAt, was.ChangedAt; was.Revision == 0 {
		g.CreatedAt = now
	}
	if g.State != was.State {
		g.ChangedAt = now
	}
	if g.Revision++; len(g.Data) == 0 {
		g.Data = []byte("{}")
	}
	return g
}

// SetSegment replaces a segment, or adds it.
func (c *Checkpoint) SetSegment(to Segment) {
	c.Segments = slices.Clone(c.Segments)
	i, has := c.segment(to.Number)
	if !has {
		c.Segments = slices.Insert(c.Segments, i, to)
	}
	c.Segments[i] = to
}

// TakeSegment is the rule of Progress.TakeSegment. It returns false if c is unchanged.
func (c *Checkpoint) TakeSegment(number int, token claim.Token) (was Segment, ok bool) {
	if c.Mode != ModeCatchUp || !c.Split().Has(number) {
		return was, false
	}
	was = Segment{Number: number, Place: c.Place}
	if i, has := c.segment(number); has {
		was = c.Segments[i]
	}
	c.SetSegment(Segment{Number: number, Place: was.Place, Token: token})
	return was, true
}

// Becomes returns the checkpoint of a generation that gets a new state, and whether it changes.
func (c Checkpoint) Becomes(state GenerationState) (_ Checkpoint, changes bool) {
	switch {
	case state == GenerationStandby && c.Mode != 0:
		c.Mode, c.Token, c.Segments = ModeCatchUp, claim.Token{}, slices.Clone(c.Segments)
		for i := range c.Segments {
			c.Segments[i].Token = claim.Token{}
		}
		return c, true
	case state == GenerationRetired:
		c.Mode = ModeEnded
		return c, true
	}
	return c, false
}
