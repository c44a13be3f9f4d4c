package projector

import (
	"context"
	"fmt"
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
	if c.Retry.Spent(before + 1) {
		return d
	}
	for range max(before-1, 0) {
		d = max(c.Lease, 8*min(d, 3*time.Hour))
	}
	return d
}

// watch knows whether a message may have been in the hands of a runner whose process ended. Such a message was recorded
// before that end. So only messages recorded before the last unclean end, or before this runner began if that was
// less than a lease ago, are named before they run. See docs/adr/0014.
type watch struct {
	always bool
	mu     sync.Mutex
	began  provider.Health // at the first beat
	health provider.Health // at the last one
	first  time.Time       // the time of began, on this process's clock
	last   time.Time       // the time of health, on this process's clock
	lease  time.Duration
	clock  func() time.Time
}

// skew is how far the store's clock may seem to be ahead: a message recorded later than that is not believed.
const skew = time.Minute

// suspicious says whether one of msgs may have been in the hands of a runner whose process ended.
func (w *watch) suspicious(msgs []*inbound) bool {
	if w.always {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.first.IsZero() {
		return true // the store has not answered yet
	}
	now, limit := w.clock(), w.health.Crashed
	if now.Sub(w.first) < w.lease && limit.Before(w.began.Now) {
		limit = w.began.Now
	}
	if limit.IsZero() {
		return false
	}
	future := w.health.Now.Add(now.Sub(w.last) + skew)
	for _, m := range msgs {
		if at := m.raw.RecordedAt; at.IsZero() || !at.After(limit) || at.After(future) {
			return true
		}
	}
	return false
}

// beat tells the store that the runner is alive, and learns who is not.
func (r *Runner) beat(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	health, err := r.store.Beat(ctx, r.id, r.cfg.Lease, r.cfg.Record)
	if err != nil {
		if provider.ClassOf(err) == ClassShutdown {
			return
		}
		r.cfg.Logger.Warn("the runner could not renew its lease", "class", provider.ClassOf(err).String(), "code", provider.CodeOf(err))
		return
	}
	r.watch.mu.Lock()
	defer r.watch.mu.Unlock()
	if r.watch.last = r.cfg.Clock(); r.watch.first.IsZero() {
		r.watch.first, r.watch.began = r.watch.last, health
	}
	r.watch.health = health
}

// stayAlive beats three times in a lease until stop is called, also after the end of ctx. If it is a clean stop, the
// store learns that the runner ended well.
func (r *Runner) stayAlive(ctx context.Context) (stop func(clean bool)) {
	r.beat(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var beats sync.WaitGroup
	beats.Go(func() {
		for wait(ctx, r.cfg.Lease/3); ctx.Err() == nil; wait(ctx, r.cfg.Lease/3) {
			r.beat(ctx)
		}
	})
	return func(clean bool) {
		cancel()
		beats.Wait()
		if !clean {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Timeout)
		defer cancel()
		_, _ = r.store.Beat(ctx, r.id, 0, r.cfg.Record) // if it fails, the lease ends by itself
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
	if err := w.store.Name(ctx, w.name, me, ids); err != nil {
		// An error of the store is no message's fault.
		return &Error{Class: ClassTransient, Code: provider.CodeOf(err), Err: fmt.Errorf("name what runs: %w", err)}
	}
	return nil
}
