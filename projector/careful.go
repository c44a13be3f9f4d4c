package projector

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// process is held shared by every unit, and exclusively by each attempt at a message that may end the process: so
// such a message takes no other with it, from whichever runner of this process.
var process sync.RWMutex

// spacing is how long no other runner tries a message that may have ended processes, after an attempt that had so many
// before it: a lease, then eight times as long each time, but no more than a day. So it is stuck only if each of its
// attempts, over a good quarter of an hour, met the end of its process. After the last attempt it is a lease.
func (c *RunnerConfig) spacing(before int) time.Duration {
	d := c.Lease
	if c.Retry.Exhausted(before + 1) {
		return d
	}
	for range max(before-1, 0) {
		d = max(c.Lease, 8*min(d, 3*time.Hour))
	}
	return d
}

// watch is what a runner knows about others since its last beat, on the store's clock. A message that was in the hands of
// a runner whose process ended was recorded before that end. So only messages recorded before the last unclean end, or
// before this runner began if that was less than a lease ago, are named before they run. See docs/adr/0014.
type watch struct {
	began time.Time // at the first beat
	until time.Time // only what was recorded until then is named; zero: nothing is
	now   time.Time // at the last beat
	at    time.Time // the same on this process's clock
}

// skew is how far the store's clock may seem to be ahead: a message recorded later than that is not believed.
const skew = time.Minute

// suspicious says whether one of msgs may have been in the hands of a runner whose process ended.
func (r *Runner) suspicious(msgs []*inbound) bool {
	w := r.watch.Load()
	if w == nil || r.cfg.Careful { // nil: the store has not answered yet
		return true
	}
	if w.until.IsZero() {
		return false
	}
	future := w.now.Add(r.cfg.Clock().Sub(w.at) + skew)
	return slices.ContainsFunc(msgs, func(m *inbound) bool {
		at := m.raw.RecordedAt
		return at.IsZero() || !at.After(w.until) || at.After(future)
	})
}

// beat tells the store that the runner is alive for a lease, or with no lease that it ended well, and learns who is not.
func (r *Runner) beat(ctx context.Context, lease time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	health, err := r.store.Beat(ctx, r.id, lease, r.cfg.Record)
	if err != nil {
		if provider.ClassOf(err) != ClassShutdown {
			r.log(slog.LevelWarn, "the runner could not renew or end its lease", err)
		}
		return
	}
	w := &watch{began: health.Now, until: health.Crashed, now: health.Now, at: r.cfg.Clock()}
	if before := r.watch.Load(); before != nil {
		w.began = before.began
	}
	if w.now.Sub(w.began) < r.cfg.Lease && w.until.Before(w.began) {
		w.until = w.began
	}
	r.watch.Store(w)
}

// stayAlive beats three times in a lease until stop is called, also after the end of ctx. If it is a clean stop, the
// store learns that the runner ended well.
func (r *Runner) stayAlive(ctx context.Context) (stop func(clean bool)) {
	r.beat(ctx, r.cfg.Lease)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var beats sync.WaitGroup
	beats.Go(func() {
		for wait(ctx, r.cfg.Lease/3); ctx.Err() == nil; wait(ctx, r.cfg.Lease/3) {
			r.beat(ctx, r.cfg.Lease)
		}
	})
	return func(clean bool) {
		cancel()
		beats.Wait()
		if clean {
			r.beat(context.WithoutCancel(ctx), 0) // if it fails, the lease ends by itself
		}
	}
}

// nameThem tells the store which messages w is about to run.
func (w *worker) nameThem(ctx context.Context, me provider.Worker, msgs []*inbound) error {
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	ids := make([]string, 0, len(msgs))
	for _, m := range msgs {
		if m.msg.UUID != "" && len(m.handlers) > 0 {
			ids = append(ids, m.msg.UUID)
		}
	}
	if err := w.runner.store.InFlight(ctx, w.name, me, ids); err != nil {
		// An error of the store is no message's fault.
		return &Error{Class: ClassTransient, Code: provider.CodeOf(err), Err: fmt.Errorf("name what runs: %w", err)}
	}
	return nil
}
