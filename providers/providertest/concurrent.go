package providertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var concurrentCases = []testCase{
	{
		// Promise: G4.1
		name: "many deliveries at once", play: deliveriesAtOnce,
		rule: "Each marker waits for a concurrent unit that writes the same one. If that unit commits, the message is not fresh: there is one effect and no error",
	},
	{
		name: "many deliveries at once, the first ones failing", play: firstOnesFail,
		rule: "Each marker waits for a concurrent unit that writes the same one. If that unit rolls back, the message is fresh",
	},
	{
		name: "distinct messages at once", play: distinctAtOnce,
		rule: "A marker is of one message: every other message takes effect, even at the same time and on the same total",
	},
	{
		name: "crossing units", play: crossingUnits,
		rule: "The markers are written in sorted order. Concurrent units that share messages, in any order, wait for each other; none fails, and each message takes effect once",
	},
	{
		name: "a wait that its context ends", unless: Deferred, play: waitEnds,
		rule: "A unit that waits for another ends with its context. Its error is not permanent, and nothing is committed",
	},
	{
		name: "two units in run at once", only: Deferred, play: inRunAtOnce,
		rule: "Of two units with the same message that are both in run, one takes effect",
	},
	{
		// Promise: R1.1
		name: "a unit with Switch waits for open units", unless: Deferred, play: switchWaits,
		rule: "A unit with Switch waits until no other unit of the projector is open, in any generation",
	},
	{
		name: "units that wait for a unit with Switch", play: unitWaitsForSwitch,
		rule: "Units that open later wait for a unit with Switch, and see the generations that it has set",
	},
	{
		name: "units and switches at once", play: switchesAtOnce,
		rule: "A switch does not change the generation of a unit: each message takes effect once in each generation",
	},
	{
		name: "units that deadlock, and serial units", play: serialUnits,
		rule: "A deadlock is transient with CodeDeadlock. Unit.Serial: the unit waits until no other serial unit of the projector is open",
	},
}

const storm = 50

func deliveriesAtOnce(s *stage) {
	for round := range 3 {
		id, errs := fmt.Sprint("m-", round), make([]error, storm)
		together(storm, func(i int) {
			errs[i] = s.do(s.ctx, s.of(id), func(o opened) (provider.Closing, error) {
				_, err := effects(o)
				return provider.Closing{Output: []outbox.Message{{ID: s.name + id, Topic: s.name}}}, err
			})
		})
		s.ok(errors.Join(errs...), "deliver at once")
		same(s, "total", s.total(id), 1)
		same(s, "entries", len(s.entries(outbox.Filter{Topic: s.name})), round+1)
	}
}

func firstOnesFail(s *stage) {
	refusals, errs := make(chan error, 10), make([]error, storm)
	for range cap(refusals) {
		refusals <- errRefused
	}
	together(storm, func(i int) {
		errs[i] = s.do(s.ctx, s.of("m-1"), func(o opened) (provider.Closing, error) {
			c, err := effects(o)
			select {
			case refusal := <-refusals:
				return c, errors.Join(err, refusal)
			default:
				return c, err
			}
		})
	})
	for _, err := range errs {
		s.require(err == nil || errors.Is(err, errRefused), "the error %v is nil or run's", err)
	}
	same(s, "refusals left", len(refusals), 0)
	same(s, "total", s.total("m-1"), 1)
}

func distinctAtOnce(s *stage) {
	for range 2 {
		errs := make([]error, storm)
		together(storm, func(i int) {
			errs[i] = s.do(s.ctx, s.of(fmt.Sprint("m-", i)), func(o opened) (provider.Closing, error) {
				if !o.Fresh[0][0] {
					return provider.Closing{}, nil
				}
				return provider.Closing{}, o.add("k", i+1)
			})
		})
		s.ok(errors.Join(errs...), "deliver at once")
		same(s, "total of distinct messages", s.total("k"), storm*(storm+1)/2)
	}
}

func crossingUnits(s *stage) {
	const rounds, messages, units = 3, 300, 16
	for range rounds {
		ids := make([]string, messages)
		for i := range ids {
			ids[i] = newID()
		}
		us, errs := make([]provider.Unit, units), make([]error, units)
		for i := range us {
			rand.Shuffle(messages, func(a, b int) { ids[a], ids[b] = ids[b], ids[a] })
			us[i] = s.of(ids[:messages-i*10]...)
		}
		together(units, func(i int) {
			errs[i] = s.do(s.ctx, us[i], func(o opened) (provider.Closing, error) {
				n := 0
				for _, fresh := range o.Fresh {
					if fresh[0] {
						n++
					}
				}
				return provider.Closing{}, o.add("k", n)
			})
		})
		s.ok(errors.Join(errs...), "crossing units")
	}
	same(s, "effects", s.total("k"), rounds*messages)
}

// inside opens a unit. finish lets it continue, and returns its error.
func (s *stage) inside(u provider.Unit, run func(o opened) (provider.Closing, error)) (finish func() error) {
	s.Helper()
	entered, left, done := make(chan struct{}, 8), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
			entered <- struct{}{}
			select {
			case <-left:
			case <-s.ctx.Done():
			}
			return run(o)
		})
	}()
	select {
	case <-entered:
	case err := <-done:
		s.Fatalf("the unit ended too early: %v", err)
	}
	return func() error {
		close(left)
		return <-done
	}
}

func waitEnds(s *stage) {
	finish := s.inside(s.of("m-1"), effects)
	ctx, cancel := context.WithTimeout(s.ctx, 50*time.Millisecond)
	defer cancel()
	err := s.do(ctx, s.of("m-1"), effects)
	left := finish()
	s.classed(err, "a unit that waits", notPermanent...)
	s.ok(left, "the unit that it waited for")
	same(s, "total", s.total("m-1"), 1)
	same(s, "fresh later", s.open(s.of("m-1"), effects).Fresh, [][]bool{{false}})
}

func inRunAtOnce(s *stage) {
	var inside sync.WaitGroup
	inside.Add(2)
	arrive, errs := []func(){sync.OnceFunc(inside.Done), sync.OnceFunc(inside.Done)}, make([]error, 2)
	together(2, func(i int) {
		errs[i] = s.do(s.ctx, s.of("m-1"), func(o opened) (provider.Closing, error) {
			arrive[i]()
			inside.Wait()
			return effects(o)
		})
	})
	s.ok(errors.Join(errs...), "two units at once")
	same(s, "total", s.total("m-1"), 1)
}

func switchWaits(s *stage) {
	for i, generation := range []int{1, 2, 3} {
		other := s.in(generation)
		finish := other.inside(other.of("m-1"), effects)
		var open, early atomic.Bool
		open.Store(true)
		wait := begin(func() error {
			return unlessBusy(func() error {
				return s.switches(s.ctx, 2-i%2, provider.GenerationStandby, func(opened) (provider.Closing, error) {
					early.Store(open.Load())
					return provider.Closing{}, nil
				})
			})
		})
		open.Store(false)
		s.ok(finish(), "the open unit")
		s.ok(wait(), "switch")
		s.require(!early.Load(), "run is called only after the unit of generation %d", generation)
		other.outcomes("in the unit's generation", []string{"m-1"}, provider.OutcomeApplied)
	}
}

// unitWaitsForSwitch begins units of three generations while one of them is retired.
func unitWaitsForSwitch(s *stage) {
	s.open(s.of("m-1"), effects)
	var waits []func() error
	fresh := make([][][]bool, 3)
	s.ok(s.switches(s.ctx, 2, provider.GenerationRetired, func(opened) (provider.Closing, error) {
		for i := range fresh {
			other := s.in(1 + i)
			waits = append(waits, begin(func() error {
				return s.do(s.ctx, other.of("m-1", "m-2"), func(o opened) (provider.Closing, error) {
					fresh[i] = o.Fresh
					return effects(o)
				})
			}))
		}
		return provider.Closing{}, nil
	}), "switch")
	s.hasEnded(waits[0](), "a unit of the generation that is retired")
	for i, wait := range waits[1:] {
		s.ok(wait(), "a unit that waits")
		same(s, "fresh", fresh[1+i], [][]bool{{true}, {true}})
	}
	same(s, "totals", []int{s.total("m-1"), s.total("m-2")}, []int{3, 2})
}

// switchesAtOnce delivers each message to both generations, while they are switched.
func switchesAtOnce(s *stage) {
	const workers, messages, switches = 4, 25, 12
	errs := make([]error, workers+1)
	together(len(errs), func(i int) {
		for n := 0; n < switches && i == workers && errs[i] == nil; n++ {
			errs[i] = unlessBusy(func() error { return s.switches(s.ctx, 2-n%2, provider.GenerationStandby, nothing) })
		}
		of := s.in(1 + i%2)
		for n := 0; n < 2*messages && i < workers && errs[i] == nil; n++ {
			errs[i] = of.do(s.ctx, of.of(fmt.Sprint("m-", n%messages)), effects)
		}
	})
	s.ok(errors.Join(errs...), "deliver and switch at once")
	for n := range messages {
		same(s, "effects, one in each generation", s.total(fmt.Sprint("m-", n)), 2)
	}
}

// serialUnits has units write the same totals in opposite orders, so that they deadlock if they
// can.
func serialUnits(s *stage) {
	const units = 8
	for _, serial := range []bool{false, true} {
		errs := make([]error, units)
		together(units, func(i int) {
			for first := true; first || provider.CodeOf(errs[i]) == provider.CodeDeadlock && !serial; first = false {
				u := s.of(fmt.Sprint("m-", i, serial))
				u.Serial = serial
				errs[i] = s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
					one, other := "a", "b"
					if i%2 == 0 {
						one, other = other, one
					}
					return provider.Closing{}, errors.Join(o.add(one, 1), o.add(other, 1))
				})
				if errs[i] != nil && provider.ClassOf(errs[i]) != provider.ClassTransient {
					return
				}
			}
		})
		s.ok(errors.Join(errs...), "units that write in opposite orders")
	}
	same(s, "totals", []int{s.total("a"), s.total("b")}, []int{2 * units, 2 * units})
}
