// Package presence reports that a service is alive, and follows what operators have paused.
package presence

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

const (
	// followEvery is the interval between two reads of the pauses.
	followEvery = time.Second
	// reportEvery is the number of reads between two reports.
	reportEvery = 5
	// lease is how long a report counts.
	lease = 30 * time.Second
	limit = 10 * time.Second // for one call of the store
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
func (p *Presence) Follow(outer context.Context) {
	if p.store == nil {
		return
	}
	ctx, cancel := context.WithTimeout(outer, limit)
	defer cancel()
	all, err := p.store.Pauses(ctx)
	if err == nil {
		p.paused.Store(&all)
	}
	if outer.Err() == nil {
		p.note(err)
	}
}

// note warns of the first of several failures. Until the store answers again, the pauses stay as they are.
func (p *Presence) note(err error) {
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
		if n%reportEvery == 0 {
			p.send(ctx, lease)
		} else {
			p.Follow(ctx)
		}
		pauses.Wait(ctx, followEvery, nil)
	}
	// If this fails, the lease expires.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	r := p.report()
	r.ID = p.idOf(r)
	_ = p.store.Report(end, r, 0)
}

func (p *Presence) idOf(r provider.ServiceReport) string {
	if r.ID != "" {
		return r.ID
	}
	return p.id
}

func (p *Presence) send(outer context.Context, lease time.Duration) {
	p.Follow(outer)
	ctx, cancel := context.WithTimeout(outer, limit)
	defer cancel()
	r := p.report()
	r.ID, r.Process, r.Clock = p.idOf(r), Process(), p.clock()
	err := p.store.Report(ctx, r, lease)
	if outer.Err() == nil {
		p.note(err)
	}
}
