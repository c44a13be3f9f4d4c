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

// process is locked shared by every unit, and exclusively by each attempt at a message that may
// crash the process. So such a message does not interrupt other units of this process, of any
// runner.
var process sync.RWMutex

// spacing is how long no other runner tries a message that may have crashed processes, after an
// attempt that follows this number of earlier ones: a lease, then eight times as long each time,
// at most a day. So the message is stuck only if its process ended during each of its attempts,
// over at least a quarter of an hour. After the last attempt it is a lease.
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

// watch is what a runner knows about other runners since its last heartbeat, on the store's
// clock. If a process crashed while it processed a message, the event is older than the crash. So a
// message is recorded as in flight before it runs only if its event is older than the last crash,
// or older than this runner if it started less than a lease ago. See docs/adr/0014. The clock of
// other software is not compared.
type watch struct {
	began time.Time // at the first heartbeat
	until time.Time // messages recorded until then may have crashed a process; zero: none
	now   time.Time // at the last heartbeat
	at    time.Time // the same on this process's clock
}

// skew is how far the store's clock may be ahead. A message recorded later than that has a wrong
// time.
const skew = time.Minute

// suspicious reports whether one of msgs may have been in flight when a process crashed.
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
		return m.isForeign || at.IsZero() || !at.After(w.until) || at.After(future)
	})
}

// beat sends a heartbeat: the runner is alive for a lease, or ended cleanly if lease is zero. The
// store returns whether other runners have crashed.
func (r *Runner) beat(ctx context.Context, lease time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	health, err := r.store.Beat(ctx, r.id, lease, r.cfg.Record)
	if err != nil {
		if provider.ClassOf(err) != ClassShutdown {
			r.report(slog.LevelWarn, "runner lease not renewed", err)
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

// stayAlive sends three heartbeats per lease until stop is called, also after the end of ctx.
// stop(true) records a clean end of the runner.
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
			r.beat(context.WithoutCancel(ctx), 0) // if this fails, the lease expires
		}
	}
}

// recordInFlight records in the store which messages w is about to run.
func (w *worker) recordInFlight(ctx context.Context, me provider.Worker, msgs []*inbound) error {
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	ids := make([]string, 0, len(msgs))
	for _, m := range msgs {
		if m.id != "" && len(m.handlers) > 0 {
			ids = append(ids, m.id)
		}
	}
	if err := w.runner.store.InFlight(ctx, w.build(), me, ids); err != nil {
		// An error of the store is not the fault of a message.
		err = fmt.Errorf("record messages in flight: %w", err)
		return &Error{Class: ClassTransient, Code: provider.CodeOf(err), Err: err}
	}
	return nil
}
