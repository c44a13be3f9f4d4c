package projector

import (
	"context"
	"fmt"
	"math"
	"time"

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
	plan, err := r.projections[0].plan(ctx, how)
	if err != nil {
		return nil, fmt.Errorf("plan a rebuild of %s: %w", p.name, err)
	}
	return plan, nil
}

func (p *projection) plan(ctx context.Context, how RebuildHow) (*Plan, error) {
	if err := p.canRebuild(how); err != nil {
		return nil, err
	}
	all, err := p.runner.generationsOf(ctx, p.name)
	if err != nil {
		return nil, err
	}
	is, plan := live(all), &Plan{}
	if err := p.unlogged(ctx, is); err != nil {
		return nil, err
	}
	from, err := p.beginning(ctx, is.Generation)
	if err != nil {
		return nil, err
	}
	if plan.Events, err = count(ctx, p.reader.log, p.reader.filter.Types, from.Position, math.MaxInt64); err != nil {
		return nil, err
	}
	if how == InPlace && !p.resets {
		plan.Reset = p.tables(is.Suffix)
	}
	f := ParkedFilter{Projector: p.name, Generation: is.Generation, Limit: 1000}
	for parked, err := p.runner.store.Parked(ctx, f); len(parked) > 0 || err != nil; parked, err = p.runner.store.Parked(ctx, f) {
		if err != nil {
			return nil, err
		}
		plan.Parked, f.After = plan.Parked+len(parked), parked[len(parked)-1].Seq
	}
	if plan.PerSecond = p.sample(ctx, is, newest(all)+1, from.Position); plan.PerSecond > 0 {
		plan.Duration = time.Duration(float64(plan.Events) / plan.PerSecond * float64(time.Second)).Round(time.Millisecond)
	}
	return plan, nil
}

// sample applies the first events in a transaction that is rolled back, and returns the number of
// events per second, or zero if it fails.
func (p *projection) sample(ctx context.Context, is *generation, number int, after int64) float64 {
	g := &generation{Build: provider.Build{Projector: p.name, Generation: number}, state: provider.GenerationBuilding}
	g.Suffix = is.Suffix
	one := p.in(g, true)
	r := one.reader
	r.serving = g
	defer r.endBackground()
	page, err := r.log.LogPage(ctx, provider.LogQuery{After: after, Filter: r.filter, Limit: logBatch})
	if err != nil || len(page.Events) == 0 {
		return 0
	}
	id, err := r.log.LogID(ctx)
	if err != nil {
		return 0
	}
	r.runner.logID.Store(&id)
	u := r.newUnit(nil)
	if p.creates {
		u.setup, u.suffix = created, fmt.Sprintf("_g%d", number)
	}
	u.intent.Once, u.intent.Messages, u.intent.Reader = true, nil, &provider.Reader{}
	u.intent.Switch = &provider.Switch{Snapshot: true, Last: func(ctx context.Context, _ provider.Live) ([]provider.Message, error) {
		u.msgs, err = r.accept(ctx, page.Events)
		return messagesOf(u.msgs), err
	}}
	began := r.runner.cfg.Clock()
	if err := u.transact(ctx); err != nil {
		return 0
	}
	return float64(len(page.Events)) / max(r.runner.cfg.Clock().Sub(began), time.Microsecond).Seconds()
}
