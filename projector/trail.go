package projector

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A generation that is not live never gets ahead of the live one: its reader applies the events
// that the live one has applied. So a switch, a rollback and a verification need the same last step:
// apply the few events that the live generation has applied since. See docs/adr/0024.

const (
	limitAge  = 500 * time.Millisecond // how long a reader relies on the place of the live generation
	busyAge   = 2 * time.Second        // how long the live generation counts as busy after it has moved
	busyBatch = 50                     // the most events of a unit of a rebuild while it is busy
)

// trail cuts a page at the checkpoint of the live generation.
func (r *reader) trail(ctx context.Context, page *provider.LogPage) error {
	now := r.runner.cfg.Clock()
	if page.End.Position > r.limit.Position || now.Sub(r.limited) > limitAge {
		c, err := r.runner.store.Checkpoint(ctx, provider.Build{Projector: r.name})
		switch {
		case err != nil:
			return err
		case c.Generation == r.serving.Generation:
			r.runner.followNow()
			return provider.ErrFenced
		case c.Mode == 0:
			return fmt.Errorf("projector %s: the live generation has no checkpoint", r.name)
		}
		if c.Place.Position != r.limit.Position || r.stood.IsZero() {
			if r.stood = now; r.limit.Position > 0 {
				r.moved = now
			}
		}
		r.limit, r.limited = c.Place, now
	}
	if n := len(page.Events); n == 0 || page.Events[n-1].Position <= r.limit.Position {
		r.stood = now // it has nothing to apply
	}
	if page.End.Position <= r.limit.Position {
		return nil
	}
	r.reportStall(now)
	page.More = false
	page.Events = slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return e.Position > r.limit.Position })
	if page.End = r.limit; page.End.Position <= r.read {
		page.End = provider.LogPlace{Position: r.read}
	}
	return nil
}

// reportStall logs once a minute that the live generation has not moved for a lease, although it had
// events to apply: probably no program with its version runs.
func (r *reader) reportStall(now time.Time) {
	cfg := &r.runner.cfg
	if now.Sub(r.stood) > max(cfg.Lease, 2*cfg.Grace) && now.Sub(r.stalled) > time.Minute {
		r.stalled = now
		cfg.Logger.Warn("the live read model does not move: start a program with its version, or promote another generation",
			"projector", r.name, "position", r.limit.Position, "generation", r.serving.Generation)
	}
}

// isBusy reports whether a rebuild goes on next to a live generation that applies events, and leaves
// time to it. One that is to become live now does not.
func (r *reader) isBusy() bool {
	return !r.serving.isLive() && !r.serving.Promoted && r.runner.cfg.Clock().Sub(r.moved) < busyAge
}

// throttle waits after a page of a rebuild, which took this time. A rebuild that has applied all
// events that existed when it began does not wait, or it might never reach a live generation that
// applies events all the time.
func (r *reader) throttle(ctx context.Context, events int, took time.Duration) {
	switch rate := r.serving.Rate; {
	case rate > 0 && r.serving.isReplaying():
		wait(ctx, time.Duration(float64(events)/float64(rate)*float64(time.Second))-took)
	case r.isBusy() && !r.chases:
		wait(ctx, min(took, time.Second))
	}
}

// reached is called when a generation that is not live has applied the events that the live one has
// applied.
func (r *reader) reached(ctx, hard context.Context) (more bool, err error) {
	if recorded, err := r.caughtUp(ctx); err != nil || !recorded {
		return false, err
	}
	g := r.serving
	switch {
	case g.Promoted, g.state == provider.GenerationBuilding && g.How == BlueGreen && !g.Check && g.Failed == "":
		return true, r.promote(ctx, hard)
	case g.state == provider.GenerationBuilding && g.How == BlueGreen && g.Failed == "":
		return true, r.compareFirst(ctx, hard)
	case g.How == scratch && r.runner.reached != nil:
		r.runner.reached()
	}
	return false, nil
}

// caughtUp records that the generation has reached the end of the log, or the live generation. It
// returns false if another program has changed the generation: then it is called again.
func (r *reader) caughtUp(ctx context.Context) (recorded bool, err error) {
	if g := r.serving; g.Done || g.Source == 0 && g.isLive() {
		return true, nil
	}
	return r.change(ctx, func(g *generation) { g.Done, g.Applied = true, r.applied })
}

// change stores a change of the generation that the reader serves. If another program has changed it,
// the change is lost, and its state is read again. It returns ErrFenced if the projection feeds another
// generation now.
func (r *reader) change(ctx context.Context, fn func(*generation)) (changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	g := r.current.Load()
	if g.Build != r.serving.Build {
		return false, provider.ErrFenced
	}
	to := *g
	changed, err = change(ctx, r.runner.store, &to, fn)
	switch {
	case changed:
		r.serving = &to
		r.current.CompareAndSwap(g, &to)
	case err == nil:
		r.runner.followNow()
	}
	return changed, err
}

// record stores the progress of a rebuild each second, and shows other programs that this one
// feeds the generation. It also stores new schema versions.
func (r *reader) record(ctx context.Context) error {
	g, now, every := r.serving, r.runner.cfg.Clock(), time.Second
	if r.segment > 0 {
		return r.recordSeen(ctx)
	}
	if g.isLive() && !g.isReplaying() && len(r.unseen) == 0 {
		return nil
	}
	if g.state == provider.GenerationStandby {
		every = r.runner.cfg.Lease / 3
	}
	if now.Sub(r.recorded) < every {
		return nil
	}
	total := g.Total
	if r.applied >= total && g.How != 0 && !g.Done {
		left, err := count(ctx, r.log, r.filter.Types, r.at.Place.Position, math.MaxInt64)
		if err != nil {
			return err
		}
		r.chases, total = total > 0, r.applied+left
	}
	perSecond := g.PerSecond
	if took := now.Sub(r.recorded); !r.recorded.IsZero() && r.applied > g.Applied {
		perSecond = float64(r.applied-g.Applied) / took.Seconds()
	}
	r.recorded = now
	changed, err := r.change(ctx, func(g *generation) {
		g.Beat++
		g.Total, g.PerSecond, g.Applied = total, perSecond, r.applied
		g.addSeen(r.unseen)
	})
	if changed {
		r.unseen = nil
	}
	return err
}

// recordSeen stores new schema versions.
func (r *reader) recordSeen(ctx context.Context) error {
	now := r.runner.cfg.Clock()
	if len(r.unseen) == 0 || now.Sub(r.recorded) < time.Second {
		return nil
	}
	r.recorded = now
	changed, err := r.change(ctx, func(g *generation) { g.addSeen(r.unseen) })
	if changed {
		r.unseen = nil
	}
	return err
}

// schemaVersion is a schema version of an event type.
type schemaVersion struct {
	Type   string
	Schema int
}

// saw notes the schema versions of events.
func (r *reader) saw(events []eventstore.Raw) {
	for i := range events {
		v := schemaVersion{events[i].Type, events[i].Schema}
		if len(r.byType[v.Type]) == 0 || r.seenVersions[v] {
			continue
		}
		r.seenVersions[v] = true
		if !slices.Contains(r.serving.Seen[v.Type], v.Schema) {
			r.unseen = append(r.unseen, v)
		}
	}
}

// addSeen adds schema versions to a copy of Seen.
func (g *generation) addSeen(versions []schemaVersion) {
	if len(versions) == 0 {
		return
	}
	seen := map[string][]int{}
	for eventType, all := range g.Seen {
		seen[eventType] = all
	}
	for _, v := range versions {
		if !slices.Contains(seen[v.Type], v.Schema) {
			seen[v.Type] = slices.Sorted(slices.Values(append(slices.Clone(seen[v.Type]), v.Schema)))
		}
	}
	g.Seen = seen
}

// errMany: the live generation has applied too many events that this one has not applied.
var errMany = errors.New("too many events for the last step")

// behindLive returns the events that the live generation has applied and this one has not, in order
// of position. If the live generation may change meanwhile (changes), it leaves out those that have
// an event before them in their stream that was not applied when it was looked at: that one may have
// been applied before later ones are looked at.
func (r *reader) behindLive(ctx context.Context, l provider.Live, changes bool) (behind []eventstore.Raw, err error) {
	open := map[string]bool{} // streams
	q := provider.LogQuery{After: r.at.Place.Position, Filter: r.filter, Limit: completePage, Unsettled: true}
	for {
		page, err := r.pageAfter(ctx, q)
		if err != nil {
			return nil, err
		}
		missing, err := r.unapplied(ctx, page.Events)
		if err != nil {
			return nil, err
		}
		ours, err := appliedIn(ctx, l, missing)
		if err != nil {
			return nil, err
		}
		if changes {
			ours = inOrder(open, missing, ours)
		}
		behind = append(behind, ours...)
		last := page.End.Position
		if n := len(page.Events); n > 0 {
			last = max(last, page.Events[n-1].Position)
		}
		if !page.Full || last <= q.After {
			return behind, nil
		}
		q.After = last
	}
}

// inOrder returns the events of applied without those behind an event of all in their stream that is
// not in applied. open are the streams that have such an event.
func inOrder(open map[string]bool, all, applied []eventstore.Raw) (kept []eventstore.Raw) {
	for _, e := range all {
		switch {
		case len(applied) == 0 || applied[0].ID != e.ID:
			open[e.Stream] = true
			continue
		case !open[e.Stream]:
			kept = append(kept, e)
		}
		applied = applied[1:]
	}
	return kept
}

// appliedIn returns the events that a generation has applied or parked: those up to its checkpoint or
// to the segment of their stream, and those that have the markers of the handlers that it takes their types with.
func appliedIn(ctx context.Context, l provider.Live, events []eventstore.Raw) (applied []eventstore.Raw, err error) {
	takers := map[string][]provider.Handler{}
	for _, b := range l.Checkpoint.Handlers {
		takers[b.Type] = append(takers[b.Type], provider.Handler{Name: b.Handler})
	}
	var asked []provider.Message
	for _, e := range events {
		if !l.Checkpoint.Applied(e.Stream, e.Position) && len(takers[e.Type]) > 0 {
			asked = append(asked, provider.Message{ID: e.ID, Handlers: takers[e.Type], Position: e.Position})
		}
	}
	open := map[string]bool{}
	for page := range slices.Chunk(asked, completePage) {
		is, err := l.Unapplied(ctx, page)
		if err != nil {
			return nil, err
		}
		for i, m := range page {
			open[m.ID] = is[i]
		}
	}
	return slices.DeleteFunc(slices.Clone(events), func(e eventstore.Raw) bool {
		return !l.Checkpoint.Applied(e.Stream, e.Position) && (len(takers[e.Type]) == 0 || open[e.ID])
	}), nil
}
