package projector

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A projector with Options.Segments is split: its segments are read by readers of their own
// (segment.go), in any process, and the reader of the projector only moves the checkpoint behind them.
// This reader alone changes the split. See docs/adr/0028.

const (
	maxSegments = 256
	followPause = 50 * time.Millisecond // between two moves of the checkpoint behind segments
	endEvery    = time.Second           // how often the reader of a rebuild looks whether its end is near
)

// segments returns how many segments the projector is to have now, or 0: this reader applies all
// events. What requires that all events up to one position are applied, and none behind it, is done by
// one reader: the switch to a generation that was rebuilt, and what follows a loss of the read model.
func (r *reader) segments() int {
	g := r.serving
	switch {
	case r.opts.Segments < 2, !r.isSource, r.runner.assigned, r.isRestored(), r.at.Restoring:
		return 0
	case g.isReplaying() && (g.Rate > 0 || g.Paused):
		return 0
	case !g.isLive() && (g.state != provider.GenerationBuilding || g.Done || g.Promoted || g.Failed != "" || r.nearEnd):
		return 0
	}
	return r.opts.Segments
}

// splits returns Splits whose current one has count segments, or none. What the segments before have
// applied stays known.
func splits(c *provider.Checkpoint, count int) []provider.Split {
	is := c.Split()
	if is.Count == 0 {
		return append([]provider.Split{{First: is.First, Count: count}}, earlier(c.Splits)...)
	}
	return append([]provider.Split{{First: is.First + is.Count, Count: count}}, c.Splits...)
}

// earlier returns the Splits that are not current.
func earlier(all []provider.Split) []provider.Split {
	if len(all) == 0 {
		return nil
	}
	return all[1:]
}

// setSplits changes the Splits. No unit of a segment is open then, and none of the segments before can
// commit later.
func (r *reader) setSplits(ctx context.Context, all []provider.Split) error {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	to := r.at
	to.Splits = all
	ok, err := r.runner.store.SetCheckpoint(ctx, r.build(), r.at, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err != nil {
		return err
	}
	was, is := r.at.Split(), to.Split()
	r.at = to
	if was != is {
		r.runner.cfg.Logger.Info("the projector has another number of segments", "projector", r.name,
			"generation", r.serving.Generation, "segments", is.Count, "before", was.Count, "position", r.at.Place.Position)
	}
	return r.setEarlier(ctx)
}

// setEarlier reads what the segments of earlier Splits have applied. They do not move any more.
func (r *reader) setEarlier(ctx context.Context) error {
	if r.next != nil {
		<-r.next.read
	}
	r.next, r.read, r.before = nil, r.at.Place.Position, nil
	if len(r.at.Splits) > 1 {
		c, err := r.runner.store.Checkpoint(ctx, r.build())
		if err != nil {
			return err
		}
		r.before = &provider.Checkpoint{Splits: r.at.Splits[1:], Segments: c.Segments}
	}
	r.segmentsChanged()
	return nil
}

// highestOf returns the highest position of the segments of a split, or 0.
func highestOf(s provider.Split, segments []provider.Segment) (highest int64) {
	for _, is := range segments {
		if s.Has(is.Number) {
			highest = max(highest, is.Place.Position)
		}
	}
	return highest
}

// unpassed returns the Splits without the earlier ones whose segments the position has passed.
func unpassed(all []provider.Split, segments []provider.Segment, position int64) []provider.Split {
	if len(all) == 0 {
		return all
	}
	kept := all[:1:1]
	for _, s := range all[1:] {
		if highestOf(s, segments) > position {
			kept = append(kept, s)
		}
	}
	return kept
}

// resplit makes the projector have the segments that it is to have. It reports whether segments apply
// its events.
func (r *reader) resplit(ctx context.Context) (is bool, err error) {
	if count := r.segments(); count != r.at.Split().Count {
		if err := r.setSplits(ctx, splits(&r.at, count)); err != nil {
			return false, err
		}
	}
	if r.at.Split().Count == 0 && r.before != nil {
		if kept := unpassed(r.at.Splits, r.before.Segments, r.at.Place.Position); len(kept) < len(r.at.Splits) {
			return false, r.setSplits(ctx, kept)
		}
	}
	return r.at.Split().Count > 0, nil
}

// followSegments moves the checkpoint to the lowest position of the segments.
func (r *reader) followSegments(ctx context.Context) (more bool, err error) {
	limited, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	c, err := r.runner.store.Checkpoint(limited, r.build())
	if err != nil {
		return false, err
	}
	moved := false
	if lowest, all := lowestOf(c.Split(), c.Segments); all && lowest.Position > r.at.Place.Position {
		to := r.at
		to.Place, to.Splits = lowest, unpassed(r.at.Splits, c.Segments, lowest.Position)
		ok, err := r.runner.store.SetCheckpoint(limited, r.build(), r.at, to)
		if err == nil && !ok {
			err = provider.ErrFenced
		}
		if err == nil && r.serving.isReplaying() {
			var n int64
			n, err = count(limited, r.log, r.filter.Types, r.at.Place.Position, lowest.Position)
			r.applied += n
		}
		if err != nil {
			return false, err
		}
		r.at, r.read, moved = to, lowest.Position, true
	}
	if now := r.runner.cfg.Clock(); r.serving.isReplaying() && (!moved || now.Sub(r.endSeen) > endEvery) {
		r.endSeen = now
		if err := r.lookForEnd(ctx, &c); err != nil {
			return false, err
		}
	}
	if moved {
		wait(ctx, followPause)
	}
	return moved, nil
}

// lowestOf returns the lowest place of the segments of a split. all is false if one of them does not
// exist yet: it begins at the checkpoint.
func lowestOf(s provider.Split, segments []provider.Segment) (lowest provider.LogPlace, all bool) {
	n := 0
	for _, is := range segments {
		if !s.Has(is.Number) {
			continue
		}
		if n++; n == 1 || is.Place.Position < lowest.Position {
			lowest = is.Place
		}
	}
	return lowest, n == s.Count
}

// lookForEnd looks whether few events are left of a rebuild. Then one reader applies the rest, and makes
// the generation live. A read model that is rebuilt in place has only to reach the end of the log.
func (r *reader) lookForEnd(ctx context.Context, c *provider.Checkpoint) error {
	page, err := r.pageOn(ctx, provider.LogQuery{After: r.at.Place.Position, Filter: r.filter, Limit: completePage, NoData: true})
	if err != nil {
		return err
	}
	isLive := r.serving.isLive()
	if !isLive {
		if err := r.trail(ctx, &page); err != nil {
			return err
		}
	}
	isDone := !slices.ContainsFunc(page.Events, func(e eventstore.Raw) bool { return !c.Applied(e.Stream, e.Position) })
	switch {
	case !isLive:
		r.nearEnd = !page.Full || len(page.Events) == 0
	case isDone && !page.More:
		_, err = r.caughtUp(ctx)
	}
	return err
}
