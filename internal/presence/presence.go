// Package presence reports that a service is alive, and follows what operators have paused.
package presence

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

const (
	followEvery = time.Second      // between two reads of the pauses
	reportEvery = 5                // reads between two reports
	lease       = 30 * time.Second // how long a report counts
	limit       = 10 * time.Second // for one call of the store
)

// Presence is one service. Create it with New.
type Presence struct {
	store  provider.Operations
	id     string
	clock  func() time.Time
	report func() provider.ServiceReport
	paused atomic.Pointer[[]provider.Pause]
	warn   func(error)
	failed atomic.Bool // the last call of the store failed
}

// New returns the presence of a service in a store, which reports what report returns. An empty ID gets
// a new one. If the store has no Operations, Run returns at once.
func New(store any, clock func() time.Time, warn func(error), report func() provider.ServiceReport) *Presence {
	return &Presence{store: provider.OperationsOf(store), id: uuid.NewString(), clock: clock, warn: warn, report: report}
}

// Version returns the version of the program's main module, which contains the revision; "" if the build does not have it.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return ""
}

// Process returns the host and the number of this process.
func Process() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// Paused returns the names of a kind that are paused, as of the last read.
func (p *Presence) Paused(kind string) (names []string) {
	if all := p.paused.Load(); all != nil {
		for _, one := range *all {
			if one.Kind == kind {
				names = append(names, one.Name)
			}
		}
	}
	return names
}

// IsPaused reports whether a name is paused, as of the last read.
func (p *Presence) IsPaused(kind, name string) bool {
	all := p.paused.Load()
	return all != nil && slices.ContainsFunc(*all, func(one provider.Pause) bool { return one.Kind == kind && one.Name == name })
}

// Follow reads the pauses once. Services call it before they begin.
func (p *Presence) Follow(ctx context.Context) {
	p.call(ctx, func(ctx context.Context) error {
		all, err := p.store.Pauses(ctx)
		if err == nil {
			p.paused.Store(&all)
		}
		return err
	})
}

// call calls the store, and warns of the first of several failures. Until the store answers again, the pauses stay as they are.
func (p *Presence) call(outer context.Context, fn func(ctx context.Context) error) {
	if p.store == nil {
		return
	}
	ctx, cancel := context.WithTimeout(outer, limit)
	defer cancel()
	err := fn(ctx)
	if outer.Err() != nil {
		return
	}
	if failed := p.failed.Swap(err != nil); err != nil && !failed {
		p.warn(err)
	}
}

// Run reports and follows until ctx ends. Then it records a clean end.
func (p *Presence) Run(ctx context.Context) {
	if p.store == nil {
		return
	}
	for n := 0; ctx.Err() == nil; n++ {
		if p.Follow(ctx); n%reportEvery == 0 {
			p.call(ctx, func(ctx context.Context) error { return p.send(ctx, lease) })
		}
		pauses.Wait(ctx, followEvery, nil)
	}
	// If this fails, the lease expires.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = p.send(end, 0)
}

func (p *Presence) send(ctx context.Context, lease time.Duration) error {
	r := p.report()
	r.ID, r.Process, r.Version, r.Clock = cmp.Or(r.ID, p.id), Process(), cmp.Or(r.Version, Version()), p.clock()
	return p.store.Report(ctx, r, lease)
}
