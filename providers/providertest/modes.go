package providertest

import (
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

var modeCases = []testCase{
	{
		// Promise: G7b.2
		name: "catching up", play: catchingUp,
		rule: "Found.Left: in ModeCatchUp a delivery with a Position is left to the reader of the log. Its handlers are not fresh, and it has no marker",
	},
	{
		// Promise: G7b.2
		name: "closing", play: closingMode,
		rule: "In ModeClosing deliveries wait: their units fail with ClassTransient and CodeClosing, and nothing is committed",
	},
	{
		// Promise: G7b.2
		name: "live", play: liveMode,
		rule: "Fresh: the handler had no marker of the message, and its Position is behind the checkpoint. A duplicate leaves no marker",
	},
	{
		// Promise: G7.7
		name: "units of the reader", play: readerUnits,
		rule: "Unit.Reader: the mode of the checkpoint does not matter. At or before the checkpoint an event is a duplicate",
	},
	{
		// Promise: G7.7
		name: "a reader that was replaced", play: replacedReader,
		rule: "Unit.Reader: the checkpoint has its mode and token until the unit ends. If they are others, the error is ErrFenced, and nothing is committed",
	},
	{
		// Promise: G7b.2
		name: "messages that are in no log", play: foreignInModes,
		rule: "The checkpoint does not concern messages without a Position, and messages without Mark",
	},
	{
		name: "parked events", play: parkedInModes,
		rule: "The checkpoint does not decide about parked messages: it has passed most of them",
	},
	{
		name: "the handlers of an event", play: handlersInModes,
		rule: "Found.Fresh says for each handler whether it must run. A new marker is written under each name of the handler",
	},
}

// fenced fails the case unless err is ErrFenced as an *Error.
func (s *stage) fenced(err error, doing string) {
	s.Helper()
	e := s.classed(err, doing, provider.ClassTransient)
	same(s, "code", e.Code, provider.CodeFenced)
	s.require(errors.Is(err, provider.ErrFenced), "the error %v is ErrFenced", err)
}

// hasEnded fails the case unless err is ErrEnded as an *Error.
func (s *stage) hasEnded(err error, doing string) {
	s.Helper()
	e := s.classed(err, doing, provider.ClassTransient)
	same(s, "code", e.Code, provider.CodeEnded)
	s.require(errors.Is(err, provider.ErrEnded), "the error %v is ErrEnded", err)
}

// isClosing fails the case unless err is that of ModeClosing.
func (s *stage) isClosing(err error, doing string) {
	s.Helper()
	same(s, "code of "+fmt.Sprint(err), s.classed(err, doing, provider.ClassTransient).Code, provider.CodeClosing)
}

func catchingUp(s *stage) {
	c := s.begins(5, provider.ModeCatchUp)
	u := s.events(4, 6, 7)
	u.Messages = append(u.Messages, s.message("foreign", ""))
	for i := range 2 {
		found := s.open(u, effects)
		same(s, "left", found.Left, []bool{false, true, true, false})
		same(s, "fresh", found.Fresh, [][]bool{{false}, {false}, {false}, {i == 0}})
	}
	s.effectsOf("of deliveries that are left", 0, 4, 6, 7)
	s.applied("by deliveries that are left", []int64{4, 6, 7}, true, false, false)
	s.mode(c, provider.ModeLive)
	found := s.open(u, effects)
	same(s, "left when it is live", found.Left, nil)
	same(s, "fresh when it is live", found.Fresh, [][]bool{{false}, {true}, {true}, {false}})
	s.effectsOf("once it is live", 2, 4, 6, 7)
}

func closingMode(s *stage) {
	c := s.begins(5, provider.ModeClosing)
	u := s.events(6)
	u.Messages = append(u.Messages, s.message("foreign", ""))
	for range 2 {
		s.isClosing(s.do(s.ctx, u, effects), "a delivery")
	}
	s.isClosing(s.do(s.ctx, s.events(4), effects), "a delivery of an event before the checkpoint")
	s.effectsOf("of deliveries that wait", 0, 4, 6)
	same(s, "total of a message in the same unit", s.total("foreign"), 0)
	s.applied("by deliveries that wait", []int64{6}, false)
	s.mode(c, provider.ModeLive)
	same(s, "fresh when it is live", s.open(u, effects).Fresh, [][]bool{{true}, {true}})
}

func liveMode(s *stage) {
	c := s.begins(5, provider.ModeLive)
	found := s.open(s.events(4, 5, 6, 7), effects)
	same(s, "fresh", found.Fresh, [][]bool{{false}, {false}, {true}, {true}})
	same(s, "left", found.Left, nil)
	same(s, "fresh again", s.open(s.events(7, 6, 5, 8), effects).Fresh, [][]bool{{false}, {false}, {false}, {true}})
	s.prunedApplied("of duplicates", []string{"posted"}, 10, 0)
	c = s.move(c, 7)
	s.prunedApplied("at or before the checkpoint", []string{"posted"}, 10, 2)
	same(s, "fresh without a marker", s.open(s.events(5, 6, 7, 8, 9), effects).Fresh, [][]bool{{false}, {false}, {false}, {false}, {true}})
	s.move(c, 9)
	s.prunedApplied("after redeliveries", []string{"posted"}, 10, 2)
	s.effectsOf("of each event", 4, 4, 5, 6, 7, 8, 9)
	same(s, "total", s.total("e-6"), 1)
}

func readerUnits(s *stage) {
	c := s.begins(5, provider.ModeCatchUp)
	for i, mode := range []provider.Mode{provider.ModeCatchUp, provider.ModeClosing, provider.ModeLive} {
		if mode != c.Mode {
			c = s.mode(c, mode)
		}
		at := int64(10 + i)
		for again := range 2 {
			found := s.open(s.reading(s.events(5, at, 20)), effects)
			same(s, "fresh", found.Fresh, [][]bool{{false}, {again == 0}, {again == 0 && i == 0}})
			same(s, "left", found.Left, nil)
		}
		s.applied("by the reader", []int64{at, 20, 30}, true, true, false)
	}
	s.effectsOf("of the reader", 4, 5, 10, 11, 12, 20)
	same(s, "fresh in a delivery", s.open(s.events(5, 10, 20, 30), effects).Fresh, [][]bool{{false}, {false}, {false}, {true}})
	s.move(c, 20)
	s.prunedApplied("of the reader", []string{"posted"}, 10, 4)
}

func replacedReader(s *stage) {
	c := s.begins(5, provider.ModeLive)
	old := s.reading(s.events(10))
	next := c
	next.Token = claim.NewToken()
	next = s.set(c, next)
	s.fenced(s.do(s.ctx, old, effects), "by another token")
	old = s.reading(s.events(10))
	s.mode(next, provider.ModeCatchUp)
	s.fenced(s.do(s.ctx, old, effects), "by another mode")
	s.effectsOf("of fenced units", 0, 10)
	s.applied("by fenced units", []int64{10}, false)
}

func foreignInModes(s *stage) {
	c := s.begins(1<<40, provider.ModeCatchUp)
	for i, mode := range []provider.Mode{provider.ModeCatchUp, provider.ModeClosing, provider.ModeLive} {
		if mode != c.Mode {
			c = s.mode(c, mode)
		}
		u := s.of(fmt.Sprint("m-", i))
		unmarked := s.event(3)
		unmarked.Mark = false
		u.Messages = append(u.Messages, unmarked)
		for _, again := range []bool{false, true} {
			found := s.open(u, effects)
			same(s, "fresh", found.Fresh, [][]bool{{!again}, {true}})
			same(s, "left", found.Left, nil)
		}
		same(s, "total", s.total(fmt.Sprint("m-", i)), 1)
	}
	s.effectsOf("of an event without Mark", 6, 3)
	s.outcomes("of foreign messages", []string{"m-0", "m-2", "m-3"}, provider.OutcomeApplied, provider.OutcomeApplied, provider.OutcomeUnseen)
	s.prunedApplied("of foreign messages", []string{"posted"}, 10, 0)
}

func parkedInModes(s *stage) {
	c := s.begins(5, provider.ModeLive)
	for i, mode := range []provider.Mode{provider.ModeLive, provider.ModeCatchUp, provider.ModeClosing} {
		if mode != c.Mode {
			c = s.mode(c, mode)
		}
		var rows []provider.Parked
		positions := []int64{3, 8 + 10*int64(i)} // at or before the checkpoint, and behind it
		for _, position := range positions {
			rows = append(rows, s.park(0, s.untyped(fmt.Sprint("e-", position), newID()))...)
		}
		u := s.parkedUnit(rows...)
		for n, position := range positions {
			m := &u.Messages[n]
			m.Mark, m.Position, m.Handlers = true, position, []provider.Handler{s.handler(fmt.Sprint("posted", i))}
		}
		found := s.open(u, effects)
		same(s, "live", found.Live, []bool{true, true})
		same(s, "fresh", found.Fresh, [][]bool{{true}, {true}})
		same(s, "left", found.Left, nil)
		s.effectsOf("of parked events", i+1, 3)
		s.effectsOf("of parked events", 1, positions[1])
	}
}

func handlersInModes(s *stage) {
	c := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	u := s.events(5, 6, 7)
	for i := range u.Messages {
		u.Messages[i].Handlers = []provider.Handler{s.handler("given", s.name+"/posted"), s.handler("rated")}
	}
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{false, false}, {false, true}, {true, true}})
	same(s, "fresh under the old name", s.open(s.events(7), effects).Fresh, [][]bool{{false}})
	s.move(c, 7)
	s.prunedApplied("under each name", []string{"posted", "given", "rated"}, 10, 2+2+2)
	s.effectsOf("of all handlers", 1+1+2, 5, 6, 7)
}
