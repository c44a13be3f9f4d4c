package unit

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Crashes knows which messages may have been in flight when a process crashed.
type Crashes struct {
	Host *model.Host
	// Process is locked shared by every unit, and exclusively by each attempt at a message that may crash
	// the process. So such a message does not interrupt other units of this process, of any runner.
	Process *sync.RWMutex
	watch   atomic.Pointer[watch] // nil: the store has not answered yet
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

// suspects reports whether one of the messages of a unit may have been in flight when a process crashed.
func (c *Crashes) suspects(u *Unit) bool {
	if u.Intent.Advance != nil {
		return u.Suspect || c.Host.Careful
	}
	w := c.watch.Load()
	if w == nil || c.Host.Careful {
		return true
	}
	if w.until.IsZero() {
		return false
	}
	future := w.now.Add(c.Host.Clock().Sub(w.at) + skew)
	return slices.ContainsFunc(u.Messages, func(m *model.Message) bool {
		at := m.Raw.RecordedAt
		return m.IsForeign || at.IsZero() || !at.After(w.until) || at.After(future)
	})
}

func (c *Crashes) record(ctx context.Context, number int, u *Unit) error {
	ctx, cancel := c.Host.Limited(ctx)
	defer cancel()
	u.Intent.Careful = &provider.Worker{Runner: c.Host.ID, Number: number}
	ids := make([]string, 0, len(u.Messages))
	for _, m := range u.Messages {
		if m.ID != "" && len(m.Handlers) > 0 && m.Aside == nil { // no handler of others runs
			ids = append(ids, m.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	b := provider.Build{Projector: u.Intent.Projector, Generation: u.Intent.Generation}
	if err := c.Host.Store.InFlight(ctx, b, *u.Intent.Careful, ids); err != nil {
		// An error of the store is not the fault of a message.
		err = fmt.Errorf("record messages in flight: %w", err)
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeOf(err), Err: err}
	}
	return nil
}

// beat sends a heartbeat: the runner is alive for a lease, or ended cleanly if lease is zero. The
// store returns whether other runners have crashed.
func (c *Crashes) beat(ctx context.Context, lease, record time.Duration) {
	ctx, cancel := c.Host.Limited(ctx)
	defer cancel()
	health, err := c.Host.Store.Beat(ctx, c.Host.ID, lease, record)
	if err != nil {
		if provider.ClassOf(err) != provider.ClassShutdown {
			c.Host.Report(slog.LevelWarn, "runner lease not renewed", err)
		}
		return
	}
	w := &watch{began: health.Now, until: health.Crashed, now: health.Now, at: c.Host.Clock()}
	if before := c.watch.Load(); before != nil {
		w.began = before.began
	}
	if w.now.Sub(w.began) < c.Host.Lease && w.until.Before(w.began) {
		w.until = w.began
	}
	c.watch.Store(w)
}

// StayAlive sends three heartbeats per lease until stop is called, also after the end of ctx.
// stop(true) records a clean end of the runner.
func (c *Crashes) StayAlive(ctx context.Context) (stop func(clean bool)) {
	lease, record := c.Host.Lease, c.Host.Record
	c.beat(ctx, lease, record)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var beats sync.WaitGroup
	beats.Go(func() {
		for model.Wait(ctx, lease/3); ctx.Err() == nil; model.Wait(ctx, lease/3) {
			c.beat(ctx, lease, record)
		}
	})
	return func(clean bool) {
		cancel()
		beats.Wait()
		if clean {
			c.beat(context.WithoutCancel(ctx), 0, record) // if this fails, the lease expires
		}
	}
}
