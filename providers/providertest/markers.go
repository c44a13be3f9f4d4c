package providertest

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

var markerCases = []testCase{
	{
		name: "a redelivered message", play: redelivered,
		rule: "A message with Mark is fresh for a handler if its marker did not exist",
	},
	{
		name: "a message without a marker", play: unmarked,
		rule: "A message without Mark is always fresh, and leaves no marker",
	},
	{
		name: "handlers are independent", play: independentHandlers,
		rule: "A marker is of one handler and one message: only a handler that is added later is fresh",
	},
	{
		// Promise: G4.9
		name: "earlier names of a handler", play: earlierNames,
		rule: "Handler.Was: a marker under one of the earlier names counts, and a new one is left under each",
	},
	{
		// Promise: R1.1
		name: "generations", play: generations,
		rule: "Markers are of the generation that the unit names, whichever is live. Zero and no generation mean the first one, which is 1",
	},
	{
		name: "a unit with Switch that fails", play: failedSwitch,
		rule: "If run fails, the live generation does not change, and run's writes are rolled back",
	},
	{
		name: "several messages in a unit", play: severalMessages,
		rule: "Found.Fresh says for each handler of each message of a unit whether to run it",
	},
	{
		name: "many messages in a unit", play: manyMessages,
		rule: "A unit may have many messages, and each of them several handlers",
	},
	{
		name: "unusual message ids", play: oddMessageIDs,
		rule: "A message id is text of any kind, not only a UUID, and different ids stay different",
	},
	{
		name: "a new handle knows the markers", unless: Volatile, play: newHandleKnows,
		rule: "A marker commits with the handler's writes and outlives the process: a redelivery after a crash finds it",
	},
}

func redelivered(s *stage) {
	for i := range 3 {
		same(s, "fresh", s.open(s.of("m-1"), effects).Fresh, [][]bool{{i == 0}})
		same(s, "total", s.total("m-1"), 1)
	}
	err := s.do(s.ctx, s.of("m-2"), func(o opened) (provider.Closing, error) {
		_, err := effects(o)
		return provider.Closing{}, errors.Join(err, errRefused)
	})
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	same(s, "fresh after a unit that failed", s.open(s.of("m-2"), effects).Fresh, [][]bool{{true}})
	same(s, "total", s.total("m-2"), 1)
	s.outcomes("of messages with markers", []string{"m-1", "m-2"}, provider.OutcomeApplied, provider.OutcomeApplied)
}

func unmarked(s *stage) {
	u := s.of("m-1")
	u.Messages[0].Mark = false
	for i := range 2 {
		same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{true}})
		same(s, "total", s.total("m-1"), i+1)
	}
	s.outcomes("of a message without a marker", []string{"m-1"}, provider.OutcomeUnseen)
	none := s.of("m-2")
	none.Messages[0].Handlers = nil
	same(s, "handlers found of a message without handlers", len(s.open(none, effects).Fresh[0]), 0)
}

func independentHandlers(s *stage) {
	s.open(s.of("m-1"), effects)
	u := s.of("m-1")
	u.Messages[0].Handlers = []provider.Handler{s.handler("rated"), s.handler("posted"), s.handler("late")}
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{true, false, true}})
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{false, false, false}})
	same(s, "total", s.total("m-1"), 3)
	elsewhere := s.of("m-1")
	elsewhere.Projector, elsewhere.Messages[0].Handlers[0].Name = s.name+"x", s.name+"x/posted"
	same(s, "fresh at another projector", s.open(elsewhere, effects).Fresh, [][]bool{{true}})
}

func earlierNames(s *stage) {
	renamed := func(ids ...string) provider.Unit {
		u := s.of(ids...)
		for i := range u.Messages {
			u.Messages[i].Handlers = []provider.Handler{s.handler("given", s.name+"/rated", s.name+"/posted")}
		}
		return u
	}
	s.open(s.of("m-1"), effects)
	same(s, "fresh under the new name", s.open(renamed("m-1", "m-2"), effects).Fresh, [][]bool{{false}, {true}})
	same(s, "fresh under the old name", s.open(s.of("m-1", "m-2"), effects).Fresh, [][]bool{{false}, {false}})
	q := s.question("m-1")
	q.Handler, q.Was = s.name+"/given", []string{s.name + "/posted"}
	same(s, "outcome under the new name", s.answers(q), []provider.Outcome{provider.OutcomeApplied})
	s.outcomes("under the old name", []string{"m-2"}, provider.OutcomeApplied)

	errs := make([]error, 20) // old and new code at once
	together(len(errs), func(i int) {
		u := s.of("m-9")
		if i%2 == 0 {
			u = renamed("m-9")
		}
		errs[i] = s.do(s.ctx, u, effects)
	})
	s.ok(errors.Join(errs...), "deliver to old and new code at once")
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-9")}, []int{1, 1, 1})
}

func generations(s *stage) {
	s.open(s.of("m-1"), effects)
	second := s.in(2)
	for _, switched := range []bool{false, true} {
		if switched {
			s.in(1).switchTo(2, 1)
		}
		second.outcomes("in the next generation", []string{"m-1"}, map[bool]provider.Outcome{true: provider.OutcomeApplied}[switched])
		same(s, "fresh in the next generation", second.open(second.of("m-1"), effects).Fresh, [][]bool{{!switched}})
		same(s, "fresh again", second.open(second.of("m-1", "m-2"), effects).Fresh, [][]bool{{false}, {!switched}})
		same(s, "fresh in the first generation", s.open(s.of("m-1", "m-2"), effects).Fresh, [][]bool{{false}, {!switched}})
	}
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("switched")}, []int{2, 2, 1})
	unnamed := s.of("m-1", "m-3")
	unnamed.Generation = 0
	same(s, "fresh in a unit that names no generation", s.open(unnamed, effects).Fresh, [][]bool{{false}, {true}})
	same(s, "fresh in the first generation", s.open(s.of("m-3"), effects).Fresh, [][]bool{{false}})
	other := s.in(1)
	other.name += "x"
	other.isLive(1)
}

func failedSwitch(s *stage) {
	s.open(s.of("m-1"), effects)
	err := s.switches(s.ctx, 2, provider.GenerationStandby, func(o opened) (provider.Closing, error) {
		return provider.Closing{}, errors.Join(o.add("switched", 1), errRefused)
	})
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	s.isLive(1)
	func() {
		defer func() { same(s, "what was recovered", recover(), any("poison")) }()
		_ = s.switches(s.ctx, 2, provider.GenerationStandby, func(opened) (provider.Closing, error) { panic("poison") })
	}()
	s.isLive(1)
	same(s, "total that run wrote", s.total("switched"), 0)
	same(s, "fresh", s.open(s.of("m-1"), effects).Fresh, [][]bool{{false}})
	s.switchTo(7, 1)
	s.switchTo(8, 7)
}

func severalMessages(s *stage) {
	s.open(s.of("m-2", "m-5"), effects)
	u := s.of("m-6", "m-5", "m-1", "m-2", "m-4")
	u.Messages[3].Handlers = append(u.Messages[3].Handlers, s.handler("rated"))
	u.Messages[4].Handlers = nil
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{true}, {false}, {true}, {false, true}, {}})
	for id, want := range map[string]int{"m-1": 1, "m-2": 2, "m-4": 0, "m-5": 1, "m-6": 1} {
		same(s, "total of "+id, s.total(id), want)
	}
}

func manyMessages(s *stage) {
	const n = 500
	all, odd := s.unit(), s.unit()
	for i := range n {
		m := s.message(newID(), "")
		m.Handlers = append(m.Handlers, s.handler("rated"))
		all.Messages = append(all.Messages, m)
		if i%2 == 1 {
			m.Handlers = m.Handlers[:1]
			odd.Messages = append(odd.Messages, m)
		}
	}
	s.open(odd, nothing)
	fresh := s.open(all, func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) }).Fresh
	for i := range fresh {
		same(s, fmt.Sprint("fresh, message ", i), fresh[i], []bool{i%2 == 0, true})
	}
	for _, m := range all.Messages[:3] {
		s.outcomes("of many", []string{m.ID}, provider.OutcomeApplied)
	}
	same(s, "total", s.total("k"), 1)
}

func oddMessageIDs(s *stage) {
	ids := []string{
		"7", "7 ", " 7", "07", "7.0", "a", "A", "é", "e\u0301", "日本", `o'brien`, `"`, `\`, "%", "_", "$1", "?", "'; drop table markers; --", "null", "NULL",
		strings.Repeat("x", 255), strings.Repeat("x", 254), "ratings/posted", "\u202e", "\ufeff", newID(), strings.ToUpper(newID()),
	}
	for i := range 2 {
		for _, id := range ids {
			same(s, fmt.Sprintf("fresh, message %q", id), s.open(s.of(id), nothing).Fresh, [][]bool{{i == 0}})
		}
		for j, fresh := range s.open(s.of(ids...), nothing).Fresh {
			same(s, fmt.Sprintf("fresh in one unit, message %q", ids[j]), fresh, []bool{false})
		}
	}
}

func newHandleKnows(s *stage) {
	s.open(s.of("m-1"), effects)
	s.switchTo(3, 1)
	s.open(s.of("m-2"), effects)
	row := s.park(0, s.failed("m-3", "ann"))[0]
	later := s.reopen()
	same(s, "fresh through a new handle", later.open(later.of("m-1", "m-2"), effects).Fresh, [][]bool{{true}, {false}})
	same(s, "parked message through a new handle", later.rows(), []provider.Parked{row})
	later.isHeld("through a new handle", "ann", true)
	later.isDue("through a new handle", "m-3")
}
