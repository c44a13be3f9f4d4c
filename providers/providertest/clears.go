package providertest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kinora-go/kinora/provider"
)

var clearCases = []testCase{
	{
		// Promise: R6.1
		name: "the rows of a retired generation", play: clearsAll,
		rule: "ClearGeneration deletes at most limit rows of a retired generation: markers of handlers, and parked messages with their lanes. If no row is left it returns zero",
	},
	{
		// Promise: R6.1
		name: "a generation that is not retired", play: clearsRetired,
		rule: "ClearGeneration returns ErrInput if the generation is not retired. Nothing is deleted",
	},
	{
		name: "messages that are no events", play: unlogged,
		rule: "Unlogged returns the ids of messages of which the handler has a marker without a position, page by page",
	},
	{
		name: "several ClearGeneration at once", play: clearsAtOnce,
		rule: "ClearGeneration may run concurrently, while units of other generations run",
	},
}

// rowsOfEach marks ten messages at two handlers, and parks four, in each of these generations.
func (s *stage) rowsOfEach(generations ...int) {
	s.Helper()
	for _, generation := range generations {
		of := s.in(generation)
		u := of.unit()
		for n := range 10 {
			m := of.message(fmt.Sprint("m-", n), "")
			m.Handlers = append(m.Handlers, of.handler("rated"))
			u.Messages = append(u.Messages, m)
		}
		of.open(u, nothing)
		rows := of.park(0, of.untyped("p-1", "ann"), of.untyped("p-2", "ann"), of.untyped("p-3", "ben"), of.untyped("p-4", "cid"))
		of.skip(rows[3])
	}
}

// cleared clears the second generation, and returns the sum of the results.
func (s *stage) cleared(limit int, handlers ...string) (sum int, err error) {
	for i := range handlers {
		handlers[i] = s.name + "/" + handlers[i]
	}
	for n := limit; n > 0; sum += n {
		if n, err = s.db.ClearGeneration(s.ctx, s.in(2).build(), handlers, nil, limit); err != nil || n < 0 || n > limit {
			return sum, cmp.Or(err, fmt.Errorf("%d rows were deleted, of at most %d", n, limit))
		}
	}
	return sum, nil
}

// countOf returns how many messages of rowsOfEach have this outcome.
func (s *stage) countOf(want provider.Outcome) (n int) {
	s.Helper()
	var qs []provider.Question
	for n := range 10 {
		qs = append(qs, s.question(fmt.Sprint("m-", n)))
	}
	for _, is := range s.answers(qs...) {
		if is == want {
			n++
		}
	}
	return n
}

// isWhole fails the case unless a generation has the rows of rowsOfEach.
func (s *stage) isWhole(generation int) {
	s.Helper()
	of := s.in(generation)
	same(s, "messages of another generation with markers", of.countOf(provider.OutcomeApplied), 10)
	rows := s.list(provider.ParkedFilter{Projector: s.name, Generation: generation, States: allStates})
	same(s, "parked messages of another generation", idsOfParked(rows), []string{"p-1", "p-2", "p-3", "p-4"})
	of.isHeld("in another generation", "ann", true)
}

func clearsAll(s *stage) {
	s.rowsOfEach(1, 2, 3)
	other := s.in(2)
	other.name += "x"
	other.rowsOfEach(2)
	next := s.in(2)
	c := next.begins(5, provider.ModeLive)
	next.becomesNow(2, retired, true)
	sum, err := s.cleared(3, "rated")
	s.ok(err, "clear markers of one handler")
	s.require(sum >= 10+4, "ten markers and four messages are deleted, not %d rows", sum)
	next.outcomes("at a handler that was not named", []string{"m-1", "m-9"}, provider.OutcomeApplied, provider.OutcomeApplied)
	sum, err = s.cleared(4, "posted", "rated", "other")
	s.ok(err, "clear all markers")
	same(s, "rows deleted", sum, 10)
	same(s, "messages without markers", next.countOf(provider.OutcomeUnseen), 10)
	same(s, "parked messages", len(s.list(provider.ParkedFilter{Projector: s.name, Generation: 2, States: allStates})), 0)
	next.isDue("after it")
	same(s, "place of the checkpoint", next.checkpoint().Place, c.Place)
	same(s, "mode of the checkpoint", next.checkpoint().Mode, provider.ModeEnded)
	s.statesAre("after it", retired)
	next.hasEnded(s.do(s.ctx, next.of("m-1"), effects), "a unit of the generation")
	s.isWhole(1)
	s.isWhole(3)
	other.isWhole(2)
}

func clearsRetired(s *stage) {
	s.rowsOfEach(1, 2)
	refused := func(what string, generation int) {
		s.Helper()
		n, err := s.db.ClearGeneration(s.ctx, s.in(generation).build(), []string{s.name + "/posted"}, nil, 100)
		s.require(errors.Is(err, provider.ErrInput), "the error %v of ClearGeneration of %s is ErrInput", err, what)
		same(s, "rows deleted", n, 0)
		s.isWhole(1)
		s.isWhole(2)
	}
	refused("a generation without a row", 2)
	refused("no generation", 0)
	for _, state := range []provider.GenerationState{requested, building, live, standby} {
		s.becomesNow(2, state, true)
		refused("a generation that is "+string(state), 2)
	}
	s.becomesNow(3, retired, true)
	refused("another generation than the retired one", 2)
	s.becomesNow(2, retired, true)
	_, err := s.cleared(100, "posted", "rated")
	s.ok(err, "clear")
	s.isWhole(1)
}

func clearsAtOnce(s *stage) {
	const clearers = 4
	s.rowsOfEach(1, 2)
	s.becomesNow(2, retired, true)
	errs := make([]error, 2*clearers)
	var deleted atomic.Int64
	together(len(errs), func(i int) {
		if i >= clearers {
			of := s.in(1 + 2*(i%2))
			for n := 0; n < 20 && errs[i] == nil; n++ {
				errs[i] = s.do(s.ctx, of.of(fmt.Sprint("n-", i, "-", n)), effects)
			}
			return
		}
		n, err := s.cleared(2, "posted", "rated")
		errs[i] = err
		deleted.Add(int64(n))
	})
	s.ok(errors.Join(errs...), "clear and deliver at once")
	rest, err := s.cleared(2, "posted", "rated")
	s.ok(err, "clear the rest")
	s.require(deleted.Load()+int64(rest) >= 20+4, "each row is deleted, not %d and %d", deleted.Load(), rest)
	next := s.in(2)
	next.outcomes("after it", []string{"m-0", "m-9"}, provider.OutcomeUnseen, provider.OutcomeUnseen)
	s.isWhole(1)
	for i := clearers; i < 2*clearers; i++ {
		for n := range 20 {
			same(s, "total", s.total(fmt.Sprint("n-", i, "-", n)), 1)
		}
	}
}

func unlogged(s *stage) {
	has := func(generation int, handler string, want ...string) {
		s.Helper()
		var all []string
		for after := ""; len(all) <= len(want); after = all[len(all)-1] {
			ids, err := s.db.Unlogged(s.ctx, s.in(generation).build(), s.name+"/"+handler, after, 2)
			s.ok(err, "ask for markers without a position")
			s.require(len(ids) <= 2, "at most two ids")
			if all = append(all, ids...); len(ids) == 0 {
				break
			}
		}
		slices.Sort(all)
		same(s, fmt.Sprintf("Unlogged of generation %d, %s", generation, handler), all, want)
	}
	of := s.in(2)
	u := of.unit()
	m := of.message("logged", "")
	m.Position = 3
	u.Messages = append(u.Messages, m)
	of.open(u, nothing)
	has(2, "posted")
	var ids []string
	for n := range 5 {
		one := of.message(fmt.Sprint("other-", n), "")
		u.Messages = []provider.Message{one}
		of.open(u, nothing)
		ids = append(ids, one.ID)
	}
	has(2, "posted", ids...)
	has(2, "rated")
	has(1, "posted")
}
