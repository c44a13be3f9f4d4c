package follow

import (
	"context"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Progress records with a generation what its reader has applied.
type Progress struct {
	host      *model.Host
	projector *model.Projector
	current   *atomic.Pointer[generation.Row]
	applied   int64     // events since the build began
	chases    bool      // it has applied the events that existed when the build began
	recorded  time.Time // when it was stored last
	seen      map[version]bool
	unseen    []version // not stored yet
}

// version is a schema version of an event type.
type version struct {
	eventType string
	schema    int
}

// Applied returns the number of events that were applied since the build began.
func (p *Progress) Applied() int64 { return p.applied }

// Chases reports whether the events are applied that existed when the build began.
func (p *Progress) Chases() bool { return p.chases }

// Saw notes the schema versions of events.
func (p *Progress) Saw(g *generation.Row, events []eventstore.Raw) {
	for i := range events {
		v := version{events[i].Type, events[i].Schema}
		if len(p.projector.ByType[v.eventType]) == 0 || p.seen[v] {
			continue
		}
		p.seen[v] = true
		if !slices.Contains(g.Seen[v.eventType], v.schema) {
			p.unseen = append(p.unseen, v)
		}
	}
}

// Record stores the progress of a rebuild each second, and shows other programs that this one
// feeds the generation. It also stores new schema versions: those alone for a segment.
func (p *Progress) Record(ctx context.Context, r *Reader, g *generation.Row) error {
	now, every := p.host.Clock(), time.Second
	if (r.Segment > 0 || g.IsLive() && !g.IsReplaying()) && len(p.unseen) == 0 {
		return nil
	}
	if r.Segment == 0 && g.State == provider.GenerationStandby {
		every = p.host.Lease / 3
	}
	if now.Sub(p.recorded) < every {
		return nil
	}
	change := p.addSeen
	if r.Segment == 0 {
		total := g.Total
		if p.applied >= total && g.How != 0 && !g.Done {
			left, err := Count(ctx, p.host.Log, p.projector.Rules.Filter.Types, r.at.Place.Position, math.MaxInt64)
			if err != nil {
				return err
			}
			p.chases, total = total > 0, p.applied+left
		}
		perSecond := g.PerSecond
		if took := now.Sub(p.recorded); !p.recorded.IsZero() && p.applied > g.Applied {
			perSecond = float64(p.applied-g.Applied) / took.Seconds()
		}
		change = func(g *generation.Row) {
			g.Beat++
			g.Total, g.PerSecond, g.Applied = total, perSecond, p.applied
			p.addSeen(g)
		}
	}
	p.recorded = now
	_, changed, err := p.Change(ctx, g, change)
	if changed {
		p.unseen = nil
	}
	return err
}

// flush stores new schema versions at the end of a tenure.
func (p *Progress) flush(ctx context.Context, of provider.Build) {
	if g := p.current.Load(); g.Build == of && len(p.unseen) > 0 {
		_, _, _ = p.Change(context.WithoutCancel(ctx), g, p.addSeen)
	}
}

func (p *Progress) addSeen(g *generation.Row) {
	for _, v := range p.unseen {
		g.AddSeen(v.eventType, v.schema)
	}
}

// CaughtUp records that the generation has reached the end of the log, or the live generation. It returns the generation
// as it is then. recorded is false if another program has changed it: then call CaughtUp again.
func (p *Progress) CaughtUp(ctx context.Context, g *generation.Row) (now *generation.Row, recorded bool, err error) {
	if g.Done || g.Source == 0 && g.IsLive() {
		return g, true, nil
	}
	return p.Change(ctx, g, func(g *generation.Row) { g.Done, g.Applied = true, p.applied })
}

// Change stores a change of the generation that the reader serves, and returns the generation as it is then. If another
// program has changed it, the change is lost, and its state is read again. The error is ErrFenced if this program feeds
// another generation now.
func (p *Progress) Change(ctx context.Context, g *generation.Row, fn func(*generation.Row)) (now *generation.Row, changed bool, err error) {
	ctx, cancel := p.host.Limited(ctx)
	defer cancel()
	was := p.current.Load()
	if was.Build != g.Build {
		return g, false, provider.ErrFenced
	}
	to := *was
	changed, err = generation.Change(ctx, p.host.Store, &to, fn)
	switch {
	case changed:
		p.current.CompareAndSwap(was, &to)
		return &to, true, nil
	case err == nil:
		p.host.Follow.Send()
	}
	return g, false, err
}
