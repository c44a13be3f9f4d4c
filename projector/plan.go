package projector

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/provider"
)

// Plan is what a rebuild of a projector would do.
type Plan struct {
	Events int64    // of its types, from the beginning of the live generation on
	Reset  []string // the tables that a rebuild in place empties; nil with OnReset, and with BlueGreen
	Parked int      // number of messages that are waiting or stuck: they are tried again
	// PerSecond is how many events per second the handlers applied in a sample of at most 500 events.
	// Zero if there are no events, or if the sample failed: without OnCreate, the handlers may
	// conflict with rows that exist.
	PerSecond float64
	Duration  time.Duration // Events / PerSecond
}

// Plan returns what a rebuild would do, and changes nothing. It counts the events, which takes
// about a second per million, and applies a sample of them in a transaction that is rolled back: to
// new tables if p has OnCreate, else to those of the live read model, whose rows it locks for that
// time. A nil cfg means the default.
//   - ErrNoRebuild: p cannot be rebuilt in this way. The text says why.
func (p *Projector[Tx]) Plan(ctx context.Context, db provider.Units[Tx], how RebuildHow, cfg *RunnerConfig) (*Plan, error) {
	r, err := runnerOfLog(db, cfg, p)
	if err != nil {
		return nil, fmt.Errorf("plan a rebuild of %s: %w", p.name, err)
	}
	plan, err := r.plan(ctx, how)
	if err != nil {
		return nil, fmt.Errorf("plan a rebuild of %s: %w", p.name, err)
	}
	return plan, nil
}

func (r *Runner) plan(ctx context.Context, how RebuildHow) (*Plan, error) {
	f := r.all.Feeders[0]
	p := f.Projector
	if err := rebuild.CanRebuild(p, generation.How(how)); err != nil {
		return nil, err
	}
	all, err := r.host.Generations(ctx, p.Name)
	if err != nil {
		return nil, err
	}
	live, plan := generation.Live(all), &Plan{}
	if err := f.Maker.Unlogged(ctx, live); err != nil {
		return nil, err
	}
	from, err := f.Beginning(ctx, live.Generation)
	if err != nil {
		return nil, err
	}
	if plan.Events, err = follow.Count(ctx, r.host.Log, p.Rules.Filter.Types, from.Position, math.MaxInt64); err != nil {
		return nil, err
	}
	if how == InPlace && !p.Resets {
		plan.Reset = p.TablesOf(live.Suffix)
	}
	q := ParkedFilter{Projector: p.Name, Generation: live.Generation, Limit: 1000}
	for parked, err := r.host.Store.Parked(ctx, q); len(parked) > 0 || err != nil; parked, err = r.host.Store.Parked(ctx, q) {
		if err != nil {
			return nil, err
		}
		plan.Parked, q.After = plan.Parked+len(parked), parked[len(parked)-1].Seq
	}
	next := generation.Next(all, generation.Order{})
	next.State, next.Suffix = provider.GenerationBuilding, live.Suffix
	if plan.PerSecond = rebuild.Sample(ctx, f.Reader(next, provider.Checkpoint{}), next, from.Position); plan.PerSecond > 0 {
		plan.Duration = time.Duration(float64(plan.Events) / plan.PerSecond * float64(time.Second)).Round(time.Millisecond)
	}
	return plan, nil
}
