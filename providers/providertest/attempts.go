package providertest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var attemptCases = []testCase{
	{
		name: "a unit says what is done", play: doneWithUnit,
		rule: "Work.Done is attempts of Runner's that are no longer under way with this unit's commit; where nothing is committed, they stay",
	},
	{
		name: "a suspect is apart", play: apart,
		rule: "Apart keeps what may end this process apart from what else it does with the database: it is one lock for a database that was opened once",
	},
	{
		name: "a suspect alone", play: aloneCountsTheDead,
		rule: "BeginAlone: for each other runner that has named a and is dead, one attempt is counted, and the name taken back; attempts is the count after that",
	},
	{
		name: "a suspect that others may be at", play: aloneBesideTheLiving,
		rule: "BeginAlone: alive is how many other runners have named a and may live; a runner lives until lease from when it said so, on the store's clock; one that never said so is dead",
	},
	{
		name: "a suspect at its limit", play: aloneAtLimit,
		rule: "BeginAlone names a only where attempts+alive < limit; a negative limit is none",
	},
	{
		name: "a suspect that many begin at once", play: aloneAtOnce,
		rule: "BeginAlone counts a dead runner's attempt once, whoever asks, and names a only where attempts+alive < limit: also at the same moment",
	},
	{
		name: "a runner that ends", play: runnerEnds,
		rule: "Alive with a lease of zero: the runner has ended, and nothing is under way with it",
	},
	{
		name: "attempts are counted", play: attemptsCounted,
		rule: "CountAttempt counts one of a, and returns the count: of one message at one handler, or at none of one projector, also at the same moment",
	},
	{
		name: "an attempt that is counted has ended", play: countedEnds,
		rule: "CountAttempt, where runner is not empty, takes its name of a back: with its count, or never",
	},
	{
		name: "counts begin anew", play: countsForgotten,
		rule: "Work.Forget is attempts of which the count begins anew with this unit: with its commit, and never otherwise",
	},
	{
		name: "the journal outlives the process", unless: Volatile, play: journalOutlives,
		rule: "A Journal is what outlives a process about the attempts of runners: counts, names, and until when runners live",
	},
}

// alone ends the case if BeginAlone returns something else.
func (s *stage) alone(runner string, a projector.Attempt, limit, wantAttempts, wantAlive int) {
	s.Helper()
	attempts, alive, err := s.db.BeginAlone(s.ctx, runner, a, limit)
	s.ok(err, "begin alone")
	same(s, "attempts, alive", []int{attempts, alive}, []int{wantAttempts, wantAlive})
}

// The name of the runner that counts is gone, those of others and of other messages stay.
func countedEnds(s *stage) {
	a, b, other := posted("m-1", "ann"), posted("m-2", "ann"), posted("m-1", "ann")
	other.Handler = "ratings/other"
	s.alive("one", time.Hour)
	s.alive("two", time.Hour)
	same(s, "verdicts", s.begin("one", a, b, other), []projector.Verdict{projector.Clear, projector.Clear, projector.Clear})
	s.alone("two", a, math.MaxInt, 0, 1) // names it as well
	n, err := s.db.CountAttempt(s.ctx, "one", a, math.MaxInt)
	s.ok(err, "count an attempt")
	same(s, "count", n, 1)
	s.alone("three", a, 0, 1, 1) // that of two
	s.countToLimit()
	s.verdict("the other message", b, projector.Suspect)
	s.verdict("the other handler", other, projector.Suspect)
}

// countToLimit counts up to a limit: the attempt that would reach it keeps its name, and is counted as that of a dead runner.
func (s *stage) countToLimit() {
	s.Helper()
	a := posted("m-9", "dan")
	count := func(runner string, limit, want int) {
		s.Helper()
		s.alive("one", time.Hour)
		s.begin("one", a)
		n, err := s.db.CountAttempt(s.ctx, runner, a, limit)
		s.ok(err, "count an attempt")
		same(s, "count", n, want)
	}
	for range 2 {
		count("one", 1, 1)
		s.alone("four", a, 0, 0, 1)
	}
	count("one", 3, 1)
	s.alone("four", a, 0, 1, 0)
	count("one", 3, 2)
	for range 2 {
		count("one", 3, 3)
		s.alone("four", a, 0, 2, 1)
	}
	count("", 3, 3) // whoever has no name to keep
	s.alone("four", a, 0, 3, 1)
	count("one", 2, 4)
	count("one", -1, 4)
	s.alone("four", a, 0, 4, 0)
}

// countAttempt counts one of a, and ends the case if that is another count.
func (s *stage) countAttempt(a projector.Attempt, want int) {
	s.Helper()
	n, err := s.db.CountAttempt(s.ctx, "", a, -1)
	s.ok(err, "count an attempt")
	same(s, "count of "+a.Handler+" "+a.MessageID, n, want)
}

func (s *stage) alive(runner string, lease time.Duration) {
	s.Helper()
	s.ok(s.db.Alive(s.ctx, runner, lease), "say that a runner lives")
}

func doneWithUnit(s *stage) {
	a, b, c := posted("m-1", ""), posted("m-2", ""), posted("m-3", "")
	same(s, "verdicts", s.begin("one", a, b, c), slices.Repeat([]projector.Verdict{projector.Clear}, 3))
	w := work("m-1")
	w.Done, w.Runner = []projector.Attempt{a, b, posted("never", "")}, "one"
	failing := errors.New("failing")
	err := s.do(s.ctx, w, func(unit) ([]outbox.Message, error) { return nil, failing })
	s.holds(errors.Is(err, failing), "the error %v is apply's", err)
	s.rehearse(w, adds("k", 1))
	other := w
	other.Marks, other.Runner = work("m-9").Marks, "two"
	s.ok(s.do(s.ctx, other, nil), "a unit of another runner")
	for _, one := range []projector.Attempt{a, b, c} {
		s.verdict(one.MessageID+", which is under way", one, projector.Suspect)
	}
	s.ok(s.do(s.ctx, w, adds("k", 1)), "the unit")
	for _, one := range []projector.Attempt{a, b} {
		s.verdict(one.MessageID+", which is done", one, projector.Clear)
	}
	s.verdict("m-3, which is under way", c, projector.Suspect)
	same(s, "verdict when it comes again", s.begin("one", a)[0], projector.Clear)
	s.ok(s.do(s.ctx, w, adds("k", 1)), "the unit again, with nothing new")
	s.verdict("m-1, which is done again", a, projector.Clear)
	same(s, "total", s.total("k"), 1)
	park := projector.Work{Projector: "ratings", Park: []projector.Parked{poison("m-4", "ann")}, Done: []projector.Attempt{c}, Runner: "one"}
	s.ok(s.do(s.ctx, park, nil), "park")
	s.verdict("m-3, which is done where another is parked", c, projector.Clear)
	row := s.parked("", 0, 0)[0]
	r := replayOf(row)
	same(s, "verdict of a replay", s.begin("one", r.Attempt)[0], projector.Clear)
	replay := replays(row)
	replay.Done, replay.Runner = []projector.Attempt{r.Attempt}, "one"
	s.ok(s.do(s.ctx, replay, nil), "replay")
	s.verdict("m-4, which is replayed", posted("m-4", "ann"), projector.Clear)
}

func apart(s *stage) {
	one, again := s.db.Apart(), s.db.Apart()
	s.holds(one != nil && one == again, "it is one lock, whoever asks")
	s.holds(s.another().db.Apart() != one, "another database has another")
	one.RLock() // whoever attempts
	defer one.RUnlock()
	s.holds(one.TryRLock(), "attempts share it")
	one.RUnlock()
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "a unit beside it")
	s.verdict("a message beside it", posted("m-2", ""), projector.Clear)
}

func aloneCountsTheDead(s *stage) {
	a, bystander := posted("m-1", "ann"), posted("m-2", "ann")
	same(s, "verdicts", s.begin("one", a, bystander), []projector.Verdict{projector.Clear, projector.Clear}) // and it dies
	same(s, "verdict", s.begin("two", a)[0], projector.Suspect)
	s.alone("two", a, 5, 1, 0)
	s.alone("two", a, 5, 1, 0) // its own name is not another's
	same(s, "verdict of what was counted for a dead one", s.begin("two", a)[0], projector.Suspect)
	same(s, "verdict", s.begin("three", a)[0], projector.Suspect)
	s.alone("three", a, 5, 2, 0) // the second one died as well
	same(s, "verdict for who is dead", s.begin("two", a)[0], projector.Suspect)
	for i := range 3 { // who died at it at once
		s.alive(fmt.Sprint("late ", i), time.Hour)
		s.alone(fmt.Sprint("late ", i), a, -1, 3, i)
	}
	s.advance(2 * time.Hour)
	s.alone("four", a, -1, 6, 0)
	s.alone("four", bystander, 5, 1, 0)
	otherwise := a
	otherwise.Handler = "ratings/other"
	s.alone("four", otherwise, 5, 0, 0)
}

func aloneBesideTheLiving(s *stage) {
	a := posted("m-1", "ann")
	s.alive("one", time.Hour)
	same(s, "verdict", s.begin("one", a)[0], projector.Clear)
	s.verdict("what a living runner has named", a, projector.Suspect)
	s.alone("two", a, 5, 0, 1)
	s.advance(50 * time.Minute)
	s.alive("one", time.Hour) // once more, and from now
	s.advance(50 * time.Minute)
	s.alone("three", a, 5, 1, 1) // the second one never said that it lives
	s.alive("three", time.Minute)
	s.alone("four", a, 5, 1, 2)
	s.advance(5 * time.Minute)
	s.alone("five", a, 5, 3, 1) // the third and the fourth are dead
	s.advance(time.Hour)
	s.alive("five", time.Hour) // late, and alive
	s.alone("six", a, 5, 4, 1)
}

func aloneAtLimit(s *stage) {
	a, died := posted("m-1", "ann"), newID
	for want := range 3 {
		s.alone(died(), a, 3, want, 0)
	}
	same(s, "verdict while the last one is at it", s.begin("one", a)[0], projector.Suspect)
	s.alone("one", a, 3, 3, 0) // not named: none is
	s.alone("one", a, 3, 3, 0)
	s.verdict("what nobody is at, and was counted for dead ones", a, projector.Suspect)
	s.alone("one", a, -1, 3, 0)
	s.verdict("what one is at, without a limit", a, projector.Suspect)
	s.alone("two", a, 4, 4, 0)
	s.verdict("what nobody is at, at a limit of four", a, projector.Suspect)
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Forget: []projector.Attempt{a}}, nil), "forget")
	s.verdict("what was forgotten", a, projector.Clear)

	b := posted("m-2", "ann")
	for i := range 2 {
		s.alive(fmt.Sprint("alive ", i), time.Hour)
		s.alone(fmt.Sprint("alive ", i), b, 2, 0, i)
	}
	s.alone("one", b, 2, 0, 2)
	s.alone("one", b, 1, 0, 2)
	for i := range 2 {
		s.alive(fmt.Sprint("alive ", i), 0)
	}
	s.verdict("what was at its limit of the living", b, projector.Clear)
	s.alone("one", b, 0, 0, 0)
	s.verdict("what has no attempts at all", b, projector.Clear)
}

// aloneAtOnce: one runner has died of a message, and many others come for it.
func aloneAtOnce(s *stage) {
	const runners = 20
	for round := range 3 {
		a := posted(fmt.Sprint("m-", round), "ann")
		same(s, "verdict", s.begin("dead", a)[0], projector.Clear)
		named, errs := make([]bool, runners), make([]error, runners)
		for i := range runners {
			s.alive(fmt.Sprint(i), time.Hour)
		}
		together(runners, func(i int) {
			var attempts, alive int
			attempts, alive, errs[i] = s.db.BeginAlone(s.ctx, fmt.Sprint(i), a, 4)
			named[i] = errs[i] == nil && attempts+alive < 4
		})
		s.ok(errors.Join(errs...), "begin alone at once")
		n := 0
		for _, is := range named {
			if is {
				n++
			}
		}
		same(s, "runners that may try", n, 3) // the fourth had been the dead one
		s.alone("last", a, 4, 1, 3)
	}
}

func runnerEnds(s *stage) {
	a, b := posted("m-1", "ann"), posted("m-2", "ann")
	s.alive("one", time.Hour)
	s.begin("one", a, b)
	s.begin("two", posted("m-3", "ann"))
	s.alive("one", 0)
	same(s, "verdicts of what had been named", s.begin("three", a, b, posted("m-3", "ann")), []projector.Verdict{projector.Clear, projector.Clear, projector.Suspect})
	s.alone("four", a, 5, 1, 0) // the third one never said that it lives
	s.alive("nobody", 0)
	s.begin("one", posted("m-4", "ann")) // it has not said again that it lives
	s.alone("two", posted("m-4", "ann"), 5, 1, 0)
}

func attemptsCounted(s *stage) {
	a, b := posted("m-1", "ann"), posted("m-2", "ann")
	other := a
	other.Handler = "ratings/other"
	for want := 1; want <= 3; want++ {
		s.countAttempt(a, want)
	}
	s.countAttempt(b, 1)
	s.countAttempt(other, 1)
	for _, name := range []string{"ratings", "stars"} {
		none := projector.Attempt{Projector: name, MessageID: "m-1"}
		s.countAttempt(none, 1)
		s.verdict("one at no handler, of "+name, none, projector.Clear)
		same(s, "verdict for the one that names it", s.begin("of "+name, none), []projector.Verdict{projector.Clear})
	}
	s.alone("one", a, 9, 3, 0)
	counts, errs := make([]int, storm), make([]error, storm)
	together(storm, func(i int) { counts[i], errs[i] = s.db.CountAttempt(s.ctx, "", a, -1) })
	s.ok(errors.Join(errs...), "count at once")
	slices.Sort(counts)
	for i, n := range counts {
		same(s, "count of one of many at once", n, 3+i+1)
	}
	s.verdict("what was counted, and named once", a, projector.Suspect)
	s.verdict("what was counted only", b, projector.Clear)
}

func countsForgotten(s *stage) {
	a, b, other := posted("m-1", "ann"), posted("m-2", "ann"), posted("m-1", "ann")
	other.Handler = "ratings/other"
	for _, one := range []projector.Attempt{a, b, other} {
		s.countAttempt(one, 1)
	}
	w := work("m-1")
	w.Forget = []projector.Attempt{a, b, posted("never", "counted")}
	failing := errors.New("failing")
	err := s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) { return nil, failing })
	s.holds(errors.Is(err, failing), "the error %v is apply's", err)
	s.countAttempt(a, 2)
	s.ok(s.do(s.ctx, w, adds("k", 1)), "a unit that forgets")
	s.countAttempt(a, 1)
	s.countAttempt(b, 1)
	s.countAttempt(other, 2)
	s.ok(s.do(s.ctx, w, adds("k", 1)), "the unit again, with nothing new")
	s.countAttempt(a, 1)
	same(s, "total", s.total("k"), 1)
	s.countAttempt(a, 2)
	park := projector.Work{Projector: "ratings", Park: []projector.Parked{poison("m-1", "ann")}, Forget: []projector.Attempt{a}}
	s.ok(s.do(s.ctx, park, nil), "park")
	s.countAttempt(a, 1)
}

func journalOutlives(s *stage) {
	a, b := posted("m-1", "ann"), posted("m-2", "ann")
	s.countAttempt(a, 1)
	s.alive("one", time.Hour)
	s.begin("one", a, b)
	same(s, "verdict of what another has named", s.begin("dead", b)[0], projector.Suspect) // and does not name it
	s.setAside(poison("m-0", "ben"))
	again := s.reopen()
	again.countAttempt(a, 2)
	same(s, "verdicts through a new handle", again.begin("two", a, b, posted("m-3", "ben"), posted("m-0", "ben")),
		[]projector.Verdict{projector.Suspect, projector.Suspect, projector.Held, projector.Settled})
	again.alone("two", a, 9, 2, 1)
	again.advance(2 * time.Hour)
	again.alone("three", b, 9, 1, 0)
}
