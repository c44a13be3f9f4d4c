package providertest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var advanceCases = []testCase{
	{
		// Promise: G7.4
		name: "a move with its effects", play: advances,
		rule: "Advance moves the checkpoint in the transaction of the unit, and changes nothing else of it",
	},
	{
		// Promise: G7.4
		name: "a move that fails", play: advanceFails,
		rule: "If Do fails, nothing is committed: neither the effects nor the move",
	},
	{
		// Promise: G7.7
		name: "a fenced move", play: advanceFenced,
		rule: "ErrFenced: the checkpoint is not as Unit.Advance says. Nothing was committed",
	},
	{
		// Promise: G7.4
		name: "a move inserts no markers", play: advanceMarksNothing,
		rule: "With Advance no markers are inserted",
	},
	{
		// Promise: G7b.1
		name: "a move skips what has markers", play: advanceSkipsMarked,
		rule: "With Advance a message is fresh for a handler that has no marker of it, under any of its names, and is behind the checkpoint",
	},
	{
		name: "a move past a poison event", play: advanceParks,
		rule: "A unit with Advance parks and holds like any other: the checkpoint passes a parked event, and later events of its lane are parked behind it",
	},
	{
		name: "a move without messages", play: advanceAlone,
		rule: "A unit with Advance may have no messages",
	},
	{
		name: "a move of messages without Mark", play: advanceUnmarked,
		rule: "With Advance a message without Mark is fresh like in any other unit",
	},
	{
		name: "a careful move", play: advanceCarefully,
		rule: "With Advance, Unit.Careful reports suspects, and the commit deletes the messages in flight of the worker",
	},
	{
		name: "a move in each mode", play: advanceInModes,
		rule: "Advance moves the checkpoint in every mode",
	},
	{
		// Promise: G7.4
		name: "a move of many events", play: advanceMany,
		rule: "A unit with Advance may have many messages, some of them with markers",
	},
}

var dryAdvanceCases = []testCase{{
	name: "a dry run of a move", play: dryAdvance,
	rule: "A dry run does not move the checkpoint, and runs the same handlers as the unit",
}}

func advances(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	s.open(s.upTo(c, 2, 1, 2), func(o opened) (provider.Closing, error) {
		same(s, "checkpoint before the commit", s.checkpoint(), c)
		closing, err := effects(o)
		closing.Output = []outbox.Message{{ID: s.name + " from e-1", Topic: s.name}}
		return closing, err
	})
	c = moved(c, 2)
	same(s, "checkpoint", s.checkpoint(), c)
	found := s.open(s.upTo(c, 30, 3, 10), effects)
	same(s, "fresh", found.Fresh, [][]bool{{true}, {true}})
	same(s, "left", found.Left, nil)
	same(s, "held", found.Held, []bool{false, false})
	same(s, "checkpoint", s.checkpoint(), moved(c, 30))
	s.effectsOf("of each event", 4, 1, 2, 3, 10)
	same(s, "entries", len(s.entries(outbox.Filter{Topic: s.name})), 1)
	s.applied("by moves", []int64{1, 3, 20, 30, 31}, true, true, true, true, false)
}

func advanceFails(s *stage) {
	c := s.begins(5, provider.ModeCatchUp)
	park := provider.Aside{Message: 1, Parked: s.failed("e-7", "")}
	for what, fail := range map[string]func(o opened) error{
		"a handler's error": func(opened) error { return errRefused },
		"a bad statement":   func(o opened) error { return o.fail() },
	} {
		err := s.do(s.ctx, s.upTo(c, 7, 6, 7), func(o opened) (provider.Closing, error) {
			closing, err := effects(o)
			closing.Park, closing.Output = []provider.Aside{park}, []outbox.Message{{ID: s.name, Topic: s.name}}
			return closing, errors.Join(err, fail(o))
		})
		s.classed(err, what, provider.ClassUnknown, provider.ClassPermanent)
		same(s, "checkpoint after "+what, s.checkpoint(), c)
		s.effectsOf("after "+what, 0, 6, 7)
		same(s, "parked after "+what, len(s.rows()), 0)
		same(s, "entries after "+what, len(s.entries(outbox.Filter{Topic: s.name})), 0)
	}
	err := s.do(s.ctx, s.upTo(c, 7, 6, 7), func(o opened) (provider.Closing, error) {
		closing, err := effects(o)
		closing.Output = []outbox.Message{{}}
		return closing, err
	})
	s.invalid(err, "bad output")
	same(s, "checkpoint after bad output", s.checkpoint(), c)
	same(s, "fresh at last", s.open(s.upTo(c, 7, 6, 7), effects).Fresh, [][]bool{{true}, {true}})
	s.effectsOf("at last", 2, 6, 7)
}

func advanceFenced(s *stage) {
	c := s.begins(5, provider.ModeCatchUp)
	s.open(s.upTo(c, 7, 6, 7), effects)
	is := moved(c, 7)
	for what, a := range map[string]provider.Advance{
		"an earlier position": {From: 5, To: place(9), Mode: is.Mode, Token: is.Token},
		"a later position":    {From: 8, To: place(9), Mode: is.Mode, Token: is.Token},
		"another mode":        {From: 7, To: place(9), Mode: provider.ModeLive, Token: is.Token},
		"no mode":             {From: 7, To: place(9), Token: is.Token},
		"another token":       {From: 7, To: place(9), Mode: is.Mode, Token: claim.NewToken()},
		"no token":            {From: 7, To: place(9), Mode: is.Mode},
	} {
		for _, positions := range [][]int64{nil, {8, 9}} {
			u := s.events(positions...)
			u.Advance = &a
			s.fenced(s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
				closing, err := effects(o)
				if len(positions) > 0 {
					closing.Park = []provider.Aside{{Message: 1, Parked: s.failed("e-9", "")}}
				}
				return closing, err
			}), "a move from "+what)
			same(s, "checkpoint after a move from "+what, s.checkpoint(), is)
		}
	}
	s.effectsOf("of fenced moves", 0, 8, 9)
	same(s, "parked by fenced moves", len(s.rows()), 0)
	is = s.mode(is, provider.ModeLive)
	s.move(is, 9)
}

func advanceMarksNothing(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	s.open(s.upTo(c, 2, 1, 2), effects)
	s.outcomes("without a position", []string{"e-1", "e-2"}, provider.OutcomeUnseen, provider.OutcomeUnseen)
	s.prunedApplied("after a move", []string{"posted"}, 10, 0)
	c = s.mode(moved(c, 2), provider.ModeLive)
	same(s, "fresh in a delivery", s.open(s.events(1, 2, 3), effects).Fresh, [][]bool{{false}, {false}, {true}})
	// a person moves the checkpoint back
	s.set(c, moved(c, 1))
	same(s, "fresh in a delivery", s.open(s.events(1, 2, 3), effects).Fresh, [][]bool{{false}, {true}, {false}})
}

func advanceSkipsMarked(s *stage) {
	c := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	older := s.events(7)
	older.Messages[0].Handlers = []provider.Handler{s.handler("rated")}
	older.Messages[0].Position = 0 // delivered without its position
	s.open(older, effects)
	c = s.mode(c, provider.ModeCatchUp)
	u := s.upTo(c, 9, 5, 6, 7, 8)
	for i := range u.Messages {
		u.Messages[i].Handlers = []provider.Handler{s.handler("given", s.name+"/graded", s.name+"/rated"), s.handler("posted")}
	}
	s.open(u, func(o opened) (provider.Closing, error) {
		return effects(o)
	})
	c = moved(c, 9)
	s.effectsOf("before the checkpoint", 0, 5)
	s.effectsOf("with a marker of one handler", 1+1, 6)
	s.effectsOf("with a marker under an earlier name", 1+1, 7)
	s.effectsOf("without markers", 2, 8)
	u = s.upTo(c, 10, 4, 9, 10)
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{false}, {false}, {true}})
}

func advanceParks(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	u := s.upTo(c, 3)
	poison, next := s.failed("e-1", "ann"), s.behind("e-2", "ann")
	for i, p := range []provider.Parked{poison, next, s.failed("e-3", "ben")} {
		m := delivery(p)
		m.Position = int64(i + 1)
		u.Messages = append(u.Messages, m)
	}
	s.open(u, func(o opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Message: 0, Parked: poison}, {Message: 1, Parked: next}}}, o.add("e-3", 1)
	})
	c = moved(c, 3)
	same(s, "checkpoint", s.checkpoint(), c)
	rows := s.rows()
	same(s, "parked", idsOfParked(rows), []string{"e-1", "e-2"})
	s.isHeld("after the move", "ann", true)
	s.isHeld("after the move", "ben", false)
	later := s.behind("e-4", "ann")
	u = s.upTo(c, 4)
	u.Messages = []provider.Message{delivery(later)}
	u.Messages[0].Position = 4
	found := s.open(u, func(o opened) (provider.Closing, error) {
		if !o.Held[0] {
			return effects(o)
		}
		return provider.Closing{Park: []provider.Aside{{Parked: later}}}, nil
	})
	same(s, "held", found.Held, []bool{true})
	same(s, "checkpoint", s.checkpoint(), moved(c, 4))
	same(s, "parked", idsOfParked(s.rows()), []string{"e-1", "e-2", "e-4"})
	question := s.question("e-1")
	question.Position = 1
	same(s, "outcome of a parked event", s.answers(question), []provider.Outcome{provider.OutcomeWaiting})
	s.runs("all of the lane", s.rows(), true, true, true)
	s.effectsOf("of each event", 4, 1, 2, 3, 4)
	same(s, "outcome of an event that was parked", s.answers(question), []provider.Outcome{provider.OutcomeApplied})
}

func advanceAlone(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	found := s.open(s.upTo(c, 2), func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) })
	same(s, "messages found", []int{len(found.Fresh), len(found.Held), len(found.Left)}, []int{0, 0, 0})
	same(s, "checkpoint", s.checkpoint(), moved(c, 2))
	same(s, "total", s.total("k"), 1)
	u := s.upTo(moved(c, 2), 3)
	u.Once = true
	s.open(u, nothing)
	same(s, "checkpoint", s.checkpoint(), moved(c, 3))
}

func advanceUnmarked(s *stage) {
	c := s.begins(3, provider.ModeCatchUp)
	for i := range 2 {
		u := s.upTo(c, 5, 3, 4)
		for n := range u.Messages {
			u.Messages[n].Mark = false
		}
		same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{true}, {true}})
		s.effectsOf("of events without Mark", 2*(i+1), 3, 4)
		c = s.set(moved(c, 5), c)
	}
}

func advanceCarefully(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	w, other := provider.Worker{Runner: "one " + s.name}, provider.Worker{Runner: "two " + s.name}
	s.inFlight(other, "e-2")
	s.inFlight(w, "e-1", "e-2")
	u := s.upTo(c, 2, 1, 2)
	u.Careful = &w
	err := s.do(s.ctx, u, func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	s.isSuspect("after a unit that failed", []string{"e-1", "e-2"}, true, true)
	found := s.open(u, effects)
	same(s, "suspects", found.Suspect, []bool{false, true})
	same(s, "fresh", found.Fresh, [][]bool{{true}, {true}})
	same(s, "checkpoint", s.checkpoint(), moved(c, 2))
	s.isSuspect("after the move", []string{"e-1", "e-2"}, false, true)
}

func advanceInModes(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	for i, mode := range []provider.Mode{provider.ModeCatchUp, provider.ModeClosing, provider.ModeLive} {
		if mode != c.Mode {
			c = s.mode(c, mode)
		}
		at := int64(i + 1)
		found := s.open(s.upTo(c, at, at), effects)
		same(s, "fresh", found.Fresh, [][]bool{{true}})
		same(s, "left", found.Left, nil)
		c = moved(c, at)
		same(s, "checkpoint", s.checkpoint(), c)
	}
	s.effectsOf("of each event", 3, 1, 2, 3)
}

func advanceMany(s *stage) {
	const n = 500
	c := s.begins(0, provider.ModeLive)
	var all, some []int64
	for i := range int64(n) {
		if all = append(all, i+1); i%7 == 0 {
			some = append(some, i+1)
		}
	}
	s.open(s.events(some...), nothing)
	c = s.mode(c, provider.ModeCatchUp)
	fresh := s.open(s.upTo(c, n, all...), func(o opened) (provider.Closing, error) {
		return provider.Closing{}, o.add("k", len(o.Fresh))
	}).Fresh
	for i := range fresh {
		same(s, fmt.Sprint("fresh, event ", i+1), fresh[i], []bool{i%7 != 0})
	}
	same(s, "total", s.total("k"), n)
	c = moved(c, n)
	same(s, "checkpoint", s.checkpoint(), c)
	s.applied("by a move of many", all, slices.Repeat([]bool{true}, n)...)
	s.prunedApplied("by a move of many", []string{"posted"}, n, len(some))
	s.mode(c, provider.ModeLive)
	s.advance(time.Hour)
	same(s, "fresh later", slices.Contains(slices.Concat(s.open(s.events(all...), nothing).Fresh...), true), false)
}

func dryAdvance(s *stage) {
	c := s.begins(0, provider.ModeLive)
	s.open(s.events(1), effects)
	c = s.mode(c, provider.ModeCatchUp)
	changes := s.dryRun(s.upTo(c, 2, 1, 2), effects)
	same(s, "rows changed", len(changes), 1)
	same(s, "checkpoint after a dry run", s.checkpoint(), c)
	s.effectsOf("of a dry run", 0, 2)
	u := s.upTo(moved(c, 1), 2, 2)
	u.DryRun = func([]provider.Change) { s.Error("DryRun is called for a fenced move") }
	s.fenced(s.do(s.ctx, u, effects), "a dry run of a fenced move")
	s.open(s.upTo(c, 2, 1, 2), effects)
	s.effectsOf("of the unit", 1, 2)
}
