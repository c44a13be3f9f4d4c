// Package rebuild makes generations of a read model: it begins them, follows the live one, compares, switches, and
// ends them.
package rebuild

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// A generation that is not live never gets ahead of the live one: its reader applies the events
// that the live one has applied. So a switch, a rollback and a verification need the same last step:
// apply the few events that the live generation has applied since. See docs/adr/0024.

// Trail follows the log for a generation that is not live.
type Trail struct {
	Reader   *follow.Reader
	Switcher *Switcher
	Reached  func() // called when a verification has caught up; nil: it is none
}

// Step applies a page. When the generation has applied the events that the live one has applied, it may become live.
func (t *Trail) Step(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	got, err := t.Reader.Page(ctx, hard, g)
	switch {
	case err != nil || got.Moved && got.Page.More:
		return err == nil, err
	case t.Reader.PassesEarlier():
		return got.Moved, nil
	}
	g, recorded, err := t.Reader.Progress.CaughtUp(ctx, g)
	if err != nil || !recorded {
		return false, err
	}
	built := g.State == provider.GenerationBuilding && g.How == generation.BlueGreen && g.Failed == ""
	switch {
	case g.Promoted, built && !g.Check:
		return true, t.Switcher.promote(ctx, hard, g)
	case built:
		return true, t.Switcher.compareFirst(ctx, g)
	case g.How == generation.Scratch && t.Reached != nil:
		t.Reached()
	}
	return false, nil
}

const (
	limitAge  = 500 * time.Millisecond // how long a reader relies on the place of the live generation
	busyAge   = 2 * time.Second        // how long the live generation counts as busy after it has moved
	busyBatch = 50                     // the most events of a unit of a rebuild while it is busy
)

// pace keeps a reader behind the live generation.
type pace struct {
	reader  *follow.Reader
	limit   provider.LogPlace // of the live generation
	limited time.Time         // when that was read
	moved   time.Time         // when it was seen to move; at first, shortly before
	stood   time.Time         // since when it has not moved, although it had events to apply
	stalled time.Time         // when that was logged last
}

// Pace returns what keeps a reader behind the live generation.
func Pace(r *follow.Reader) follow.Pace {
	// Busy until Cut has looked at the live generation twice.
	return &pace{reader: r, moved: r.Host.Clock().Add(limitAge + limitAge/4 - busyAge)}
}

// Cut cuts a page at the checkpoint of the live generation.
func (p *pace) Cut(ctx context.Context, g *generation.Row, page *provider.LogPage) error {
	r, now := p.reader, p.reader.Host.Clock()
	if page.End.Position > p.limit.Position || now.Sub(p.limited) > limitAge {
		if err := p.look(ctx, g, now); err != nil {
			return err
		}
	}
	if n := len(page.Events); n == 0 || page.Events[n-1].Position <= p.limit.Position {
		p.stood = now // it has nothing to apply
	}
	if page.End.Position <= p.limit.Position {
		return nil
	}
	p.reportStall(now)
	page.More = false
	page.Events = slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return e.Position > p.limit.Position })
	if page.End = p.limit; page.End.Position <= r.Read() {
		page.End = provider.LogPlace{Position: r.Read()}
	}
	return nil
}

func (p *pace) look(ctx context.Context, g *generation.Row, now time.Time) error {
	h := p.reader.Host
	c, err := h.Store.Checkpoint(ctx, provider.Build{Projector: g.Projector})
	switch {
	case err != nil:
		return err
	case c.Generation == g.Generation:
		h.Follow.Send()
		return provider.ErrFenced
	case c.Mode == 0:
		return fmt.Errorf("projector %s: the live generation has no checkpoint", g.Projector)
	}
	if c.Place.Position != p.limit.Position || p.stood.IsZero() {
		if p.stood = now; p.limit.Position > 0 {
			p.moved = now
		}
	}
	p.limit, p.limited = c.Place, now
	return nil
}

// reportStall logs once a minute that the live generation has not moved for a lease, although it had
// events to apply: probably no program with its version runs.
func (p *pace) reportStall(now time.Time) {
	h := p.reader.Host
	if now.Sub(p.stood) > max(h.Lease, 2*h.Grace) && now.Sub(p.stalled) > time.Minute {
		p.stalled = now
		h.Logger.Warn("the live read model does not move: start a program with its version, or promote another generation",
			"projector", p.reader.Build.Projector, "position", p.limit.Position, "generation", p.reader.Build.Generation)
	}
}

// isBusy reports whether a rebuild goes on next to a live generation that applies events, and leaves
// time to it. One that is to become live now does not.
func (p *pace) isBusy(g *generation.Row) bool {
	return !g.Promoted && p.reader.Host.Clock().Sub(p.moved) < busyAge
}

// Most returns the most events of a page.
func (p *pace) Most(g *generation.Row, most int) int {
	if p.isBusy(g) {
		return min(most, busyBatch)
	}
	return most
}

// Rest waits after a page of a rebuild. A rebuild that has applied all events that existed when it began does not wait, or
// it might never reach a live generation that applies events all the time.
func (p *pace) Rest(ctx context.Context, g *generation.Row, took time.Duration) {
	if p.isBusy(g) && !p.reader.Progress.Chases {
		model.Wait(ctx, min(took, time.Second))
	}
}
