package providertest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var dueCases = []testCase{
	{
		name: "lanes in order of their time", play: dueInOrder,
		rule: "Due lists the first messages of at most keys lanes whose time has come, in order of the lanes' time",
	},
	{
		name: "the first of a lane", play: dueFirst,
		rule: "Due lists a single message of a lane, or up to each if these are ClassHeld, in order of Seq",
	},
	{
		name: "some lanes", play: dueLanes,
		rule: "DueFilter.Lanes: only these lanes; nil: any",
	},
	{
		name: "a stuck lane", play: dueStuck,
		rule: "A lane whose first message is stuck is never due",
	},
	{
		name: "several projectors", play: dueOfSeveral,
		rule: "Due lists messages by projector, at most f.Keys lanes of each",
	},
	{
		name: "as they are stored", play: dueAsStored,
		rule: "Due lists messages as Parked does",
	},
}

func dueInOrder(s *stage) {
	for i, hours := range []int{3, 1, 4, 0, 2} {
		s.park(time.Duration(hours)*time.Hour, s.failed(fmt.Sprint("m-", hours), fmt.Sprint("key ", i)))
	}
	s.isDueInOrder("at first", "m-0")
	s.advance(150 * time.Minute)
	s.isDueInOrder("after 150 minutes", "m-0", "m-1", "m-2")
	s.advance(3 * time.Hour)
	s.isDueInOrder("at the end", "m-0", "m-1", "m-2", "m-3", "m-4")
	for keys, want := range [][]string{{}, {"m-0"}, {"m-0", "m-1"}} {
		due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: keys, Each: 10})
		s.ok(err, "list due messages")
		same(s, fmt.Sprintf("due, %d lanes", keys), idsOfParked(due), want)
	}
}

func dueFirst(s *stage) {
	s.park(0, s.failed("a1", "a"), s.behind("a2", "a"), s.behind("a3", "a"))
	s.park(0, s.behind("b1", "b"), s.behind("b2", "b"), s.behind("b3", "b"), s.behind("b4", "b"))
	s.park(0, s.behind("c1", "c"), s.behind("c2", "c"), s.failed("c3", "c"), s.behind("c4", "c"))
	s.park(0, s.behind("d1", "d"))
	s.park(-1, s.behind("d2", "d"))
	s.park(0, s.behind("e1", ""), s.behind("e2", ""))
	s.advance(time.Minute)
	for each, want := range map[int][]string{
		1:  {"a1", "b1", "c1", "d1", "e1", "e2"},
		2:  {"a1", "b1", "b2", "c1", "c2", "d1", "e1", "e2"},
		10: {"a1", "b1", "b2", "b3", "b4", "c1", "c2", "d1", "e1", "e2"},
	} {
		due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: 100, Each: each})
		s.ok(err, "list due messages")
		// the order of lanes with the same time is free
		lanes := []provider.Lane{}
		for i, p := range due {
			if i == 0 || due[i-1].Lane != p.Lane {
				s.require(!slices.Contains(lanes, p.Lane), "the messages of lane %s are listed together", p.Key)
				lanes = append(lanes, p.Lane)
			} else {
				s.require(due[i-1].Seq < p.Seq, "%d comes after %d", p.Seq, due[i-1].Seq)
			}
		}
		ids := idsOfParked(due)
		slices.Sort(ids)
		same(s, fmt.Sprint("due, each ", each), ids, want)
	}
}

func dueLanes(s *stage) {
	s.park(0, s.failed("m-1", "ann"), s.failed("m-2", "ben"), s.failed("m-3", ""))
	s.park(time.Hour, s.failed("m-4", "cid"))
	s.park(0, s.failed("m-5", "dan"))
	for _, c := range []struct {
		lanes []provider.Lane
		want  []string
	}{
		{[]provider.Lane{}, []string{}},
		{[]provider.Lane{provider.LaneOfKey("ben")}, []string{"m-2"}},
		{[]provider.Lane{provider.LaneOfKey("m-3"), provider.LaneOfMessage("ann"), provider.LaneOfKey("nobody")}, []string{}},
		{[]provider.Lane{provider.LaneOfMessage("m-3"), provider.LaneOfKey("cid"), provider.LaneOfKey("dan")}, []string{"m-3", "m-5"}},
	} {
		due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Lanes: c.lanes, Keys: 10, Each: 10})
		s.ok(err, "list due messages")
		same(s, "due", idsOfParked(due), c.want)
	}
}

func dueStuck(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	s.park(0, s.behind("m-2", "ann"), s.failed("m-3", "ben"), s.behind("m-4", "ben"))
	s.advance(100_000 * time.Hour)
	s.isDue("a long time later", "m-3")
	s.fails(s.due()[0], -1)
	s.advance(100_000 * time.Hour)
	s.isDue("after it is stuck")
	s.park(0, s.behind("m-5", "ann"), s.behind("m-6", "ben"))
	s.isDue("after more was parked behind")
	for _, p := range s.rows() {
		s.require(p.DueAt.IsZero(), "%s waits for a person, not until %v", p.MessageID, p.DueAt)
	}
}

func dueOfSeveral(s *stage) {
	names := []string{s.name, s.name + "x", s.name + "y"}
	for i := range 9 {
		p := s.failed(fmt.Sprint("m-", i), fmt.Sprint("key ", i/3))
		p.Projector = names[i%3]
		u, run := s.parking(0, p)
		u.Projector = p.Projector
		s.open(u, run)
	}
	for _, c := range []struct {
		projectors []string
		lanes      []provider.Lane
		keys, want int // for each projector
	}{
		{names, nil, 10, 3}, {names, nil, 2, 2}, {names[1:2], nil, 10, 3}, {names, []provider.Lane{laneOf("", "key 1")}, 2, 1}, {nil, nil, 10, 0},
		{names[:2], []provider.Lane{}, 10, 0}, {[]string{s.name + "z"}, nil, 10, 0},
	} {
		var builds []provider.Build
		for _, name := range c.projectors {
			builds = append(builds, provider.Build{Projector: name})
		}
		due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: builds, Lanes: c.lanes, Keys: c.keys, Each: 10})
		s.ok(err, "list due messages")
		of, last := map[string]int{}, ""
		for _, p := range due {
			s.require(p.Projector == last || of[p.Projector] == 0, "the messages of %s are listed together", p.Projector)
			last = p.Projector
			of[last]++
		}
		same(s, fmt.Sprintf("due messages, %+v", c), len(due), c.want*len(c.projectors))
		for _, name := range c.projectors {
			same(s, "due messages of "+name, of[name], c.want)
		}
	}
}

func dueAsStored(s *stage) {
	p := s.failed("m-2", "")
	p.Handlers = append(p.Handlers, s.name+"/rated")
	s.park(0, p, s.untyped("m-3", ""))
	s.decide(provider.ParkedFilter{Types: []string{"review.posted"}}, provider.StateWaiting, 1)
	due := s.due()
	slices.SortFunc(due, func(a, b provider.Parked) int { return cmp.Compare(a.Seq, b.Seq) })
	same(s, "due", due, s.rows())
}

var tryCases = []testCase{
	{
		name: "a try is counted and postpones its lane", play: tryCounts,
		rule: "Try counts an attempt at p and postpones its lane by again: until then it is not tried elsewhere, and the attempt counts even if the process ends",
	},
	{
		name: "a try of a changed message", play: tryOfChanged,
		rule: "Try is false if p has changed since it was listed, or its lane is not due; then it changes nothing",
	},
	{
		name: "the last try", play: tryLimit,
		rule: "If p has limit attempts already, Try is false and p is stuck; a negative limit means none",
	},
	{
		name: "many tries at once", play: triesAtOnce,
		rule: "If many try a message at once, one counts its attempt, and the others do not try it",
	},
	{
		name: "a failed try", play: failedTry,
		rule: "A failed try ends with its message in Closing.Park: its attempt stays counted, and its lane is due after After",
	},
	{
		name: "a person's decision and tries", play: triesAfterDecision,
		rule: "A message that a person made due has no attempts, and can be tried as often as a new one",
	},
}

func (s *stage) tries(p provider.Parked, limit int, again time.Duration) bool {
	s.Helper()
	tried, err := s.db.Try(s.ctx, p, limit, again)
	s.ok(err, "try")
	return tried
}

func tryCounts(s *stage) {
	row := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"))[0]
	same(s, "tried", s.tries(row, 5, time.Hour), true)
	got := s.row(row.Seq)
	s.require(got.DueAt.Sub(row.DueAt) > 50*time.Minute && got.DueAt.Sub(row.DueAt) < 70*time.Minute, "its lane is due at %v, an hour after %v", got.DueAt, row.DueAt)
	row.Attempts++
	row.DueAt = got.DueAt
	same(s, "a tried message", got, row)
	s.isDue("after the try")
	same(s, "tried again", s.tries(row, 5, time.Hour), false)
	s.advance(2 * time.Hour)
	s.isDue("later", "m-1")
	row = s.due()[0]
	same(s, "tried", s.tries(row, 5, time.Hour), true)
	row.Attempts++
	s.runs("a tried message", []provider.Parked{row}, true)
	s.isDue("after it was applied", "m-2")
	same(s, "total", s.total("m-1"), 1)
}

func tryOfChanged(s *stage) {
	rows := s.park(0, s.failed("m-1", "ann"), s.failed("m-2", "ben"), s.failed("m-3", "cid"), s.failed("m-4", "dan"))
	late := s.park(time.Hour, s.failed("m-5", "eve"))[0]
	more := s.failed("m-2", "ben")
	more.Handlers = []string{s.name + "/late"}
	s.open(s.parking(0, more))
	s.skip(rows[2])
	s.runs("one", rows[3:4], true)
	fewer := rows[0]
	fewer.Attempts--
	never := rows[0]
	never.Seq += 1000
	before := s.dump()
	for what, p := range map[string]provider.Parked{
		"other attempts": fewer, "other handlers": rows[1], "skipped": rows[2], "applied": rows[3], "not due": late, "never parked": never,
	} {
		same(s, "tried, "+what, s.tries(p, -1, time.Hour), false)
		same(s, "tried at its limit, "+what, s.tries(p, 0, time.Hour), false)
		s.unchanged(before, "a try of "+what)
	}
	s.fails(rows[0], -1)
	before = s.dump()
	same(s, "tried, stuck", s.tries(rows[0], -1, time.Hour), false)
	s.unchanged(before, "a try of a stuck message")
}

func tryLimit(s *stage) {
	for attempts := 1; attempts <= 3; attempts++ {
		p := s.failed(fmt.Sprint("m-", attempts), fmt.Sprint("key ", attempts))
		p.Attempts = attempts
		row := s.park(0, p)[0]
		if tried := attempts < 2; s.tries(row, 2, time.Hour) != tried {
			s.Fatalf("after %d attempts of 2, tried is not %v", attempts, tried)
		}
	}
	rows := s.rows()
	s.states("after their tries", rows, provider.StateWaiting, provider.StateStuck, provider.StateStuck)
	same(s, "attempts", []int{rows[0].Attempts, rows[1].Attempts, rows[2].Attempts}, []int{2, 2, 3})
	s.advance(1000 * time.Hour)
	s.isDue("a long time later", "m-1")
	row := s.due()[0]
	for n := range 20 {
		same(s, "tried without a limit", s.tries(row, -1, 0), true)
		row = s.row(row.Seq)
		same(s, "attempts", row.Attempts, 3+n)
	}
	s.outcomes("afterwards", []string{"m-1", "m-2", "m-3"}, provider.OutcomeWaiting, provider.OutcomeStuck, provider.OutcomeStuck)
}

func triesAtOnce(s *stage) {
	const n = 20
	for _, again := range []time.Duration{time.Hour, 0} {
		row := s.park(0, s.failed(newID(), newID()))[0]
		tried, errs := make([]bool, n), make([]error, n)
		together(n, func(i int) { tried[i], errs[i] = s.db.Try(s.ctx, row, 5, again) })
		s.ok(errors.Join(errs...), "try at once")
		count := 0
		for _, t := range tried {
			if t {
				count++
			}
		}
		same(s, "tried, attempts", []int{count, s.row(row.Seq).Attempts}, []int{1, row.Attempts + 1})
	}
}

func failedTry(s *stage) {
	row := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"))[0]
	for attempts := 2; attempts <= 4; attempts++ {
		same(s, "tried", s.tries(row, 5, 10*time.Hour), true)
		row.Attempts++
		row.Code = fmt.Sprint("code ", attempts)
		s.fails(row, time.Hour)
		s.isDue("after it failed")
		s.advance(2 * time.Hour)
		s.isDue("later", "m-1")
		row = s.due()[0]
		same(s, "attempts, code", []any{row.Attempts, row.Code}, []any{attempts, fmt.Sprint("code ", attempts)})
	}
	s.fails(row, 0)
	s.isDue("at once", "m-1")
	s.fails(row, -1)
	s.states("after it is stuck", s.rows(), provider.StateStuck, provider.StateWaiting)
	s.advance(10_000 * time.Hour)
	s.isDue("after it is stuck")
}

func triesAfterDecision(s *stage) {
	row := s.park(-1, s.failed("m-1", "ann"))[0]
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 1)
	for n := range 3 {
		row = s.due()[0]
		same(s, "attempts", row.Attempts, n)
		same(s, "tried", s.tries(row, 3, 0), true)
	}
	same(s, "tried after the last attempt", s.tries(s.row(row.Seq), 3, 0), false)
	s.states("afterwards", []provider.Parked{row}, provider.StateStuck)
	same(s, "decision", s.row(row.Seq).Decision, ann)
}
