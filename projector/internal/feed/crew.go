package feed

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/deliver"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/projector/internal/sent"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// crew applies the messages of one generation at a time: its workers those that are delivered and those that are parked,
// and its reader those of the log.
type crew struct {
	feeder   *Feeder
	current  atomic.Pointer[generation.Row]
	group    unit.Group
	asker    *sent.Asker
	parked   *parked.Parked
	pool     *deliver.Pool
	post     *follow.Post // nil: it reads no log
	yield    follow.Yield
	wanted   atomic.Int64  // when messages were seen last that waited for this program, in nanoseconds
	resplit  pauses.Signal // the segments have changed
	assigned pauses.Signal // the crew feeds another generation, or messages wait for this program
	stop     func()        // returns when its goroutines have ended
}

func (f *Feeder) newCrew(g *generation.Row) *crew {
	h, p := f.Host, f.Projector
	c := &crew{feeder: f, resplit: pauses.NewSignal(), assigned: pauses.NewSignal()}
	c.current.Store(g)
	c.asker = &sent.Asker{Host: h, Projector: p}
	c.parked = &parked.Parked{Host: h, Projector: p, Receiver: f.Receiver, Reads: !f.Me.Tool}
	c.pool = &deliver.Pool{Host: h, Projector: p, Current: &c.current, Parked: c.parked, Missed: f.Missed}
	for range h.Concurrency {
		c.pool.Add(c.applier(cmp.Or(h.Batch, model.DeliveryBatch), &c.group, c.asker))
	}
	if p.Logged {
		c.post = c.newPost(0)
	}
	return c
}

// applier returns who applies messages, at most a number of them in a unit.
func (c *crew) applier(batch int, group *unit.Group, asker *sent.Asker) *apply.Applier {
	f := c.feeder
	w := &unit.Worker{
		Host: f.Host, Projector: f.Projector, Number: int(f.Host.Workers.Add(1)) - 1, Group: group, Crashes: f.Crashes,
	}
	return &apply.Applier{Worker: w, Brakes: f.Brakes, Turn: &sent.Turn{Asker: asker}, Batch: batch}
}

// newPost returns the post of the checkpoint, or of a segment. Failures of one segment say nothing about the others.
func (c *crew) newPost(segment int) *follow.Post {
	f, group, asker := c.feeder, &c.group, c.asker
	if segment > 0 {
		group, asker = &unit.Group{}, &sent.Asker{Host: f.Host, Projector: f.Projector}
	}
	return &follow.Post{
		Host: f.Host, Projector: f.Projector, Current: &c.current,
		Applier: c.applier(cmp.Or(f.Host.Batch, model.LogBatch), group, asker),
		Parked:  c.parked, Missed: f.Missed, Yield: &c.yield, Resplit: c.resplit, Segment: segment, Token: claim.NewToken(), Pace: rebuild.Pace,
	}
}

// start starts the goroutines of a crew. They end when ctx ends.
func (c *crew) start(ctx, hard context.Context, all *sync.WaitGroup) {
	c.pool.Start(ctx, hard, all)
	if c.post == nil {
		return
	}
	all.Go(func() { c.read(ctx, hard) })
	if c.feeder.Projector.Rules.Segments > 1 && !c.feeder.Kept {
		all.Go(func() { c.share(ctx, hard) })
	}
}

// Pauses of a reader that finds nothing to do. An append through the same provider ends them.
const (
	readMin = model.Soon
	readMax = time.Second
	// while deliveries are left to readers, and while a build is near the live generation
	sharedMax = 20 * time.Millisecond
)

// read reads the log while this program has the lease of the checkpoint, until ctx ends.
func (c *crew) read(ctx, hard context.Context) {
	defer c.post.Applier.Begin()()
	h := c.feeder.Host
	for ctx.Err() == nil {
		g := c.current.Load()
		if g.Generation == 0 {
			model.Wait(ctx, followFast)
			continue
		}
		had, err := h.Leases.While(ctx, c.post.Lease(g), c.post.Token, func(ctx context.Context) error {
			for ; ; model.Wait(ctx, readMin) {
				if now := c.current.Load(); now.Build == g.Build {
					g = now
				}
				if err := c.serve(ctx, hard, c.post, g, c.assigned); !errors.Is(err, follow.ErrNewHandlers) {
					return err
				}
			}
		})
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, model.ErrLogChanged), errors.Is(err, provider.ErrEnded) && c.feeder.Kept: // no other generation follows
			h.End(err)
			return
		case errors.Is(err, follow.ErrYields):
			model.Wait(ctx, follow.YieldFor)
		case errors.Is(err, provider.ErrEnded):
			h.Follow.Send()
			model.Wait(ctx, followFast)
		case err != nil && !errors.Is(err, provider.ErrFenced):
			c.post.ReportError(err)
			model.Wait(ctx, h.Lease/3)
		case had:
			model.Wait(ctx, readMin)
		default:
			_, _ = h.ReadLogID(ctx) // deliveries require it
			pause := h.Lease / 3
			if !g.IsLive() || h.Clock().Sub(time.Unix(0, c.wanted.Load())) < h.Lease {
				pause = min(followFast, pause)
			}
			pauses.Wait(ctx, pause, c.assigned)
		}
	}
}

func (c *crew) role(r *follow.Reader, g *generation.Row) follow.Role {
	switch {
	case r.Segment > 0, g.IsLive() && c.feeder.Projector.Rules.OnlyLog:
		return follow.FromLog{Reader: r}
	case !g.IsLive():
		return &rebuild.Trail{Reader: r, Switcher: &rebuild.Switcher{Reader: r}, Reached: c.feeder.Reached}
	}
	return &follow.Complete{Reader: r}
}

// serve reads until ctx ends, or an error. It returns ErrFenced if another reader has changed the checkpoint, and nil
// if this program is to serve another generation now, or in another way; assigned wakes it then.
func (c *crew) serve(ctx, hard context.Context, p *follow.Post, g *generation.Row, assigned pauses.Signal) error {
	defer p.Applier.Worker.Loop.Rest()
	ctx, cancel := context.WithCancel(ctx)
	r, err := p.Attach(ctx, g)
	defer func() {
		cancel()
		if r != nil {
			r.Detach(ctx)
		}
	}()
	if err == nil {
		err = r.Restore(ctx, hard, g)
	}
	if err != nil {
		return err
	}
	role := c.role(r, g)
	for tries, pause := 0, readMin; ctx.Err() == nil; {
		var appended <-chan struct{}
		if w, ok := c.feeder.Host.Log.(provider.LogWaker); ok && r.At().Mode == provider.ModeCatchUp {
			appended = w.Appended()
		}
		now := c.current.Load()
		if now.Build != g.Build || now.IsLive() != g.IsLive() {
			return nil
		}
		g = now
		more, err := step(ctx, hard, r, role, g)
		p.Applier.Worker.Loop.Rest()
		if tries++; err == nil {
			tries = 0
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, provider.ErrFenced), errors.Is(err, model.ErrLogChanged), errors.Is(err, provider.ErrEnded), errors.Is(err, follow.ErrYields),
			errors.Is(err, follow.ErrNewHandlers):
			return err
		case errors.Is(err, follow.ErrServer), errors.Is(err, sent.ErrTurn):
			pause = readMin
		case err != nil:
			p.ReportError(err)
			pause, _ = c.feeder.Host.Retry.Delay(tries)
			r.Forget()
		case more:
			pause = readMin
			continue
		default:
			pause = c.pause(r, g, pause)
		}
		r.Resting = pause == readMax
		select {
		case <-ctx.Done():
		case <-appended:
			pause, r.Resting = readMin, false
		case <-assigned:
		case <-time.After(pause):
		}
	}
	return nil
}

// pause returns the pause after a step that has found nothing to do.
func (c *crew) pause(r *follow.Reader, g *generation.Row, last time.Duration) time.Duration {
	switch {
	case r.At().Mode == provider.ModeLive:
		return min(max(c.feeder.Host.Grace/5, readMin), readMax)
	case g.Shared || g.IsBuild() || g.Promoted:
		return min(2*last, sharedMax)
	}
	return min(2*last, readMax)
}

// step does one thing.
func step(ctx, hard context.Context, r *follow.Reader, role follow.Role, g *generation.Row) (more bool, err error) {
	ready, more, err := r.Ready(ctx, hard, g)
	if err != nil || !ready {
		return more, err
	}
	return role.Step(ctx, hard, g)
}
