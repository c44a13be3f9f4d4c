package projector

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
)

const (
	lookEvery  = time.Second // for what may go on by itself, at one projector at a time
	lookKnown  = 10          // times less often for what other runners, that do not know its type, have parked
	pruneEvery = time.Minute
	pruneLimit = 500 // rows a statement
)

// upkeep is what a runner does beside deliveries until ctx ends.
func (r *Runner) upkeep(ctx, hard context.Context, all *sync.WaitGroup) {
	looks, known := 0, make([]tried, len(r.members))
	all.Go(func() {
		every(ctx, lookEvery, func() {
			i := looks % len(r.members)
			_, _ = r.bringBack(ctx, hard, &r.members[i], &known[i]) // said in the log; looked at again
			if looks/len(r.members)%lookKnown == 0 {
				r.bringKnown(ctx, hard, &r.members[i], &known[i])
			}
			looks++
		})
	})
	all.Go(func() { every(ctx, pruneEvery, func() { r.prune(ctx) }) })
}

// every runs work at once and then again and again, with a pause, until ctx ends.
func every(ctx context.Context, pause time.Duration, work func()) {
	t := time.NewTicker(pause)
	defer t.Stop()
	for ctx.Err() == nil {
		work()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
}

// prune deletes what is kept long enough, in small transactions, with pauses that leave the database to deliveries.
func (r *Runner) prune(ctx context.Context) {
	pruned := 0
	for i := range r.members {
		m := &r.members[i]
		_, err := r.inBatches(ctx, func() (int, error) { return r.journal.PruneJournal(ctx, m.name, r.cfg.Keep, pruneLimit) })
		if err != nil && ctx.Err() == nil {
			r.log.Warn("what is resolved is not pruned", "projector", m.name, "class", ClassOf(err).String(), "code", codeOf(err), "err", err)
		}
		if m.keeper == nil {
			continue
		}
		for _, name := range m.names {
			n, err := r.inBatches(ctx, func() (int, error) {
				return m.keeper.PruneMarkers(ctx, name, r.cfg.Markers.Window, pruneLimit)
			})
			pruned += n
			if err != nil && ctx.Err() == nil {
				r.log.Warn("markers are not pruned", "handler", name, "class", ClassOf(err).String(), "code", codeOf(err), "err", err)
			}
		}
	}
	if pruned > 0 {
		r.log.Debug("markers pruned", "markers", pruned)
		if r.cfg.Observer.Pruned != nil {
			r.cfg.Observer.Pruned(pruned)
		}
	}
}

// inBatches does work until it finds nothing, since others may have taken a part of a batch, and rests four times as long as each took.
func (r *Runner) inBatches(ctx context.Context, work func() (int, error)) (all int, err error) {
	for {
		began := r.cfg.Clock()
		crash.Point("prune: before")
		n, err := work()
		crash.Point("prune: after")
		all += n
		if err != nil {
			return all, fmt.Errorf("prune: %w", err)
		}
		if n == 0 {
			return all, nil
		}
		rest(ctx, 4*r.cfg.Clock().Sub(began))
		if ctx.Err() != nil {
			return all, nil
		}
	}
}
