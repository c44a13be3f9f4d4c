package providertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"

	"github.com/kinora-go/kinora/provider"
)

var switchCrowdCases = []testCase{
	{
		// Promise: R4.1
		name: "several switches at once", play: switchesOfOneRevision,
		rule: "Of several units with Switch that set the same generations, exactly one commits. The others are ErrFenced",
	},
	{
		// Promise: R1.1
		name: "switches and rollbacks under deliveries", play: switchesInCrowd,
		rule: "Each event takes effect once in each generation, while deliveries to both generations run and the live one is switched back and forth",
	},
}

func switchesOfOneRevision(s *stage) {
	const callers = 8
	for round := range 3 {
		all, errs := s.all(), make([]error, callers)
		together(callers, func(i int) {
			errs[i] = unlessBusy(func() error {
				return s.do(s.ctx, s.switching(all, 2-round%2, standby), func(o opened) (provider.Closing, error) {
					return provider.Closing{}, o.add("k", 1)
				})
			})
		})
		s.only(errs)
		same(s, "effects of switches", s.total("k"), round+1)
		s.isLive(2 - round%2)
	}
}

// changeover is a crowd of deliveries to two generations, and of switches.
type changeover struct {
	*stage
	appended atomic.Int64 // the last event of the log
	ahead    atomic.Int64 // events that a generation applied before the live one
	behind   atomic.Int64 // events that a generation had not applied when it became live
	over     atomic.Bool
}

// once adds 1 to the total of each fresh message in a generation.
func once(generation int, messages func() []provider.Message) func(o opened) (provider.Closing, error) {
	return func(o opened) (provider.Closing, error) {
		for i, m := range messages() {
			if !o.Fresh[i][0] {
				continue
			}
			if err := o.add(fmt.Sprint(generation, " ", m.ID), 1); err != nil {
				return provider.Closing{}, err
			}
		}
		return provider.Closing{}, nil
	}
}

// runOnce runs u, with effects in its generation.
func (c *changeover) runOnce(u provider.Unit) error {
	return c.do(c.ctx, u, once(u.Generation, func() []provider.Message { return u.Messages }))
}

// arrives delivers an event to a generation, until its reader is not closing.
func (c *changeover) arrives(generation int, at int64) error {
	for {
		err := c.runOnce(c.in(generation).events(at))
		if provider.CodeOf(err) != provider.CodeClosing {
			return err
		}
		if err = c.pause(); err != nil {
			return err
		}
	}
}

// upToNow returns the events of the log.
func (c *changeover) upToNow(of *stage) []provider.Message {
	var all []int64
	for at := range c.appended.Load() {
		all = append(all, at+1)
	}
	return of.events(all...).Messages
}

// changesTo makes a generation live, with the events that the live one has applied.
func (c *changeover) changesTo(next int) error {
	of := c.in(next)
	all, err := c.db.Generations(c.ctx, c.name)
	if err != nil {
		return err
	}
	u := c.switching(all, next, standby)
	at, err := c.db.Checkpoint(c.ctx, of.build())
	if err != nil {
		return err
	}
	u.Reader = &provider.Reader{Mode: at.Mode, Token: at.Token}
	var last []provider.Message
	u.Switch.Last = func(ctx context.Context, live provider.Live) ([]provider.Message, error) {
		events := c.upToNow(of)
		unapplied, err := live.Unapplied(ctx, events)
		if err != nil {
			return nil, err
		}
		own, err := c.db.Unapplied(ctx, of.build(), events)
		if err != nil {
			return nil, err
		}
		for i, m := range events {
			switch {
			case !unapplied[i]:
				last = append(last, m)
			case !own[i]:
				c.ahead.Add(1)
			}
		}
		return last, nil
	}
	if err := c.do(c.ctx, u, once(next, func() []provider.Message { return last })); err != nil {
		return err
	}
	return c.compare(3-next, next)
}

// compare counts the events that a generation has applied, and another one has not.
func (c *changeover) compare(generation, other int) error {
	events := c.upToNow(c.stage)
	first, err := c.db.Unapplied(c.ctx, c.in(generation).build(), events)
	if err != nil {
		return err
	}
	second, err := c.db.Unapplied(c.ctx, c.in(other).build(), events)
	for i := range second {
		if second[i] && !first[i] {
			c.behind.Add(1)
		}
	}
	return err
}

// goesLive makes deliveries to a generation that has become live apply events, and moves its
// checkpoint over two thirds of the events.
func (c *changeover) goesLive(generation int) error {
	of := c.in(generation)
	at, err := c.db.Checkpoint(c.ctx, of.build())
	if err != nil {
		return err
	}
	to := at.Place.Position
	for _, mode := range []provider.Mode{provider.ModeClosing, provider.ModeLive} {
		next := at
		next.Mode = mode
		ok, err := c.db.SetCheckpoint(c.ctx, of.build(), at, next)
		if err != nil || !ok {
			return errors.Join(err, fmt.Errorf("the checkpoint was set: %t", ok))
		}
		if at = next; mode == provider.ModeLive {
			break
		}
		u := of.unit(c.upToNow(of)...)
		to = int64(2 * len(u.Messages) / 3)
		u.Reader = &provider.Reader{Mode: at.Mode, Token: at.Token}
		if err := c.runOnce(u); err != nil {
			return err
		}
	}
	if to <= at.Place.Position {
		return nil
	}
	err = c.runOnce(of.upTo(at, to))
	if err == nil {
		_, err = c.db.PruneApplied(c.ctx, of.build(), []string{c.name + "/posted"}, int(to))
	}
	return err
}

// switchesInCrowd appends events and delivers each to both generations, some of them again, while
// the live generation changes.
func switchesInCrowd(s *stage) {
	const events, redeliverers, switches = 60, 2, 6
	s.begins(0, provider.ModeLive)
	s.in(2).begins(0, provider.ModeCatchUp)
	c := &changeover{stage: s}
	errs := make([]error, redeliverers+2)
	together(len(errs), func(i int) {
		switch i {
		case 0:
			for at := int64(1); errs[i] == nil && (at <= events || !c.over.Load()); at++ {
				n := (at-1)%events + 1
				c.appended.Store(max(c.appended.Load(), n))
				errs[i] = errors.Join(c.arrives(1, n), c.arrives(2, n))
			}
		case 1:
			defer c.over.Store(true)
			for n := 0; n < switches && errs[i] == nil; n++ {
				next := 2 - n%2
				errs[i] = unlessBusy(func() error { return c.changesTo(next) })
				if errs[i] == nil {
					errs[i] = c.goesLive(next)
				}
			}
		default:
			for errs[i] == nil && !c.over.Load() {
				if last := c.appended.Load(); last > 0 {
					errs[i] = c.arrives(1+rand.IntN(2), 1+rand.Int64N(last))
				}
			}
		}
	})
	s.ok(errors.Join(errs...), "deliver and switch at once")
	same(s, "events that a generation applied before the live one", c.ahead.Load(), 0)
	same(s, "events that the live generation had not applied", c.behind.Load(), 0)
	s.isLive(1)
	for generation := 1; generation <= 2; generation++ {
		of := s.in(generation)
		s.ok(c.runOnce(of.reading(of.unit(c.upToNow(of)...))), "apply the rest")
		for at := range int64(events) {
			same(s, fmt.Sprintf("effects of event %d in generation %d", at+1, generation), s.total(fmt.Sprint(generation, " e-", at+1)), 1)
		}
	}
}
