package follow

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// A projector with Options.Segments is split: its segments are read by readers of their own, in any process, and the
// reader of the projector only moves the checkpoint behind them. This reader alone changes the split. See docs/adr/0028.

const (
	followPause = 50 * time.Millisecond // between two moves of the checkpoint behind segments
	endEvery    = time.Second           // how often the reader of a rebuild looks whether its end is near
)

// end is whether few events of a rebuild are left.
type end struct {
	near bool
	seen time.Time // when it was looked for last
}

// segments returns how many segments the projector is to have now, or 0: this reader applies all
// events. What requires that all events up to one position are applied, and none behind it, is done by
// one reader: the switch to a generation that was rebuilt, and what follows a loss of the read model.
func (r *Reader) segments(g *generation.Row) int {
	o := r.Projector.Rules
	switch {
	case o.Segments < 2, !o.OnlyLog, g.How == generation.Scratch, r.isRestored(), r.at.Restoring:
		return 0
	case g.IsReplaying() && (g.Rate > 0 || g.Paused):
		return 0
	case !g.IsLive() && (g.State != provider.GenerationBuilding || g.Done || g.Promoted || g.Failed != "" || r.end.near):
		return 0
	}
	return o.Segments
}

// splits returns Splits whose current one has count segments, or none. What the segments before have
// applied stays known.
func splits(c *provider.Checkpoint, count int) []provider.Split {
	now := c.Split()
	if now.Count > 0 {
		return append([]provider.Split{{First: now.First + now.Count, Count: count}}, c.Splits...)
	}
	all := []provider.Split{{First: now.First, Count: count}}
	if len(c.Splits) > 0 {
		all = append(all, c.Splits[1:]...)
	}
	return all
}

// unpassed returns the Splits without the earlier ones whose segments the position has passed.
func unpassed(all []provider.Split, segments []provider.Segment, position int64) []provider.Split {
	if len(all) == 0 {
		return all
	}
	kept := all[:1:1]
	for _, s := range all[1:] {
		if slices.ContainsFunc(segments, func(one provider.Segment) bool { return s.Has(one.Number) && one.Place.Position > position }) {
			kept = append(kept, s)
		}
	}
	return kept
}

// lowestOf returns the lowest place of the segments of a split. all is false if one of them does not
// exist yet: it begins at the checkpoint.
func lowestOf(s provider.Split, segments []provider.Segment) (lowest provider.LogPlace, all bool) {
	n := 0
	for _, one := range segments {
		if !s.Has(one.Number) {
			continue
		}
		if n++; n == 1 || one.Place.Position < lowest.Position {
			lowest = one.Place
		}
	}
	return lowest, n == s.Count
}

// setSplits changes the Splits. No unit of a segment is open then, and none of the segments before can
// commit later.
func (r *Reader) setSplits(ctx context.Context, all []provider.Split) error {
	was, to := r.at.Split(), r.at
	to.Splits = all
	if err := r.set(ctx, to); err != nil {
		return err
	}
	if now := to.Split(); was != now {
		r.Host.Logger.Info("the projector has another number of segments", "projector", r.Projector.Name,
			"generation", r.Build.Generation, "segments", now.Count, "before", was.Count, "position", r.at.Place.Position)
	}
	return r.setEarlier(ctx)
}

// standStill ends the current split. Its segments do not move any more.
func (r *Reader) standStill(ctx context.Context) error {
	to := r.at
	to.Splits = splits(&to, 0)
	if err := r.set(ctx, to); err != nil {
		return err
	}
	var err error
	r.at, err = r.Host.Store.Checkpoint(ctx, r.Build)
	return err
}

// setEarlier reads what the segments of earlier Splits have applied. They do not move any more.
func (r *Reader) setEarlier(ctx context.Context) error {
	r.cursor.back(r.at.Place.Position)
	r.cursor.before = nil
	if len(r.at.Splits) > 1 {
		c, err := r.Host.Store.Checkpoint(ctx, r.Build)
		if err != nil {
			return err
		}
		r.cursor.before = &provider.Checkpoint{Splits: r.at.Splits[1:], Segments: c.Segments}
	}
	r.Resplit.Send()
	return nil
}

// resplit makes the projector have the segments that it is to have. It reports whether segments apply
// its events.
func (r *Reader) resplit(ctx context.Context, g *generation.Row) (split bool, err error) {
	if count := r.segments(g); count != r.at.Split().Count {
		if err := r.setSplits(ctx, splits(&r.at, count)); err != nil {
			return false, err
		}
	}
	if r.at.Split().Count == 0 && r.cursor.before != nil {
		if kept := unpassed(r.at.Splits, r.cursor.before.Segments, r.at.Place.Position); len(kept) < len(r.at.Splits) {
			return false, r.setSplits(ctx, kept)
		}
	}
	return r.at.Split().Count > 0, nil
}

// followSegments moves the checkpoint to the lowest position of the segments.
func (r *Reader) followSegments(ctx context.Context, g *generation.Row) (more bool, err error) {
	limited, cancel := r.Host.Limited(ctx)
	defer cancel()
	c, err := r.Host.Store.Checkpoint(limited, r.Build)
	if err != nil {
		return false, err
	}
	moved := false
	if lowest, all := lowestOf(c.Split(), c.Segments); all && lowest.Position > r.at.Place.Position {
		was, to := r.at.Place.Position, r.at
		to.Place, to.Splits = lowest, unpassed(r.at.Splits, c.Segments, lowest.Position)
		if err := r.set(limited, to); err != nil {
			return false, err
		}
		r.cursor.read, moved = lowest.Position, true
		if g.IsReplaying() {
			n, err := Count(limited, r.Host.Log, r.Filter().Types, was, lowest.Position)
			if err != nil {
				return false, err
			}
			r.Progress.Applied += n
		}
	}
	if now := r.Host.Clock(); g.IsReplaying() && (!moved || now.Sub(r.end.seen) > endEvery) {
		r.end.seen = now
		if err := r.lookForEnd(ctx, g, &c); err != nil {
			return false, err
		}
	}
	if moved {
		model.Wait(ctx, followPause)
	}
	return moved, nil
}

// lookForEnd looks whether few events are left of a rebuild. Then one reader applies the rest, and makes
// the generation live. A read model that is rebuilt in place has only to reach the end of the log.
func (r *Reader) lookForEnd(ctx context.Context, g *generation.Row, c *provider.Checkpoint) error {
	page, err := r.checkedPage(ctx, provider.LogQuery{After: r.at.Place.Position, Filter: r.Filter(), Limit: pageSize, NoData: true})
	if err != nil {
		return err
	}
	if r.Pace != nil {
		if err := r.Pace.Cut(ctx, g, &page); err != nil {
			return err
		}
		r.end.near = !page.Full || len(page.Events) == 0
		return nil
	}
	if page.More || slices.ContainsFunc(page.Events, func(e eventstore.Raw) bool { return !c.Applied(e.Stream, e.Position) }) {
		return nil
	}
	_, _, err = r.Progress.CaughtUp(ctx, g)
	return err
}

// countPage is how many positions one query of Count covers, if the log counts by itself.
const countPage = 1_000_000

// Count counts the visible events of types behind a position, up to another one.
func Count(ctx context.Context, log provider.Log, types []string, after, to int64) (n int64, err error) {
	counter, ok := log.(provider.LogCounter)
	if !ok {
		return CountPages(ctx, log, types, after, to)
	}
	head, err := log.LogPosition(ctx, eventstore.From{Now: true})
	for to = min(to, head); err == nil && after < to; after += countPage {
		var some int64
		some, err = counter.CountLog(ctx, types, after, min(after+countPage, to))
		n += some
	}
	return n, err
}

// CountPages is Count for a log that does not count: it reads the events.
func CountPages(ctx context.Context, log provider.Log, types []string, after, to int64) (n int64, err error) {
	err = Unsettled(ctx, log, types, after, func(events []eventstore.Raw) (bool, error) {
		for i := range events {
			if events[i].Position > to {
				return false, nil
			}
			n++
		}
		return true, nil
	})
	return n, err
}

// Unsettled calls f with pages of all visible events of types behind a position, without their data, until it returns
// false.
func Unsettled(ctx context.Context, log provider.Log, types []string, after int64, f func([]eventstore.Raw) (bool, error)) error {
	q := provider.LogQuery{After: after, Filter: eventstore.LogFilter{Types: types}, Limit: 10 * pageSize, Unsettled: true, NoData: true}
	for {
		page, err := log.LogPage(ctx, q)
		if err != nil {
			return err
		}
		last := page.End.Position
		for i := range page.Events {
			last = max(last, page.Events[i].Position)
		}
		more, err := f(page.Events)
		if err != nil || !more || !page.Full || last <= q.After {
			return err
		}
		q.After = last
	}
}
