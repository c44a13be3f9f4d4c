package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var switchCases = []testCase{
	{
		name: "the generations that are set", play: switchSets,
		rule: "Switch.Set are generations to store, as SetGeneration does. They are stored together: a generation may become live that takes the place of another one",
	},
	{
		// Promise: R4.1
		name: "generations that have changed", play: switchCompares,
		rule: "The unit compares Set with the stored generations: ErrFenced. Then neither Last nor run is called, and nothing is stored",
	},
	{
		// Promise: R1.1
		name: "a busy projector", unless: Deferred, play: switchBusy,
		rule: "A unit with Switch waits for open units for at most a second: then the error is ClassTransient with CodeBusy",
	},
	{
		// Promise: R1.1
		name: "the last messages", play: switchLast,
		rule: "Switch.Last gets the live checkpoint and Unapplied of the live generation, and returns the messages of the unit. They are applied with markers",
	},
	{
		// Promise: R1.1
		name: "Last after open units", unless: Deferred, play: switchLastAfterOpen,
		rule: "Last is called when no other unit of the projector is open: it sees what these have applied",
	},
	{
		// Promise: R1.1
		name: "Last once", play: switchLastOnce,
		rule: "Last is called before run, and each of them once. The live generation does not change until the unit ends",
	},
	{
		// Promise: R1.1
		name: "an error of Last or run", play: switchFails,
		rule: "If Last or run fails, the unit is rolled back: its writes, its markers, and the generations",
	},
	{
		// Promise: R7.1
		name: "a snapshot leaves nothing", play: snapshotLeavesNothing,
		rule: "With Snapshot the unit is rolled back",
	},
	{
		// Promise: R3.1
		name: "a switch and a rollback", play: switchesBack,
		rule: "A switch retires or keeps the generation that was live: its checkpoint changes as with SetGeneration. A standby can become live again",
	},
	{
		name: "a switch that parks", play: switchParks,
		rule: "run must not park messages: then the unit fails, and nothing is committed",
	},
	{
		name: "units that are no switch", play: badSwitches,
		rule: "A unit with Switch must have Once, and neither Messages, Advance nor DryRun; Set is of the unit's projector: else ErrInput",
	},
}

// becomes returns a generation of all, or a new one, with another state.
func (s *stage) becomes(all []provider.Generation, number int, state provider.GenerationState) provider.Generation {
	g := provider.Generation{Build: provider.Build{Projector: s.name, Generation: number}}
	for _, is := range all {
		if is.Generation == number {
			g = is
		}
	}
	g.State = state
	return g
}

// switching returns a unit of generation next that makes it live. The generation that was live gets
// the state was.
func (s *stage) switching(all []provider.Generation, next int, was provider.GenerationState) provider.Unit {
	set := []provider.Generation{s.becomes(all, next, provider.GenerationLive)}
	if live := provider.LiveGeneration(all); live != next {
		set = append(set, s.becomes(all, live, was))
	}
	return provider.Unit{Projector: s.name, Generation: next, Once: true, Switch: &provider.Switch{Set: set}}
}

// switches makes a generation live, in one transaction with run. The generation that was live gets
// the state was.
func (s *stage) switches(
	ctx context.Context, next int, was provider.GenerationState, run func(o opened) (provider.Closing, error),
) error {
	all, err := s.db.Generations(s.ctx, s.name)
	if err != nil {
		return err
	}
	return s.do(ctx, s.switching(all, next, was), run)
}

// switchTo makes another generation live, and fails the case unless this one was. Later units of the
// case are of the new generation.
func (s *stage) switchTo(next, was int) {
	s.Helper()
	s.isLive(was)
	s.ok(s.switches(s.ctx, next, provider.GenerationStandby, func(o opened) (provider.Closing, error) {
		return provider.Closing{}, o.add("switched", 1)
	}), "switch generations")
	s.isLive(next)
	s.generation = next
}

// isLive fails the case unless this generation is live.
func (s *stage) isLive(want int) {
	s.Helper()
	all, err := s.db.Generations(s.ctx, s.name)
	s.ok(err, "list the generations")
	same(s, "live generation", provider.LiveGeneration(all), want)
}

func switchSets(s *stage) {
	for i, set := range [][]provider.Generation{
		{s.becomes(nil, 2, live), s.becomes(nil, 1, standby)},
		{{Build: s.in(2).build(), Revision: 1, State: standby}, {Build: s.build(), Revision: 1, State: live}, s.becomes(nil, 3, building)},
	} {
		for n := range set {
			set[n].Data = fmt.Appendf(nil, `{"n": %d}`, n)
		}
		s.isLive(1 + i)
		s.ok(s.do(s.ctx, provider.Unit{Projector: s.name, Generation: 2 - i, Once: true, Switch: &provider.Switch{Set: set}}, nothing), "switch")
		all := s.all()
		same(s, "generations", len(all), 2+i)
		for n, want := range set {
			is := s.becomes(all, want.Generation, "")
			same(s, "revision", is.Revision, want.Revision+1)
			s.require(sameJSON(is.Data, set[n].Data), "the data %s are %s", is.Data, set[n].Data)
		}
	}
	s.statesAre("after both", live, standby, building)
	none := provider.Unit{Projector: s.name, Generation: 1, Once: true, Switch: &provider.Switch{}}
	all := s.all()
	s.open(none, func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) })
	same(s, "generations after a switch of none", s.all(), all)
	same(s, "total", s.total("k"), 1)
}

func switchCompares(s *stage) {
	s.becomesNow(1, live, true)
	s.becomesNow(2, building, true)
	s.begins(5, provider.ModeLive)
	all, c := s.all(), s.checkpoint()
	older := func(g provider.Generation) provider.Generation { g.Revision--; return g }
	newer := func(g provider.Generation) provider.Generation { g.Revision++; return g }
	one, two := s.becomes(all, 1, standby), s.becomes(all, 2, live)
	for what, set := range map[string][]provider.Generation{
		"an older revision": {older(one), two}, "a newer revision": {one, newer(two)}, "a generation that does not exist": {one, two, {Build: s.in(3).build(), Revision: 1, State: retired}},
		"two that are live": {two}, "two that are built": {s.becomes(all, 3, requested)}, "a generation twice": {one, two, one},
	} {
		u := provider.Unit{Projector: s.name, Generation: 2, Once: true, Switch: &provider.Switch{Set: set}}
		u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) {
			return nil, errors.New("there is a call of Last")
		}
		s.fenced(s.do(s.ctx, u, func(opened) (provider.Closing, error) { return provider.Closing{}, errors.New("run is called") }), "a switch with "+what)
		same(s, "generations", s.all(), all)
		same(s, "checkpoint", s.checkpoint(), c)
	}
	s.ok(s.do(s.ctx, provider.Unit{Projector: s.name, Generation: 2, Once: true, Switch: &provider.Switch{Set: []provider.Generation{two, one}}}, nothing), "switch")
	s.statesAre("after a switch", standby, live)
}

func switchBusy(s *stage) {
	third := s.in(3)
	finish := third.inside(third.of("m-1"), effects)
	began := time.Now()
	err := s.switches(s.ctx, 2, standby, nothing) // while the unit is open
	waited := time.Since(began)
	s.ok(finish(), "the open unit")
	same(s, "code of "+fmt.Sprint(err), s.classed(err, "a switch while a unit is open", provider.ClassTransient).Code, provider.CodeBusy)
	s.require(waited > 700*time.Millisecond, "it waited for a second, not %v", waited)
	same(s, "generations", len(s.all()), 0)
	s.switchTo(2, 1)
}

// effectsOfLast is effects for the messages that Last has returned.
func effectsOfLast(messages *[]provider.Message, more ...func(o opened) error) func(o opened) (provider.Closing, error) {
	return func(o opened) (c provider.Closing, err error) {
		o.unit.Messages = *messages
		if c, err = effects(o); err != nil {
			return c, err
		}
		for _, fn := range more {
			err = errors.Join(err, fn(o))
		}
		return c, err
	}
}

// catchesUp returns a unit of generation 2 with a switch. Its messages are the events at positions
// that the live generation has applied.
func (s *stage) catchesUp(positions ...int64) (u provider.Unit, messages *[]provider.Message) {
	s.Helper()
	all, err := s.db.Generations(s.ctx, s.name)
	s.ok(err, "list the generations")
	next := s.in(2)
	u, messages = next.reading(s.switching(all, 2, standby)), new([]provider.Message)
	u.Switch.Last = func(ctx context.Context, live provider.Live) ([]provider.Message, error) {
		events := next.events(positions...).Messages
		unapplied, err := live.Unapplied(ctx, events)
		if err != nil {
			return nil, err
		}
		for i, m := range events {
			if !unapplied[i] {
				*messages = append(*messages, m)
			}
		}
		return *messages, nil
	}
	return u, messages
}

func switchLast(s *stage) {
	next := s.in(2)
	c := s.begins(6, provider.ModeLive)
	s.open(s.events(8), effects)
	next.begins(3, provider.ModeCatchUp)
	next.open(next.reading(next.events(5)), effects)
	u, messages := s.catchesUp(2, 4, 5, 6, 7, 8)
	last := u.Switch.Last
	u.Switch.Last = func(ctx context.Context, live provider.Live) ([]provider.Message, error) {
		same(s, "generation of the live checkpoint", live.Checkpoint.Generation, 1)
		same(s, "place of the live checkpoint", live.Checkpoint.Place.Position, c.Place.Position)
		same(s, "mode and token of the live checkpoint", provider.Reader{Mode: live.Checkpoint.Mode, Token: live.Checkpoint.Token}, provider.Reader{Mode: c.Mode, Token: c.Token})
		unapplied, err := live.Unapplied(ctx, slices.Concat(s.events(6, 7, 8).Messages, s.of("m-1").Messages))
		same(s, "unapplied in the live generation", unapplied, []bool{false, true, false, true})
		if err != nil {
			return nil, err
		}
		return last(ctx, live)
	}
	run := effectsOfLast(messages)
	found := next.open(u, func(o opened) (provider.Closing, error) {
		c, err := run(o)
		c.Output = []outbox.Message{{ID: s.name, Topic: s.name}}
		return c, err
	})
	same(s, "fresh", found.Fresh, [][]bool{{false}, {true}, {false}, {true}, {true}})
	s.isLive(2)
	s.effectsOf("of each event", 1+1+1+2, 2, 4, 5, 6, 8) // 8 in both generations, 4, 5 and 6 in the second one
	same(s, "output", len(s.entries(outbox.Filter{Topic: s.name})), 1)
	next.applied("in the second generation", []int64{2, 4, 5, 6, 7, 8}, true, true, true, true, false, true)
	next.outcomes("in the second generation", []string{"e-2", "e-4", "e-5", "e-6", "e-7", "e-8"},
		provider.OutcomeUnseen, provider.OutcomeApplied, provider.OutcomeApplied, provider.OutcomeApplied, provider.OutcomeUnseen, provider.OutcomeApplied)
	same(s, "fresh again", next.open(next.reading(next.events(4, 6, 7, 8)), effects).Fresh, [][]bool{{false}, {false}, {true}, {false}})
	same(s, "position of the second generation", next.checkpoint().Place.Position, int64(3))
}

func switchLastAfterOpen(s *stage) {
	s.begins(6, provider.ModeLive)
	next := s.in(2)
	next.begins(6, provider.ModeCatchUp)
	u, messages := s.catchesUp(7, 8)
	finish := s.inside(s.events(7), effects)
	wait := begin(func() error { return s.do(s.ctx, u, effectsOfLast(messages)) })
	s.ok(finish(), "the open unit")
	s.ok(wait(), "switch")
	next.applied("in the second generation", []int64{7, 8}, true, false)
	s.effectsOf("of the event of the open unit", 2, 7)
}

func switchLastOnce(s *stage) {
	var calls []string
	all, err := s.db.Generations(s.ctx, s.name)
	s.ok(err, "list the generations")
	u := s.switching(all, 2, standby)
	isLive := func(when string) {
		all, err := s.db.Generations(s.ctx, s.name)
		s.ok(err, "list the generations")
		same(s, "live generation "+when, provider.LiveGeneration(all), 1)
		calls = append(calls, when)
	}
	u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) {
		isLive("in Last")
		return s.of("m-1", "m-2").Messages, nil
	}
	s.open(u, func(o opened) (provider.Closing, error) {
		same(s, "fresh", o.Fresh, [][]bool{{true}, {true}})
		isLive("in run")
		return provider.Closing{}, o.add("k", 1)
	})
	same(s, "calls", calls, []string{"in Last", "in run"})
	same(s, "total", s.total("k"), 1)
	s.isLive(2)
	s.in(2).outcomes("in the second generation", []string{"m-1", "m-2"}, provider.OutcomeApplied, provider.OutcomeApplied)
}

func switchFails(s *stage) {
	next := s.in(2)
	s.begins(6, provider.ModeLive)
	next.begins(3, provider.ModeCatchUp)
	was, is := s.checkpoint(), next.checkpoint()
	before := s.dump()
	fails := func(what string, u provider.Unit, run func(o opened) (provider.Closing, error)) error {
		err := s.do(s.ctx, u, run)
		s.require(err != nil, "a switch fails with %s", what)
		s.classed(err, what, provider.ClassUnknown, provider.ClassPermanent, provider.ClassTransient)
		s.isLive(1)
		same(s, "generations", len(s.all()), 0)
		same(s, "checkpoints", []provider.Checkpoint{s.checkpoint(), next.checkpoint()}, []provider.Checkpoint{was, is})
		next.applied("after "+what, []int64{3, 4, 5}, true, false, false)
		s.effectsOf("after "+what, 0, 4, 5)
		s.unchanged(before, what)
		return err
	}
	u, messages := s.catchesUp(4, 5)
	err := fails("an error of run", u, effectsOfLast(messages, func(opened) error { return errRefused }))
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	u, messages = s.catchesUp(4, 5)
	fails("a failed statement", u, effectsOfLast(messages, func(o opened) error { return o.fail() }))
	u, messages = s.catchesUp(4, 5)
	fails("output that is invalid", u, func(o opened) (provider.Closing, error) {
		c, err := effectsOfLast(messages)(o)
		c.Output = []outbox.Message{{ID: s.name, Topic: s.name}, {}}
		return c, err
	})
	u, _ = s.catchesUp(4, 5)
	u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return nil, errRefused }
	run := func(opened) (provider.Closing, error) { return provider.Closing{}, errors.New("run is called") }
	err = fails("an error of Last", u, run)
	s.require(errors.Is(err, errRefused), "the error %v is Last's", err)
	u, _ = s.catchesUp(4, 5)
	u.Reader.Token = claim.NewToken()
	s.fenced(fails("another reader", u, run), "a switch by another reader")
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	u, messages = s.catchesUp(4, 5)
	err = s.do(ctx, u, effectsOfLast(messages, func(opened) error { cancel(); return ctx.Err() }))
	s.require(err != nil, "a switch whose context ends fails")
	s.isLive(1)
	u, messages = s.catchesUp(4, 5)
	s.ok(s.do(s.ctx, u, effectsOfLast(messages)), "switch")
	s.isLive(2)
	s.effectsOf("after a switch", 2, 4, 5)
}

func snapshotLeavesNothing(s *stage) {
	next := s.in(2)
	s.begins(6, provider.ModeLive)
	next.begins(3, provider.ModeCatchUp)
	was, before := next.checkpoint(), s.dump()
	for _, set := range []bool{false, true} {
		u, messages := s.catchesUp(4, 5, 6, 7)
		if u.Switch.Snapshot = true; !set {
			u.Switch.Set = nil
		}
		run := effectsOfLast(messages)
		found := s.open(u, func(o opened) (provider.Closing, error) {
			c, err := run(o)
			c.Output = []outbox.Message{{ID: s.name, Topic: s.name}}
			return c, err
		})
		same(s, "fresh", found.Fresh, [][]bool{{true}, {true}, {true}})
		same(s, "generations", len(s.all()), 0)
		next.applied("after a snapshot", []int64{4, 5, 6}, false, false, false)
		same(s, "checkpoint", next.checkpoint(), was)
		s.effectsOf("of a snapshot", 0, 4, 5, 6, 7)
		s.unchanged(before, "a snapshot")
	}
	u, _ := s.catchesUp(4)
	u.Switch.Snapshot = true
	err := s.do(s.ctx, u, func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
}

func switchesBack(s *stage) {
	next := s.in(2)
	c := s.begins(6, provider.ModeLive)
	reader := s.reading(s.events(7))
	next.begins(6, provider.ModeCatchUp)
	s.in(1).switchTo(2, 1)
	reset := c
	reset.Mode, reset.Token = provider.ModeCatchUp, claim.Token{}
	same(s, "checkpoint of the standby", s.checkpoint(), reset)
	s.fenced(s.do(s.ctx, reader, effects), "the reader of the generation that was live")
	same(s, "left by a delivery to the standby", s.open(s.events(7), effects).Left, []bool{true})
	s.statesAre("after a switch", standby, live)
	s.in(2).switchTo(1, 2)
	same(s, "checkpoint of the first generation", s.checkpoint(), reset)
	s.statesAre("after a rollback", live, standby)
	s.ok(s.switches(s.ctx, 2, retired, nothing), "switch again")
	s.statesAre("after the second switch", retired, live)
	same(s, "mode of the retired generation", s.checkpoint().Mode, provider.ModeEnded)
	s.hasEnded(s.do(s.ctx, s.events(7), effects), "a unit of the retired generation")
	s.effectsOf("of the first generation", 0, 7)
	next.open(next.reading(next.events(7)), effects)
	s.effectsOf("of the second generation", 1, 7)
}

func switchParks(s *stage) {
	all, before := s.all(), s.dump()
	u := s.switching(all, 2, standby)
	u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return s.of("m-1").Messages, nil }
	err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Parked: s.in(2).failed("m-1", "")}}}, o.add("k", 1)
	})
	s.classed(err, "a switch that parks", provider.ClassPermanent)
	s.unchanged(before, "a switch that parks")
	same(s, "generations", s.all(), all)
	same(s, "total", s.total("k"), 0)
	s.in(2).outcomes("in the second generation", []string{"m-1"}, provider.OutcomeUnseen)
}

func badSwitches(s *stage) {
	all, err := s.db.Generations(s.ctx, s.name)
	s.ok(err, "list the generations")
	for what, change := range map[string]func(u *provider.Unit){
		"no Once":                      func(u *provider.Unit) { u.Once = false },
		"messages":                     func(u *provider.Unit) { u.Messages = s.of("m-1").Messages },
		"a move":                       func(u *provider.Unit) { u.Advance = &provider.Advance{To: place(1), Mode: provider.ModeLive} },
		"a dry run":                    func(u *provider.Unit) { u.DryRun = func([]provider.Change) {} },
		"a generation of another":      func(u *provider.Unit) { u.Switch.Set[0].Projector += "x" },
		"a generation without a state": func(u *provider.Unit) { u.Switch.Set[0].State = "" },
		"a comparison without a limit": func(u *provider.Unit) { u.Switch.Compare = &provider.Comparison{Found: func([]provider.Difference) {}} },
		"a comparison without Found":   func(u *provider.Unit) { u.Switch.Compare = &provider.Comparison{Limit: 1} },
		"a repair of nothing in particular": func(u *provider.Unit) {
			u.Switch.Compare = &provider.Comparison{Limit: 1, Repair: true, Found: func([]provider.Difference) {}}
		},
	} {
		u := s.switching(all, 2, standby)
		change(&u)
		err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) })
		s.require(errors.Is(err, provider.ErrInput), "the error %v of a unit with %s is ErrInput", err, what)
	}
	u := s.switching(all, 2, standby)
	u.Switch.Set[0].Data = json.RawMessage(`{"a"`)
	s.invalid(s.do(s.ctx, u, nothing), "a generation with data that are no JSON")
	same(s, "generations", len(s.all()), 0)
	same(s, "total", s.total("k"), 0)
}
