package providertest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var listCases = []testCase{
	{
		name: "filters of parked messages", play: parkedFilters,
		rule: "Parked lists what f selects in order of Seq; the zero filter selects all that are not resolved",
	},
	{
		name: "pages of parked messages", play: parkedPages,
		rule: "ParkedFilter.Limit: zero means 100 for Parked. After: only greater Seqs",
	},
}

// oneOfEachState parks messages that differ in each field of a filter, at least one in each
// state.
func (s *stage) oneOfEachState() []provider.Parked {
	s.Helper()
	ben, eve, fay := s.failed("m-3", "ben"), s.failed("m-4", "eve"), s.failed("m-7", "fay")
	ben.Handler, ben.Code, ben.Class, ben.Type = s.name+"/other", "23505", provider.ClassPermanent, "review.liked"
	eve.Type = "REVIEW.LIKED"
	rows := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"), ben, eve)
	rows = append(rows, s.park(-1, s.failed("m-5", "cid"))...)
	rows = append(rows, s.park(0, s.untyped("m-6", ""), fay, s.failed("m-8", "gus"))...)
	s.skip(rows[6])
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[7].Seq}}, provider.StateWaiting, 1)
	s.runs("replayed", []provider.Parked{s.row(rows[7].Seq)}, true)
	return rows
}

func parkedFilters(s *stage) {
	rows := s.oneOfEachState()
	seq := func(is ...int) []int64 {
		seqs := []int64{}
		for _, i := range is {
			seqs = append(seqs, rows[i].Seq)
		}
		return seqs
	}
	waiting, stuck := provider.StateWaiting, provider.StateStuck
	resolved := []provider.ParkedState{provider.StateReplayed, provider.StateSkipped}
	for name, c := range map[string]struct {
		f    provider.ParkedFilter
		want []string
	}{
		"everything":         {provider.ParkedFilter{}, []string{"m-1", "m-2", "m-3", "m-4", "m-5", "m-6"}},
		"a handler":          {provider.ParkedFilter{Handler: s.name + "/posted"}, []string{"m-1", "m-4", "m-5"}},
		"part of a handler":  {provider.ParkedFilter{Handler: s.name}, []string{}},
		"a key":              {provider.ParkedFilter{Key: "ann"}, []string{"m-1", "m-2"}},
		"a class":            {provider.ParkedFilter{Class: new(provider.ClassHeld)}, []string{"m-2"}},
		"the zero class":     {provider.ParkedFilter{Class: new(provider.ClassUnknown)}, []string{"m-1", "m-4", "m-5", "m-6"}},
		"a code":             {provider.ParkedFilter{Code: "unregistered"}, []string{"m-6"}},
		"a type":             {provider.ParkedFilter{Types: []string{"review.liked"}}, []string{"m-3", "m-6"}},
		"types":              {provider.ParkedFilter{Types: []string{"x", "REVIEW.LIKED", "review.posted"}}, []string{"m-1", "m-2", "m-4", "m-5"}},
		"no types":           {provider.ParkedFilter{Types: []string{}}, []string{}},
		"a state":            {provider.ParkedFilter{States: []provider.ParkedState{stuck}}, []string{"m-5"}},
		"waiting":            {provider.ParkedFilter{States: []provider.ParkedState{waiting}}, []string{"m-1", "m-2", "m-3", "m-4", "m-6"}},
		"resolved":           {provider.ParkedFilter{States: resolved}, []string{"m-7", "m-8"}},
		"the skipped":        {provider.ParkedFilter{States: resolved[1:]}, []string{"m-7"}},
		"no states":          {provider.ParkedFilter{States: []provider.ParkedState{}}, []string{}},
		"all states":         {provider.ParkedFilter{States: allStates, After: rows[4].Seq}, []string{"m-6", "m-7", "m-8"}},
		"some Seqs":          {provider.ParkedFilter{Seqs: seq(5, 0, 6)}, []string{"m-1", "m-6"}},
		"no Seqs":            {provider.ParkedFilter{Seqs: []int64{}}, []string{}},
		"a page":             {provider.ParkedFilter{After: rows[1].Seq, Limit: 2}, []string{"m-3", "m-4"}},
		"a page of a class":  {provider.ParkedFilter{Class: new(provider.ClassUnknown), After: rows[0].Seq, Limit: 2}, []string{"m-4", "m-5"}},
		"a code of no state": {provider.ParkedFilter{Code: "panic", States: []provider.ParkedState{stuck}, Key: "ann"}, []string{}},
		"all at once": {provider.ParkedFilter{
			Handler: s.name + "/other", Key: "ben", Class: new(provider.ClassPermanent), Code: "23505", Types: []string{"review.liked"},
			States: []provider.ParkedState{waiting}, Seqs: seq(2, 3), After: rows[1].Seq, Limit: 5,
		}, []string{"m-3"}},
	} {
		c.f.Projector = s.name
		same(s, name, idsOfParked(s.list(c.f)), c.want)
	}
	foreign := map[string]any{"States": []provider.ParkedState{}} // the rows have all states
	selectsNone(s, "listed", foreign, func(f provider.ParkedFilter) int { return len(s.list(f)) })
	for _, to := range []provider.ParkedState{waiting, provider.StateSkipped} {
		selectsNone(s, "decided about", foreign, func(f provider.ParkedFilter) int {
			n, err := s.db.Decide(s.ctx, f, to, ann)
			s.ok(err, "decide")
			return n
		})
	}
	same(s, "of another projector", len(s.list(provider.ParkedFilter{Projector: s.name + "x"})), 0)
	same(s, "of any projector", idsOfParked(s.list(provider.ParkedFilter{After: rows[0].Seq - 1, Limit: 2})), []string{"m-1", "m-2"})
	same(s, "open messages", len(s.rows()), 6)
	if c, ok := s.store.(parkedCounter); ok {
		all, err := c.ParkedCount(s.ctx, "")
		s.ok(err, "count")
		s.require(all >= 6, "the count of all projectors, %d, includes this one's", all)
	}
}

func parkedPages(s *stage) {
	var ps []provider.Parked
	for i := range 150 {
		ps = append(ps, s.behind(fmt.Sprint(i), []string{"a", "b", "a%"}[i%3]))
	}
	s.open(s.parking(0, ps...))
	of := func(first, step, n int) (ids []string) {
		for i := range n {
			ids = append(ids, fmt.Sprint(first+i*step))
		}
		return ids
	}
	page := func(key string, after int64, limit int) []provider.Parked {
		return s.list(provider.ParkedFilter{Projector: s.name, Key: key, After: after, Limit: limit})
	}
	first := page("", 0, 0)
	same(s, "without a limit", idsOfParked(first), of(0, 1, 100))
	same(s, "the next page", idsOfParked(page("", first[99].Seq, 1000)), of(100, 1, 50))
	same(s, "of a key, without a limit", idsOfParked(page("b", 0, 0)), of(1, 3, 50))
	first = page("a", 0, 20)
	same(s, "first page of a key", idsOfParked(first), of(0, 3, 20))
	second := page("a", first[19].Seq, 20)
	same(s, "second page", idsOfParked(second), of(60, 3, 20))
	third := page("a", second[19].Seq, 20)
	same(s, "last page", idsOfParked(third), of(120, 3, 10))
	same(s, "after the end", len(page("a", third[9].Seq, 20)), 0)
}

var decideCases = []testCase{
	{
		name: "a replay", play: replayed,
		rule: "Decide makes what f selects, of the messages that are waiting or stuck, due now with no attempts counted, and keeps d with them",
	},
	{
		name: "a replay behind others", play: replayedBehind,
		rule: "A lane whose first message is stuck is never due, and a postponed lane stays so: a replay of later messages only does not change that",
	},
	{
		name: "a skip", play: skipped,
		rule: "Decide skips what f selects, and keeps d with it. The message behind a skipped one is due",
	},
	{
		name: "a skip behind others", play: skippedBehind,
		rule: "A skip of later messages does not change when their lane is due",
	},
	{
		name: "a selection", play: decidedSome,
		rule: "Decide applies to what f selects, in order of Seq, at most Limit if that is not zero, and returns how many",
	},
	{
		name: "a runner's own decision", play: zeroDecision,
		rule: "Decide keeps d with the messages unless d is zero",
	},
	{
		name: "bad decisions", play: badDecisions,
		rule: "Any other state is ErrInput. So is a d that is not zero and that Validate refuses. Nothing is changed then",
	},
	{
		name: "decisions outlive the process", unless: Volatile, play: decisionsOutlive,
		rule: "The state of a parked message outlives the process: replayed, skipped, due, tried, or stuck",
	},
}

func replayed(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	s.park(time.Hour, s.failed("m-2", "ben"), s.behind("m-3", "cid"))
	s.advance(time.Minute)
	rows := s.rows()
	s.isDue("at first")
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 3)
	due := s.due()
	same(s, "messages due", len(due), 3)
	for i, p := range s.rows() {
		want := rows[i]
		want.State, want.Attempts, want.Decision, want.DueAt = provider.StateWaiting, 0, ann, p.DueAt
		same(s, "a due message", p, want)
	}
	s.runs("all", s.rows(), true, true, true)
	for _, p := range rows {
		same(s, "state", s.row(p.Seq).State, provider.StateReplayed)
		same(s, "total", s.total(p.MessageID), 1)
	}
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 0)
	s.decide(provider.ParkedFilter{States: allStates}, provider.StateSkipped, 0)
}

func replayedBehind(s *stage) {
	s.park(-1, s.failed("m-1", "ann"), s.failed("m-2", "ann"))
	s.park(0, s.behind("m-3", "ann"))
	s.park(time.Hour, s.failed("m-4", "ben"), s.behind("m-5", "ben"))
	rows := s.rows()
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[1].Seq, rows[2].Seq, rows[4].Seq}}, provider.StateWaiting, 3)
	s.isDue("while the first ones are not due")
	s.states("of those behind", rows[1:3], provider.StateWaiting, provider.StateWaiting)
	s.outcomes("behind a stuck message", []string{"m-2"}, provider.OutcomeStuck)
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateWaiting, 1)
	s.isDue("once the first is due", "m-1")
	s.runs("the first", s.due(), true)
	s.isDue("after the first", "m-2")
	s.decide(provider.ParkedFilter{Key: "ben"}, provider.StateWaiting, 2)
	s.isDue("all", "m-2", "m-4")
}

func skipped(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	s.park(0, s.behind("m-2", "ann"), s.failed("m-3", "ben"))
	s.park(-1, s.behind("m-4", "ben"))
	s.park(time.Hour, s.failed("m-5", "cid"), s.failed("m-6", "dan"), s.behind("m-7", "dan"))
	s.advance(time.Minute)
	rows := s.rows()
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq, rows[2].Seq, rows[4].Seq, rows[5].Seq, rows[6].Seq}}, provider.StateSkipped, 5)
	got := s.row(rows[0].Seq)
	s.require(got.ResolvedAt.Sub(got.At) >= time.Minute, "skipped at %v, a minute after %v", got.ResolvedAt, got.At)
	want := rows[0]
	want.State, want.Decision, want.ResolvedAt, want.DueAt = provider.StateSkipped, ann, got.ResolvedAt, time.Time{}
	same(s, "a skipped message", got, want)
	s.isDue("behind skipped messages", "m-2")
	same(s, "left", idsOfParked(s.rows()), []string{"m-2", "m-4"})
	s.isHeld("before a stuck message", "ben", true)
	s.isHeld("with all skipped", "cid", false)
	s.isHeld("with all skipped", "dan", false)
	s.outcomes("of skipped messages", []string{"m-1", "m-3", "m-4"}, provider.OutcomeSkipped, provider.OutcomeSkipped, provider.OutcomeStuck)
	same(s, "fresh", s.open(s.of("m-1"), nothing).Fresh, [][]bool{{false}})
	before := s.dump()
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateSkipped, 0)
	s.decide(provider.ParkedFilter{States: []provider.ParkedState{provider.StateSkipped}}, provider.StateWaiting, 0)
	s.unchanged(before, "decisions about skipped messages")
}

func skippedBehind(s *stage) {
	rows := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"), s.behind("m-3", "ann"))
	same(s, "tried", s.tries(rows[0], -1, time.Hour), true)
	s.skip(rows[1])
	s.isDue("during the first one's try")
	s.advance(2 * time.Hour)
	s.isDue("later", "m-1")
	s.runs("the first", s.due(), true)
	s.isDue("after the first", "m-3")
}

func decidedSome(s *stage) {
	var ps []provider.Parked
	for i := range 130 {
		ps = append(ps, s.failed(fmt.Sprint("m-", i), "ann"))
	}
	s.park(-1, ps...)
	s.park(-1, s.failed("other", "ben"), s.untyped("untyped", "cid"))
	s.decide(provider.ParkedFilter{Key: "ann", Limit: 7}, provider.StateSkipped, 7)
	first := s.rows()[0]
	same(s, "the first one left", first.MessageID, "m-7")
	s.decide(provider.ParkedFilter{After: first.Seq + 1, Limit: 3}, provider.StateSkipped, 3)
	same(s, "left", idsOfParked(s.rows()[:3]), []string{"m-7", "m-8", "m-12"})
	s.decide(provider.ParkedFilter{Types: []string{"review.liked", "x"}, Code: "unregistered"}, provider.StateWaiting, 1)
	s.decide(provider.ParkedFilter{Handler: s.name + "/posted", Code: "panic", Class: new(provider.ClassUnknown), Key: "ann"}, provider.StateSkipped, 120)
	same(s, "left", idsOfParked(s.rows()), []string{"other", "untyped"})
	s.isDue("at the end", "untyped")
	s.decide(provider.ParkedFilter{Types: []string{}}, provider.StateSkipped, 0)
	s.decide(provider.ParkedFilter{States: []provider.ParkedState{}}, provider.StateSkipped, 0)
	s.decide(provider.ParkedFilter{Seqs: []int64{}}, provider.StateSkipped, 0)
	s.decide(provider.ParkedFilter{States: []provider.ParkedState{provider.StateStuck}}, provider.StateWaiting, 1)
}

func zeroDecision(s *stage) {
	rows := s.park(-1, s.untyped("m-1", "ann"), s.untyped("m-2", "ben"), s.untyped("m-3", "cid"))
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateWaiting, 1)
	decide := func(to provider.ParkedState, p ...provider.Parked) {
		s.Helper()
		f := provider.ParkedFilter{Projector: s.name, Seqs: []int64{}}
		for _, p := range p {
			f.Seqs = append(f.Seqs, p.Seq)
		}
		n, err := s.db.Decide(s.ctx, f, to, provider.Decision{})
		s.ok(err, "decide without a person")
		same(s, "decided", n, len(p))
	}
	decide(provider.StateWaiting, rows[:2]...)
	decide(provider.StateSkipped, rows[2])
	same(s, "decisions", []provider.Decision{s.row(rows[0].Seq).Decision, s.row(rows[1].Seq).Decision, s.row(rows[2].Seq).Decision}, []provider.Decision{ann, {}, {}})
	s.runs("both", s.rows(), true, true)
	states := []string{}
	for _, p := range s.list(provider.ParkedFilter{Projector: s.name, States: allStates}) {
		states = append(states, p.MessageID+" "+p.State.String())
	}
	same(s, "kept", states, []string{"m-1 replayed", "m-3 skipped"})
}

func badDecisions(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	before := s.dump()
	refused := func(to provider.ParkedState, d provider.Decision) {
		s.Helper()
		n, err := s.db.Decide(s.ctx, provider.ParkedFilter{Projector: s.name}, to, d)
		s.require(errors.Is(err, provider.ErrInput), "the error %v is ErrInput", err)
		same(s, "decided", n, 0)
		s.unchanged(before, "a bad decision")
	}
	for _, to := range []provider.ParkedState{provider.StateStuck, provider.StateReplayed, -1, 9} {
		refused(to, ann)
		refused(to, provider.Decision{})
	}
	for _, d := range []provider.Decision{
		{By: "ann"}, {Reason: "why"}, {By: strings.Repeat("x", 256), Reason: "why"}, {By: "ann", Reason: strings.Repeat("x", 1001)},
	} {
		refused(provider.StateWaiting, d)
		refused(provider.StateSkipped, d)
	}
	n, err := s.db.Decide(s.ctx, provider.ParkedFilter{Projector: s.name}, provider.StateSkipped, provider.Decision{By: strings.Repeat("x", 255), Reason: strings.Repeat("x", 1000)})
	s.ok(err, "decide with a long reason")
	same(s, "decided", n, 1)
}

func decisionsOutlive(s *stage) {
	rows := s.oneOfEachState()
	same(s, "tried", s.tries(rows[0], -1, time.Hour), true)
	before := s.dump()
	later := s.reopen()
	later.unchanged(before, "opening a new handle")
	ids := idsOfParked(later.due())
	slices.Sort(ids)
	same(s, "due through a new handle", ids, []string{"m-3", "m-4", "m-6"})
	later.runs("through a new handle", []provider.Parked{later.row(rows[0].Seq), rows[7]}, true, false)
}
