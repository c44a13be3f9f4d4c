package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

const (
	requested = provider.GenerationRequested
	building  = provider.GenerationBuilding
	live      = provider.GenerationLive
	standby   = provider.GenerationStandby
	retired   = provider.GenerationRetired
)

var generationCases = []testCase{
	{
		// Promise: R4.1
		name: "revisions", play: revisions,
		rule: "SetGeneration stores g, and adds one to its Revision. It returns false, and changes nothing, if g.Revision is not that of the stored row. A row that does not exist has Revision 0",
	},
	{
		name: "times and data", play: generationTimes,
		rule: "CreatedAt and ChangedAt are on the store's clock. ChangedAt is when State changed last",
	},
	{
		name: "generations in order", play: generationsInOrder,
		rule: "Generations returns the generations of a projector, or those of all projectors if its name is empty, in order of projector and number",
	},
	{
		// Promise: R4.1
		name: "one is live, and one is being built", play: oneOfEach,
		rule: "SetGeneration returns false for the second generation of the projector that is live, or the second one that is requested or being built",
	},
	{
		// Promise: R3.1
		name: "a standby", play: standbyResets,
		rule: "With GenerationStandby, if the State is new, the mode of the checkpoint becomes ModeCatchUp and its token zero",
	},
	{
		name: "a retired generation", play: retiredEnds,
		rule: "With GenerationRetired the mode of the checkpoint becomes ModeEnded. A checkpoint is created if there is none",
	},
	{
		// Promise: R4.1
		name: "several SetGeneration at once", play: setGenerationsAtOnce,
		rule: "Of several SetGeneration of one revision, and of several that make a generation live or requested, exactly one returns true",
	},
	{
		// Promise: O5.1
		name: "several generations in one call", play: setsTogether,
		rule: "SetGeneration stores all of its generations or none, after the end of the units that are open",
	},
	{
		name: "a generation that cannot be stored", play: badGenerations,
		rule: "CheckGeneration returns an error for a generation that no store can have. Nothing is stored",
	},
	{name: "text that cannot be stored", rule: filterRule, play: badGenerationText},
	{
		// Promise: R4.1
		name: "a new handle knows the generations", unless: Volatile, play: newHandleKnowsGenerations,
		rule: "Generations outlive the process",
	},
}

// all returns the generations of the case's projector, in a form that reflect.DeepEqual can compare.
func (s *stage) all() []provider.Generation {
	s.Helper()
	all, err := s.db.Generations(s.ctx, s.name)
	s.ok(err, "list the generations")
	for i := range all {
		g := &all[i]
		g.CreatedAt, g.ChangedAt = g.CreatedAt.UTC().Round(0), g.ChangedAt.UTC().Round(0)
		if string(g.Data) == "{}" {
			g.Data = nil
		}
	}
	return all
}

// becomesNow stores a generation of the case's projector with this state, and fails the case unless
// SetGeneration returns want.
func (s *stage) becomesNow(number int, state provider.GenerationState, want bool) {
	s.Helper()
	before := s.all()
	g := s.becomes(before, number, state)
	ok, err := s.db.SetGeneration(s.ctx, g)
	s.ok(err, "set a generation")
	same(s, fmt.Sprintf("generation %d became %s", number, state), ok, want)
	if after := s.all(); ok {
		is := s.becomes(after, number, "")
		same(s, "revision", is.Revision, g.Revision+1)
	} else {
		same(s, "generations", after, before)
	}
}

// statesAre fails the case unless these are the states of generations 1, 2 and so on.
func (s *stage) statesAre(what string, want ...provider.GenerationState) {
	s.Helper()
	got := []provider.GenerationState{}
	for _, g := range s.all() {
		got = append(got, g.State)
	}
	same(s, "states "+what, got, want)
}

func revisions(s *stage) {
	same(s, "generations of a projector without rows", len(s.all()), 0)
	g := provider.Generation{Build: s.in(2).build(), State: requested, Data: json.RawMessage(`{"by": "o'hara \"日本\""}`)}
	set := func(g provider.Generation, want bool) {
		s.Helper()
		before := s.all()
		ok, err := s.db.SetGeneration(s.ctx, g)
		s.ok(err, "set a generation")
		same(s, fmt.Sprintf("%+v was stored", g), ok, want)
		after := s.all()
		if !want {
			same(s, "generations", after, before)
			return
		}
		is := s.becomes(after, g.Generation, g.State)
		s.require(sameJSON(is.Data, g.Data), "the data %s are %s", is.Data, g.Data)
		same(s, "revision", is.Revision, g.Revision+1)
		same(s, "build", is.Build, g.Build)
		s.require(slices.ContainsFunc(after, func(of provider.Generation) bool { return of.State == g.State }), "the state is %s", g.State)
	}
	for _, none := range []int64{1, 7} {
		g.Revision = none
		set(g, false)
	}
	g.Revision = 0
	set(g, true)
	s.isLive(1)
	set(g, false)
	for revision, state := range []provider.GenerationState{"", building, building, retired, retired} {
		g.State, g.Data = state, fmt.Appendf(nil, `{"n": %d}`, revision)
		if revision == 0 {
			continue
		}
		for _, wrong := range []int64{0, int64(revision - 1), int64(revision + 1)} {
			g.Revision = wrong
			set(g, false)
		}
		g.Revision = int64(revision)
		set(g, true)
	}
}

func generationTimes(s *stage) {
	from := s.now()
	s.becomesNow(2, requested, true)
	first := s.all()[0]
	s.require(!first.CreatedAt.Before(from.Add(-time.Second)) && !first.CreatedAt.After(s.now().Add(time.Second)), "%v, when it was created, is now", first.CreatedAt)
	same(s, "when it changed", first.ChangedAt, first.CreatedAt)
	s.advance(time.Hour)
	created := s.all()[0].CreatedAt // older, if the fixture moves times back
	s.becomesNow(2, requested, true)
	same(s, "when it changed, with the same state", s.all()[0].ChangedAt, created)
	s.becomesNow(2, building, true)
	last := s.all()[0]
	same(s, "when it was created", last.CreatedAt, created)
	age := last.ChangedAt.Sub(created)
	s.require(age > 50*time.Minute && age < 70*time.Minute, "it changed an hour after it was created, not %v", age)
	same(s, "data of a generation without data", last.Data, nil)
}

func generationsInOrder(s *stage) {
	for _, name := range []string{s.name + "y", s.name, s.name + "x"} {
		of := s.in(1)
		of.name = name
		for _, number := range []int{10, 2, 9, 1} {
			of.becomesNow(number, standby, true)
		}
	}
	numbers := []int{}
	for _, g := range s.all() {
		numbers = append(numbers, g.Generation)
	}
	same(s, "numbers in order", numbers, []int{1, 2, 9, 10})
	everything, err := s.db.Generations(s.ctx, "")
	s.ok(err, "list all generations")
	var own []provider.Build
	for _, g := range everything {
		if g.Projector == s.name || g.Projector == s.name+"x" || g.Projector == s.name+"y" {
			own = append(own, g.Build)
		}
	}
	var want []provider.Build
	for _, name := range []string{s.name, s.name + "x", s.name + "y"} {
		for _, number := range numbers {
			want = append(want, provider.Build{Projector: name, Generation: number})
		}
	}
	same(s, "generations of all projectors", own, want)
}

func oneOfEach(s *stage) {
	other := s.in(1)
	other.name += "x"
	for _, of := range []*stage{s, other} {
		of.becomesNow(1, live, true)
		of.becomesNow(2, live, false)
		of.becomesNow(2, requested, true)
	}
	s.becomesNow(3, requested, false)
	s.becomesNow(3, building, false)
	s.becomesNow(2, building, true)
	s.becomesNow(3, requested, false)
	s.becomesNow(2, live, false)
	s.becomesNow(3, live, false)
	s.becomesNow(3, standby, true)
	s.becomesNow(4, retired, true)
	s.becomesNow(1, live, true) // it is the live one already
	s.becomesNow(1, standby, true)
	s.isLive(1) // no generation is live: the first one is
	s.becomesNow(2, live, true)
	s.isLive(2)
	s.becomesNow(1, live, false)
	s.becomesNow(5, requested, true)
	s.becomesNow(3, building, false)
	s.becomesNow(5, retired, true)
	s.becomesNow(3, building, true)
	s.statesAre("at the end", standby, live, building, retired, retired)
	other.statesAre("of another projector", live, requested)
}

func standbyResets(s *stage) {
	s.becomesNow(1, live, true)
	c := s.begins(7, provider.ModeLive)
	reader := s.reading(s.events(9))
	s.becomesNow(1, live, true)
	same(s, "checkpoint of the live generation", s.checkpoint(), c)
	s.becomesNow(1, standby, true)
	reset := c
	reset.Mode, reset.Token = provider.ModeCatchUp, claim.Token{}
	same(s, "checkpoint of a standby", s.checkpoint(), reset)
	s.fenced(s.do(s.ctx, reader, effects), "the reader of a standby that was live")
	same(s, "left by a delivery", s.open(s.events(9), effects).Left, []bool{true})
	taken := reset
	taken.Token = claim.NewToken()
	s.set(reset, taken)
	s.becomesNow(1, standby, true)
	same(s, "checkpoint of a standby that was one", s.checkpoint(), taken)
	s.in(2).becomesNow(2, standby, true)
	same(s, "checkpoint of a standby without one", s.in(2).checkpoint(), provider.Checkpoint{})
}

func retiredEnds(s *stage) {
	c, next := s.begins(7, provider.ModeLive), s.in(2)
	for _, of := range []*stage{s, next} {
		number := of.generation
		of.becomesNow(number, building, true)
		g := s.becomes(s.all(), number, retired)
		g.Revision++
		ok, err := s.db.SetGeneration(s.ctx, g)
		s.ok(err, "set a generation")
		same(s, "a generation of another revision was stored", ok, false)
		of.becomesNow(number, retired, true)
		of.becomesNow(number, retired, true)
		of.becomesNow(number, standby, false)
		is := of.checkpoint()
		same(s, "mode of a retired generation", is.Mode, provider.ModeEnded)
		if of == s {
			same(s, "place of a retired generation", is.Place, c.Place)
		}
		of.hasEnded(s.do(s.ctx, of.of("m-1"), effects), "a unit of a retired generation")
	}
	third := s.in(3)
	same(s, "checkpoint of another generation", third.checkpoint(), provider.Checkpoint{})
	third.open(third.of("m-1"), effects)
	same(s, "total", s.total("m-1"), 1)
}

func setGenerationsAtOnce(s *stage) {
	const callers, rounds = 12, 3
	race := func(what string, g func(i int) provider.Generation) (winner int) {
		won, errs := make([]bool, callers), make([]error, callers)
		together(callers, func(i int) { won[i], errs[i] = s.db.SetGeneration(s.ctx, g(i)) })
		s.ok(errors.Join(errs...), "set generations at once")
		n := 0
		for i := range won {
			if won[i] {
				winner, n = i, n+1
			}
		}
		same(s, "calls that returned true, "+what, n, 1)
		return winner
	}
	for revision := range int64(rounds) {
		winner := race("of one revision", func(i int) provider.Generation {
			return provider.Generation{Build: s.build(), Revision: revision, State: standby, Data: fmt.Appendf(nil, `{"n": %d}`, i)}
		})
		is := s.all()[0]
		same(s, "revision", is.Revision, revision+1)
		s.require(sameJSON(is.Data, fmt.Appendf(nil, `{"n": %d}`, winner)), "the data %s are those of caller %d", is.Data, winner)
	}
	number := func(i int) provider.Build { return provider.Build{Projector: s.name, Generation: 2 + i} }
	first := race("to live", func(i int) provider.Generation { return provider.Generation{Build: number(i), State: live} })
	s.isLive(2 + first)
	race("to requested or building", func(i int) provider.Generation {
		return provider.Generation{Build: number(callers + i), State: []provider.GenerationState{requested, building}[i%2]}
	})
	same(s, "generations", len(s.all()), 3)
}

// setsTogether retires two generations while a unit of one of them is open.
func setsTogether(s *stage) {
	s.becomesNow(1, live, true)
	s.becomesNow(2, standby, true)
	all := s.all()
	first, second := s.becomes(all, 1, retired), s.becomes(all, 2, retired)
	set := func(want bool, together ...provider.Generation) {
		s.Helper()
		ok, err := s.db.SetGeneration(s.ctx, together...)
		s.ok(err, "set several generations")
		same(s, "several generations were stored", ok, want)
	}
	stale := second
	stale.Revision--
	set(false, first, stale)
	set(false, s.becomes(all, 1, live), s.becomes(all, 2, live))
	same(s, "generations", s.all(), all)
	s.open(s.of("m-1"), effects)
	s.in(2).open(s.in(2).of("m-1"), effects)

	set(true, s.becomes(all, 1, standby), s.becomes(all, 2, live))
	s.isLive(2)
	all = s.all()
	first, second = s.becomes(all, 1, retired), s.becomes(all, 2, retired)
	var isSet atomic.Bool
	wait, early := func() error { return nil }, false
	u := s.of("m-2")
	u.Once = true // it is open before its handlers are called
	s.open(u, func(o opened) (provider.Closing, error) {
		wait = begin(func() error {
			ok, err := s.db.SetGeneration(s.ctx, first, second)
			isSet.Store(ok)
			return err
		})
		early = isSet.Load()
		return effects(o)
	})
	s.ok(wait(), "retire both generations while a unit is open")
	same(s, "generations were stored while a unit was open, and after it", []bool{early, isSet.Load()}, []bool{false, true})
	s.statesAre("after it", retired, retired)
	for _, of := range []*stage{s, s.in(2)} {
		of.hasEnded(s.do(s.ctx, of.of("m-3"), effects), "a unit of a retired generation")
	}
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-3")}, []int{2, 1, 0})
}

func badGenerations(s *stage) {
	good := provider.Generation{Build: s.in(2).build(), State: requested}
	other := good
	other.Projector += "x"
	for what, all := range map[string][]provider.Generation{"none": nil, "one twice": {good, good}, "two projectors": {good, other}} {
		ok, err := s.db.SetGeneration(s.ctx, all...)
		s.require(errors.Is(err, provider.ErrInput) && !ok, "the error %v of SetGeneration of %s is ErrInput", err, what)
	}
	for what, change := range map[string]func(g *provider.Generation){
		"no number":           func(g *provider.Generation) { g.Generation = 0 },
		"a negative number":   func(g *provider.Generation) { g.Generation = -1 },
		"a negative revision": func(g *provider.Generation) { g.Revision = -1 },
		"no state":            func(g *provider.Generation) { g.State = "" },
		"another state":       func(g *provider.Generation) { g.State = "Live" },
		"data that are bad":   func(g *provider.Generation) { g.Data = json.RawMessage(`{"a": "\u0000"}`) },
	} {
		g := good
		change(&g)
		ok, err := s.db.SetGeneration(s.ctx, g)
		s.require(err != nil && !ok, "a generation with %s is refused", what)
	}
	same(s, "generations", len(s.all()), 0)
}

func badGenerationText(s *stage) {
	s.in(2).becomesNow(2, retired, true)
	b := s.in(2).build()
	s.refusesText([]filterCall{
		{"Generations", func(ctx context.Context, text string) error { return failure(s.db.Generations(ctx, text)) }},
		{"SetGeneration", func(ctx context.Context, text string) error {
			return failure(s.db.SetGeneration(ctx, provider.Generation{Build: provider.Build{Projector: text, Generation: 2}, State: standby}))
		}},
		{"ClearGeneration of a handler", func(ctx context.Context, text string) error {
			return failure(s.db.ClearGeneration(ctx, b, []string{s.name + "/a", text}, nil, 1))
		}},
	})
}

func newHandleKnowsGenerations(s *stage) {
	s.begins(5, provider.ModeLive)
	s.switchTo(2, 1)
	third := s.in(3)
	third.becomesNow(3, retired, true)
	later := s.reopen()
	same(s, "generations through a new handle", later.all(), s.all())
	later.isLive(2)
	later.in(3).hasEnded(later.do(later.ctx, later.in(3).of("m-1"), effects), "a unit of a retired generation through a new handle")
	later.switchTo(1, 2)
	s.isLive(1)
}
