package providertest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var parkedUnitCases = []testCase{
	{
		// Promise: G6.8
		name: "a lane is emptied in order", play: lanePrefix,
		rule: "A parked message is live only if all messages before it in its lane are earlier messages of this unit",
	},
	{
		name: "only as it was listed", play: liveAsListed,
		rule: "A parked message is live only if it is still waiting as it was listed (same Attempts, same Handlers)",
	},
	{
		name: "only if its lane is due", play: liveWhenDue,
		rule: "A message without attempts is live only if its lane is due. One with attempts need not be, because Try has postponed the lane",
	},
	{
		name: "fresh for the handlers that it is parked for", play: freshAgain,
		rule: "A live parked message is fresh for all of its handlers, one that is not live for none; its markers do not count. Held is always false",
	},
	{
		name: "a parked message with Mark", play: markedAgain,
		rule: "Mark: insert a marker for each of Handlers; a live parked message is fresh for a handler if its marker did not exist",
	},
	{
		name: "the messages that ran", play: resolvedRows,
		rule: "All live parked messages of the unit that are not in Closing.Park are resolved: deleted or, if a person decided on them, kept as replayed",
	},
	{
		name: "the messages that stay", play: staying,
		rule: "A parked message in Closing.Park stays, with the fields of the Aside; negative After: it is stuck",
	},
	{
		name: "their lanes afterwards", play: lanesAfterwards,
		rule: "A lane without messages is free. Otherwise it is never due if its first message is stuck, due after After if its first is in Closing.Park, else due now",
	},
	{
		name: "a failed unit of parked messages", play: failedParkedUnit,
		rule: "A unit that fails changes neither its parked messages, nor their order, nor when their lanes are due",
	},
	{
		name: "a parked message in many units at once", play: ranAtOnce,
		rule: "A parked message is live in one unit only",
	},
}

func lanePrefix(s *stage) {
	var ps []provider.Parked
	for i := range 6 {
		ps = append(ps, s.behind(fmt.Sprint("m-", i), "ann"))
	}
	rows := s.park(0, ps...)
	other := s.park(0, s.behind("m-9", "ben"))[0]
	s.runs("not the first", rows[1:3], false, false)
	s.runs("one left out", []provider.Parked{rows[0], other, rows[2]}, true, true, false)
	s.runs("in another order", []provider.Parked{rows[2], rows[1]}, false, true)
	s.runs("a prefix, and then not", []provider.Parked{rows[2], rows[3], rows[5]}, true, true, false)
	s.runs("one that is resolved", []provider.Parked{rows[3], rows[4]}, false, true)
	s.runs("the last", rows[5:], true)
	s.runs("all that are resolved", rows, slices.Repeat([]bool{false}, 6)...)
	for _, p := range append(rows, other) {
		same(s, "total of "+p.MessageID, s.total(p.MessageID), 1)
	}
	s.isHeld("at the end", "ann", false)
}

func liveAsListed(s *stage) {
	row := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"))[0]
	changed := row
	changed.Attempts++
	s.runs("other attempts", []provider.Parked{changed}, false)
	changed = row
	changed.Handlers = []string{s.name + "/posted", s.name + "/late"}
	s.runs("other handlers", []provider.Parked{changed}, false)
	late := s.failed("m-1", "ann")
	late.Handlers = []string{s.name + "/late"}
	s.open(s.parking(0, late))
	s.runs("handlers that were added since", []provider.Parked{row}, false)
	elsewhere := s.parkedUnit(s.row(row.Seq))
	elsewhere.Projector = s.name + "x"
	same(s, "live at another projector", s.open(elsewhere, effects).Live, []bool{false})
	tried, err := s.db.Try(s.ctx, s.row(row.Seq), -1, time.Hour)
	s.ok(err, "try")
	same(s, "tried", tried, true)
	row = s.row(row.Seq)
	changed = row
	changed.Attempts--
	s.runs("a try that was counted since", []provider.Parked{changed}, false)
	s.fails(row, -1)
	s.runs("stuck", []provider.Parked{row}, false)
	s.skip(row)
	s.runs("skipped", []provider.Parked{row}, false)
	same(s, "effects", s.total("m-1"), 0)
	next := s.rows()
	s.runs("the next", next, true)
	same(s, "effects", s.total("m-2"), 1)
}

func liveWhenDue(s *stage) {
	rows := s.park(time.Hour, s.behind("m-1", "ann"), s.failed("m-2", "ben"))
	s.runs("before their lanes are due", rows, false, true)
	s.advance(2 * time.Hour)
	s.runs("when it is due", rows[:1], true)
	stuck := s.park(-1, s.failed("m-3", "cid"), s.behind("m-4", "dan"))
	s.runs("stuck messages", stuck, false, false)
}

func freshAgain(s *stage) {
	two := s.failed("m-1", "ann")
	two.Handlers = append(two.Handlers, s.name+"/rated")
	rows := s.park(0, two, s.behind("m-2", "ben"), s.untyped("m-3", "cid"))
	u := s.parkedUnit(rows...)
	u.Messages[2].Handlers = []provider.Handler{s.handler("posted")}
	found := s.open(u, effects)
	same(s, "fresh", found.Fresh, [][]bool{{true, true}, {true}, {true}})
	same(s, "held", found.Held, []bool{false, false, false})
	same(s, "fresh when they are resolved", s.open(u, effects).Fresh, [][]bool{{false, false}, {false}, {false}})
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-3")}, []int{2, 1, 1})
	s.outcomes("with and without a marker", []string{"m-2", "m-3"}, provider.OutcomeApplied, provider.OutcomeUnseen)
}

func markedAgain(s *stage) {
	// an older program has applied it for one handler
	s.open(s.of("m-1"), effects)
	row := s.park(0, s.untyped("m-1", ""))[0]
	u := s.parkedUnit(row)
	u.Messages[0].Mark, u.Messages[0].Handlers = true, []provider.Handler{s.handler("posted"), s.handler("liked", s.name+"/hearted")}
	err := s.do(s.ctx, u, func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	gone := u
	gone.Messages = slices.Clone(u.Messages)
	gone.Messages[0].ID = "m-2"
	changed := row
	changed.Attempts++
	gone.Messages[0].Parked = &changed
	same(s, "fresh if it is not live", s.open(gone, effects).Fresh, [][]bool{{false, false}})
	s.outcomes("of a message that is not live", []string{"m-2"}, provider.OutcomeUnseen)
	same(s, "fresh", s.open(u, effects).Fresh, [][]bool{{false, true}})
	same(s, "total", s.total("m-1"), 2)
	later := s.of("m-1")
	later.Messages[0].Handlers = []provider.Handler{s.handler("posted"), s.handler("hearted")}
	same(s, "fresh when it is redelivered", s.open(later, effects).Fresh, [][]bool{{false, false}})

	// it stays, for the handlers that now have their markers
	row = s.park(0, s.untyped("m-3", ""))[0]
	u = s.parkedUnit(row)
	u.Messages[0].Mark, u.Messages[0].Handlers = true, []provider.Handler{s.handler("posted")}
	s.open(u, func(opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Parked: s.failed("m-3", "")}}}, nil
	})
	row = s.row(row.Seq)
	same(s, "handlers of a message that stays", row.Handlers, []string{s.name + "/posted"})
	s.runs("it", []provider.Parked{row}, true)
	same(s, "total", s.total("m-3"), 1)
}

func resolvedRows(s *stage) {
	rows := s.park(0, s.failed("m-1", "ann"), s.failed("m-2", "ben"), s.behind("m-3", "ben"))
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[1].Seq}}, provider.StateWaiting, 1)
	s.advance(time.Hour)
	rows = s.rows()
	s.runs("all", rows, true, true, true)
	same(s, "waiting or stuck", len(s.rows()), 0)
	all := s.list(provider.ParkedFilter{Projector: s.name, States: allStates})
	same(s, "kept", len(all), 1)
	s.require(all[0].ResolvedAt.Sub(all[0].At) >= time.Hour, "it was replayed at %v, an hour after %v", all[0].ResolvedAt, all[0].At)
	want := rows[1]
	want.State, want.Decision, want.ResolvedAt, want.DueAt = provider.StateReplayed, ann, all[0].ResolvedAt, time.Time{}
	same(s, "replayed message", all[0], want)
	for _, p := range rows {
		same(s, "total of "+p.MessageID, s.total(p.MessageID), 1)
	}
}

func staying(s *stage) {
	rows := s.park(0, s.behind("m-1", "ann"), s.behind("m-2", "ann"), s.behind("m-3", "ben"))
	s.open(s.parkedUnit(rows...), func(opened) (provider.Closing, error) {
		first, third := s.failed("x", "x"), s.failed("x", "x")
		// not changed by the Aside
		first.Payload, first.Headers, first.Topic, first.Type = nil, nil, "x", "x"
		first.Class, first.Code, first.Error, first.Attempts, first.Version = provider.ClassTransient, "suspect", "again", 4, "v9"
		return provider.Closing{Park: []provider.Aside{{Message: 0, Parked: first, After: time.Hour}, {Message: 2, Parked: third, After: -1}}}, nil
	})
	left := s.rows()
	same(s, "left", idsOfParked(left), []string{"m-1", "m-3"})
	want := rows[0]
	want.Class, want.Code, want.Error, want.Attempts, want.Handler, want.Version = provider.ClassTransient, "suspect", "again", 4, s.name+"/posted", "v9"
	want.DueAt = left[0].DueAt
	same(s, "the message that stays", left[0], want)
	s.states("of those that stay", left, provider.StateWaiting, provider.StateStuck)
	s.isDue("at first")
	s.advance(2 * time.Hour)
	s.isDue("after two hours", "m-1")
}

func lanesAfterwards(s *stage) {
	s.park(0, s.behind("m-1", "ann"))
	s.park(-1, s.behind("m-2", "ann")) // stuck, behind m-1
	s.park(0, s.behind("m-3", "ann"), s.failed("m-4", "ben"), s.behind("m-5", "ben"), s.behind("m-6", "cid"))
	s.advance(time.Hour)
	rows := s.rows()
	ok, err := s.db.Try(s.ctx, rows[3], -1, 10*time.Hour)
	s.ok(err, "try")
	same(s, "tried", ok, true)
	rows[3].Attempts++
	s.open(s.parkedUnit(rows[0], rows[3], rows[5]), func(o opened) (provider.Closing, error) {
		same(s, "live", o.Live, []bool{true, true, true})
		return provider.Closing{}, nil
	})
	s.isHeld("before a stuck message", "ann", true)
	s.isHeld("with one left", "ben", true)
	s.isHeld("with nothing left", "cid", false)
	s.isDue("afterwards", "m-5")
	s.outcomes("behind a stuck message", []string{"m-3", "m-5"}, provider.OutcomeStuck, provider.OutcomeWaiting)
}

func failedParkedUnit(s *stage) {
	rows := s.park(0, s.behind("m-1", "ann"), s.behind("m-2", "ann"))
	before := s.dump()
	for range 2 {
		err := s.do(s.ctx, s.parkedUnit(rows...), func(o opened) (provider.Closing, error) {
			_, err := effects(o)
			return provider.Closing{Park: []provider.Aside{{Message: 1, Parked: rows[1], After: -1}}}, errors.Join(err, errRefused)
		})
		s.require(errors.Is(err, errRefused), "the error %v is run's", err)
		s.unchanged(before, "a unit that failed")
		s.isDue("after a unit that failed", "m-1", "m-2")
	}
	s.runs("a later unit", rows, true, true)
	same(s, "totals", []int{s.total("m-1"), s.total("m-2")}, []int{1, 1})
}

// ranAtOnce runs the same messages in many units at once, four in a unit, and skips some of them
// meanwhile.
func ranAtOnce(s *stage) {
	const messages, units = 24, 16
	var ps []provider.Parked
	for i := range messages {
		ps = append(ps, s.behind(fmt.Sprint("m-", i), fmt.Sprint("key ", i%8)))
	}
	rows := s.park(0, ps...)
	errs, skipped := make([]error, units+1), 0
	together(units+1, func(i int) {
		if i == units {
			skipped, errs[i] = s.db.Decide(s.ctx, provider.ParkedFilter{Projector: s.name, Seqs: []int64{rows[3].Seq, rows[10].Seq, rows[20].Seq}}, provider.StateSkipped, ann)
			return
		}
		for n := 0; n < messages && errs[i] == nil; n += 4 {
			errs[i] = s.do(s.ctx, s.parkedUnit(rows[n:n+4]...), effects)
		}
	})
	s.ok(errors.Join(errs...), "run parked messages at once")
	for range messages {
		for _, p := range s.due() {
			s.open(s.parkedUnit(p), effects)
		}
	}
	done := 0
	for _, p := range rows {
		n := s.total(p.MessageID)
		s.require(n <= 1, "%s took effect %d times", p.MessageID, n)
		done += n
	}
	same(s, "applied or skipped", done+skipped, messages)
	same(s, "left", len(s.rows()), 0)
}
