package apply

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// brake lets a worker wait while messages fail one after the other and none is applied: a service that a handler
// needs may be down, and then the backlog should stay where it is. It counts each cause by itself, and
// only failures that may pass: what is wrong with a message, such as an event that cannot be decoded, says nothing about
// the next one.
type brake struct {
	since  int64         // unit.Group.Applied
	failed map[cause]int // since then
	worst  cause         // with the most failures
}

// cause is why messages fail: the handler, and the code of its errors.
type cause struct{ handler, code string }

// brakeFrom is the number of failures in a row after which a worker waits.
const brakeFrom = 3

// Limits of the pause of a worker. It doubles with each failure.
const (
	brakeMin = 100 * time.Millisecond
	brakeMax = 30 * time.Second
)

func (b *brake) count(a *model.Aside, applied int64) {
	if provider.ClassOf(a.Cause) != provider.ClassUnknown {
		return
	}
	if b.failed == nil || b.since != applied {
		b.since, b.failed, b.worst = applied, map[cause]int{}, cause{}
	}
	c := cause{a.Handler, provider.CodeOf(a.Cause)}
	if b.failed[c]++; b.failed[c] > b.failed[b.worst] {
		b.worst = c
	}
}

// pause returns how long the worker waits before its next message. Zero if it does not.
func (b *brake) pause(applied int64) time.Duration {
	n := b.failed[b.worst] - brakeFrom
	if n < 0 || b.since != applied {
		return 0
	}
	return min(brakeMin<<min(n, 10), brakeMax)
}

// BackOff waits if messages fail one after the other, until any worker of the projector applies one.
func (a *Applier) BackOff(ctx context.Context) {
	h, b := a.Worker.Host, &a.brake
	pause := b.pause(a.Worker.Group.Applied.Load())
	if pause == 0 {
		return
	}
	name := a.Worker.Projector.Name
	a.Brakes.set(a, provider.Outage{
		Projector: name, Handler: b.worst.handler, Class: provider.ClassUnknown.String(), Code: b.worst.code, Until: h.Clock().Add(pause),
	})
	h.Logger.Log(ctx, slog.LevelWarn, "messages fail one after the other: the worker waits",
		"projector", name, "handler", b.worst.handler, "code", b.worst.code, "failures", b.failed[b.worst], "again_in", pause)
	a.Worker.Loop.Rest()
	for ; pause > 0 && a.Worker.Group.Applied.Load() == b.since && ctx.Err() == nil; pause -= PausedLook {
		pauses.Wait(ctx, min(pause, PausedLook))
	}
}

// PausedLook is the interval between two looks at whether a paused projector was resumed.
const PausedLook = 100 * time.Millisecond

// Brakes are the appliers of a runner that wait, or try the first message after that.
type Brakes struct {
	mu  sync.Mutex
	all map[*Applier]braked
}

type braked struct {
	provider.Outage
	since int64 // brake.since
}

func (b *Brakes) set(a *Applier, o provider.Outage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all == nil {
		b.all = map[*Applier]braked{}
	}
	b.all[a] = braked{o, a.brake.since}
}

func (b *Brakes) remove(a *Applier) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.all, a)
}

// List returns one outage for each projector and cause: that of the applier that waits longest.
func (b *Brakes) List() (all []provider.Outage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for of, o := range b.all {
		if of.Worker.Group.Applied.Load() != o.since { // over
			delete(b.all, of)
			continue
		}
		i := slices.IndexFunc(all, func(a provider.Outage) bool {
			return a.Projector == o.Projector && a.Handler == o.Handler && a.Code == o.Code
		})
		switch {
		case i < 0:
			all = append(all, o.Outage)
		case all[i].Until.Before(o.Until):
			all[i].Until = o.Until
		}
	}
	slices.SortFunc(all, func(a, b provider.Outage) int {
		return cmp.Or(cmp.Compare(a.Projector, b.Projector), cmp.Compare(a.Handler, b.Handler), cmp.Compare(a.Code, b.Code))
	})
	return all
}
