package providertest

import (
	"fmt"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var needsCases = []testCase{
	{
		name: "a message that needs something", play: needsWaits,
		rule: "A message of ClassUnable has no due time and is not stuck: its lane is due for who has its need, with the messages behind it; other lanes go on",
	},
	{
		name: "what is needed", play: needsListed,
		rule: "Needs lists each need of a build once, in order, with the time when its first message was parked",
	},
	{
		name: "a need of one build", play: needsOfBuilds,
		rule: "A need counts for its build",
	},
	{
		name: "a message that fails after it had what it needs", play: needsThenFails,
		rule: "What fails gets another class, and one that is ClassUnable again another need",
	},
	{
		name: "a person's decision", play: needsDecided,
		rule: "A replay leaves a message of ClassUnable to who has its need; a skipped one makes the next due",
	},
	{
		name: "a need behind another message", play: needsBehind,
		rule: "A need counts once its message is the first of its lane: until then it takes no place of Due",
	},
	{
		name: "what is parked behind a message in another lane", play: needsElsewhere,
		rule: "A message that is parked already keeps its lane. What is parked behind it in another one does not wait for it",
	},
	{
		name: "lanes and needs", play: needsInLanes,
		rule: "Due returns only messages of f.Lanes, also those whose needs the program has",
	},
	{
		name: "the class decides", play: needsOfClass,
		rule: "A message of another class with Needs, or of ClassUnable without, is due or stuck as others are: it does not wait for good",
	},
	{
		name: "any bytes as a need", play: needsOfAnyBytes,
		rule: "Needs returns needs byte for byte, and Due finds them",
	},
}

// unable returns a message that is parked because the program lacks something.
func (s *stage) unable(id, key, needs string) provider.Parked {
	p := s.untyped(id, key)
	p.Class, p.Needs, p.Attempts = provider.ClassUnable, needs, 0
	return p
}

// able returns what is due for a program that has these needs.
func (s *stage) able(needs ...string) []provider.Parked {
	s.Helper()
	f := provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: 100, Each: 10}
	for _, n := range needs {
		f.Needs = append(f.Needs, provider.Need{Build: s.build(), Needs: n})
	}
	due, err := s.db.Due(s.ctx, f)
	s.ok(err, "list due messages")
	return due
}

func (s *stage) needs(builds ...provider.Build) (names []string) {
	s.Helper()
	var after []provider.Need
	for _, b := range builds {
		after = append(after, provider.Need{Build: b})
	}
	all, err := s.db.Needs(s.ctx, after)
	s.ok(err, "list needs")
	for _, n := range all {
		s.require(!n.Since.IsZero(), "the need %s has a time", n.Needs)
		names = append(names, n.String()+": "+n.Needs)
	}
	return names
}

func needsWaits(s *stage) {
	s.park(0, s.unable("a1", "a", "event b 2"), s.behind("a2", "a"), s.behind("a3", "a"))
	s.park(0, s.failed("b1", "b"))
	s.advance(time.Hour)
	s.isDue("without what it needs", "b1")
	same(s, "due for another need", idsOfParked(s.able("event b 1")), []string{"b1"})
	for _, p := range s.rows() {
		s.require(p.Key == "b" || p.DueAt.IsZero(), "%s has no due time, not %v", p.MessageID, p.DueAt)
		s.require((p.Needs != "") == (p.MessageID == "a1"), "what %s needs: %q", p.MessageID, p.Needs)
	}
	s.outcomes("of a lane that needs something", []string{"a1", "a2"}, provider.OutcomeWaiting, provider.OutcomeWaiting)
	if o := provider.OperationsOf(s.store); o != nil {
		all, err := o.Survey(s.ctx, 1000)
		s.ok(err, "survey")
		for _, b := range all.Builds {
			s.require(b.Build != s.build() || b.Lanes.N == 2 && b.StuckLanes.N == 0, "two lanes are held, and none is stuck: %+v", b)
		}
	}
	rows := s.able("event b 2")
	same(s, "due with what it needs", idsOfParked(rows), []string{"a1", "a2", "a3", "b1"})
	s.runs("two of the lane", rows[:2], true, true)
	s.isDueInOrder("after them", "b1", "a3")
	same(s, "needs", s.needs(s.build()), nil)
	s.park(0, s.behind("a4", "a"))
	s.runs("again", rows[:1], false)
}

func needsElsewhere(s *stage) {
	s.park(0, s.unable("a1", "x", "event b 2"))
	s.open(s.parking(0, s.unable("a1", "a", "event b 2"), s.behind("a2", "a")))
	same(s, "messages parked", len(s.rows()), 2)
	s.isDue("in the other lane", "a2")
	same(s, "due with what it needs", len(s.able("event b 2")), 2)
}

func needsListed(s *stage) {
	for i := range 6 {
		s.park(0, s.unable(fmt.Sprint("m-", i), fmt.Sprint("key ", i), fmt.Sprint("event ", 3-i%3)))
		s.advance(time.Minute)
	}
	s.park(0, s.failed("n", ""))
	all, err := s.db.Needs(s.ctx, []provider.Need{{Build: s.build()}})
	s.ok(err, "list needs")
	same(s, "needs", len(all), 3)
	for i, n := range all {
		same(s, "need", n.Needs, fmt.Sprint("event ", i+1))
		same(s, "since", n.Since, s.list(provider.ParkedFilter{Key: fmt.Sprint("key ", 2-i)})[0].At)
	}
	same(s, "needs of no build", s.needs(), nil)
	for i := range all {
		rest, err := s.db.Needs(s.ctx, all[i:i+1])
		s.ok(err, "list the needs after one")
		same(s, "needs after one", len(rest), len(all)-i-1)
		same(s, "need", i == 2 || rest[0].Needs == all[i+1].Needs, true)
	}
}

func needsOfBuilds(s *stage) {
	other := provider.Build{Projector: s.name + "x", Generation: 1}
	s.park(0, s.unable("m-1", "a", "event b 2"))
	p := s.unable("m-2", "a", "event b 2")
	p.Projector = other.Projector
	u, run := s.parking(0, p)
	u.Projector, u.Generation = other.Projector, other.Generation
	s.open(u, run)
	builds := []provider.Build{s.build(), other}
	same(s, "needs", s.needs(builds...), []string{s.build().String() + ": event b 2", other.String() + ": event b 2"})
	due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: builds, Keys: 10, Each: 10, Needs: []provider.Need{{Build: other, Needs: "event b 2"}}})
	s.ok(err, "list due messages")
	same(s, "due", idsOfParked(due), []string{"m-2"})
}

func needsThenFails(s *stage) {
	p := s.park(0, s.unable("m-1", "a", "event b 2"), s.behind("m-2", "a"))[0]
	again := p
	again.Needs = "handler x of b"
	s.fails(again, 0)
	same(s, "needs", s.needs(s.build()), []string{s.build().String() + ": handler x of b"})
	s.isDue("it lacks something else")
	row := s.able("handler x of b")[0]
	again = row
	again.Class, again.Needs, again.Code, again.Attempts = provider.ClassUnknown, "", "panic", 1
	s.open(s.parkedUnit(row), func(opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Parked: again, After: time.Hour}}}, nil
	})
	same(s, "needs after another failure", s.needs(s.build()), nil)
	s.isDue("before its time")
	s.advance(2 * time.Hour)
	s.isDue("an hour later", "m-1")
	same(s, "class", s.row(p.Seq).Class, provider.ClassUnknown)
	s.fails(s.row(p.Seq), -1)
	s.isDue("it is stuck")
}

func needsDecided(s *stage) {
	rows := s.park(0, s.unable("m-1", "a", "event b 2"), s.behind("m-2", "a"))
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateWaiting, 1)
	s.isDue("after a replay")
	same(s, "due with what it needs", idsOfParked(s.able("event b 2")), []string{"m-1", "m-2"})
	s.decide(provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateSkipped, 1)
	s.isDue("after it was skipped", "m-2")
	same(s, "needs", s.needs(s.build()), nil)
}

func needsBehind(s *stage) {
	s.park(-1, s.failed("a1", "a"))
	s.park(0, s.unable("a2", "a", "event b 2"))
	s.park(time.Hour, s.failed("b1", "b"), s.unable("b2", "b", "event b 2"))
	s.park(0, s.unable("c1", "c", "event b 2"))
	has := []provider.Need{{Build: s.build(), Needs: "event b 2"}}
	due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Needs: has, Keys: 1, Each: 10})
	s.ok(err, "list due messages")
	same(s, "due in one lane", idsOfParked(due), []string{"c1"})
	s.decide(provider.ParkedFilter{Key: "a", Code: "panic"}, provider.StateSkipped, 1)
	s.advance(2 * time.Hour)
	s.isDue("without what they need", "b1")
	due = s.able("event b 2")
	same(s, "due with what they need", len(due), 3)
	s.runs("the first of its lane", due[2:], true)
	s.isDue("after it")
	same(s, "due then", len(s.able("event b 2")), 3)
}

func needsInLanes(s *stage) {
	s.park(0, s.unable("a1", "a", "event b 2"), s.behind("a2", "a"))
	s.park(0, s.unable("b1", "b", "event b 2"))
	s.park(0, s.unable("c1", "c", "event b 3"))
	s.park(0, s.failed("d1", "d"))
	f := provider.DueFilter{Builds: []provider.Build{s.build()}, Needs: []provider.Need{{Build: s.build(), Needs: "event b 2"}}, Keys: 10, Each: 10}
	for _, key := range []string{"a", "c", "d"} {
		f.Lanes = append(f.Lanes, provider.LaneOfKey(key))
	}
	due, err := s.db.Due(s.ctx, f)
	s.ok(err, "list due messages")
	same(s, "due", idsOfParked(due), []string{"a1", "a2", "d1"})
}

func needsOfClass(s *stage) {
	p := s.park(0, s.unable("m-1", "a", "event b 2"))[0]
	p.Class = provider.ClassPermanent
	s.fails(p, time.Hour)
	same(s, "due with the need of another class", len(s.able("event b 2")), 0)
	s.advance(2 * time.Hour)
	s.isDue("an hour later", "m-1")
	s.fails(s.row(p.Seq), -1)
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 1)
	s.isDue("after a replay", "m-1")
	p = s.row(p.Seq)
	p.Class = provider.ClassUnable
	s.fails(p, -1)
	same(s, "due if it is stuck", len(s.able("event b 2")), 0)
	s.states("stuck", []provider.Parked{p}, provider.StateStuck)
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 1)
	s.isDue("without what it needs")
	p.Needs = ""
	s.fails(p, 0)
	s.isDue("if it needs nothing", "m-1")
}

func needsOfAnyBytes(s *stage) {
	for i, needs := range []string{"event \x00 2", "event \xff 2", "event \uFFFDx 2", "event b 2\n\x1b[31m"} {
		id := fmt.Sprint("m-", i)
		p := s.park(0, s.unable(id, id, needs))[0]
		same(s, "what it needs", p.Needs, needs)
		same(s, "needs", s.needs(s.build()), []string{s.build().String() + ": " + needs})
		same(s, "due", idsOfParked(s.able(needs)), []string{id})
		s.runs("with what it needs", []provider.Parked{p}, true)
	}
}
