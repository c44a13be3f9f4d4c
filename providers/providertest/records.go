package providertest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/provider"
)

var outcomeCases = []testCase{
	{
		name: "outcomes", play: outcomesOfAll,
		rule: "Outcomes answers each question in the live generation. If the message is parked for the handler, that counts and not its marker",
	},
	{
		name: "outcomes of several handlers", play: outcomesOfHandlers,
		rule: "A message that is parked for some handlers is applied at the others; one without handlers is parked for all",
	},
	{
		name: "many questions", play: manyQuestions,
		rule: "Outcomes answers many questions in one call, in order, and the same one twice",
	},
	{
		name: "a message before the low-water mark", play: prunedOutcomes,
		rule: "OutcomePruned: the message has no trace, and markers of its time may have been deleted, under any name of the handler",
	},
	{
		// Promise: G4.9
		name: "handlers that have markers", play: orphans,
		rule: "MarkedHandlers lists the handlers that have markers of any generation, in order. DropMarkers deletes at most limit markers of handler, and returns how many",
	},
}

func outcomesOfAll(s *stage) {
	same(s, "outcomes of no questions", len(s.answers()), 0)
	s.open(s.of("applied"), nothing)
	s.park(-1, s.failed("stuck", "ann"))
	s.park(0, s.behind("behind", "ann"), s.failed("waiting", "ben"), s.failed("skipped", "cid"), s.failed("replayed", "dan"), s.failed("deleted", "eve"))
	s.park(0, s.untyped("untyped", "fay"), s.untyped("skipped untyped", ""))
	rows := s.rows()
	s.skip(rows[3])
	s.skip(rows[7])
	s.decide(provider.ParkedFilter{Key: "dan"}, provider.StateWaiting, 1)
	s.runs("two", []provider.Parked{s.row(rows[4].Seq), rows[5]}, true, true)
	elsewhere := s.of("elsewhere")
	elsewhere.Projector, elsewhere.Messages[0].Handlers[0].Name = s.name+"x", s.name+"x/posted"
	s.open(elsewhere, nothing)
	want := map[string]provider.Outcome{
		"applied": provider.OutcomeApplied, "stuck": provider.OutcomeStuck, "behind": provider.OutcomeStuck, "waiting": provider.OutcomeWaiting,
		"skipped": provider.OutcomeSkipped, "replayed": provider.OutcomeApplied, "deleted": provider.OutcomeApplied, "untyped": provider.OutcomeWaiting,
		"skipped untyped": provider.OutcomeSkipped, "elsewhere": provider.OutcomeUnseen, "unseen": provider.OutcomeUnseen, "Applied": provider.OutcomeUnseen,
	}
	for id, outcome := range want {
		renamed, recorded := s.question(id), s.question(id)
		renamed.Handler, renamed.Was = s.name+"/given", []string{s.name + "/rated", s.name + "/posted"}
		recorded.RecordedAt = time.Unix(0, 0)
		same(s, "outcomes of "+id, s.answers(s.question(id), renamed, recorded), []provider.Outcome{outcome, outcome, outcome})
	}
}

func outcomesOfHandlers(s *stage) {
	u := s.of("m-1")
	u.Messages[0].Handlers = []provider.Handler{s.handler("posted"), s.handler("rated")}
	s.open(u, func(opened) (provider.Closing, error) { // parked for one handler
		p := s.failed("m-1", "")
		p.Handlers = []string{s.name + "/rated"}
		return provider.Closing{Park: []provider.Aside{{Parked: p}}}, nil
	})
	s.park(0, s.untyped("m-2", ""))
	at := func(id, handler string) provider.Question {
		q := s.question(id)
		q.Handler = s.name + "/" + handler
		return q
	}
	same(s, "outcomes", s.answers(at("m-1", "posted"), at("m-1", "rated"), at("m-1", "other"), at("m-2", "posted"), at("m-2", "other")), []provider.Outcome{
		provider.OutcomeApplied, provider.OutcomeWaiting, provider.OutcomeUnseen, provider.OutcomeWaiting, provider.OutcomeWaiting,
	})
	same(s, "outcome at another projector", s.answers(provider.Question{Handler: s.name + "x/posted", MessageID: "m-2"}),
		[]provider.Outcome{provider.OutcomeUnseen})
	for _, n := range []int{300_000, 10_000, 0, -5000} { // of a message of other software
		q := s.question("m-3")
		q.RecordedAt = year(n)
		same(s, fmt.Sprintf("outcome of a message of the year %d", n), s.answers(q), []provider.Outcome{provider.OutcomeUnseen})
	}
}

func manyQuestions(s *stage) {
	const n = 500
	var ids []string
	var want []provider.Outcome
	u := s.unit()
	for i := range n {
		id := newID()
		if ids = append(ids, id); i%2 == 0 {
			u.Messages = append(u.Messages, s.message(id, ""))
			want = append(want, provider.OutcomeApplied)
		} else {
			want = append(want, provider.OutcomeUnseen)
		}
	}
	s.open(u, nothing)
	ids, want = append(ids, ids[:3]...), append(want, want[:3]...)
	s.outcomes("of many", ids, want...)
}

func prunedOutcomes(s *stage) {
	began := s.now()
	s.open(s.of("m-1"), nothing)
	s.advance(2 * time.Hour)
	s.open(s.of("m-2"), nothing)
	ask := func(recordedAt time.Time, was ...string) provider.Outcome {
		q := s.question("m-9")
		if q.RecordedAt = recordedAt; len(was) > 0 {
			q.Handler, q.Was = s.name+"/given", was
		}
		return s.answers(q)[0]
	}
	same(s, "before any prune", ask(time.Unix(0, 0)), provider.OutcomeUnseen)
	s.pruned([]string{"posted"}, time.Hour, 10, 1)
	now := s.now()
	for _, c := range []struct {
		at   time.Time
		want provider.Outcome
	}{
		{now.Add(-24 * time.Hour), provider.OutcomePruned}, {now.Add(-time.Minute), provider.OutcomeUnseen}, {now.Add(time.Hour), provider.OutcomeUnseen},
		{time.Time{}, provider.OutcomeUnseen},
	} {
		same(s, fmt.Sprintf("recorded at %v, now %v, began %v", c.at, now, began), ask(c.at), c.want)
		same(s, "under an earlier name", ask(c.at, s.name+"/rated", s.name+"/posted"), c.want)
		same(s, "under other names", ask(c.at, s.name+"/rated"), provider.OutcomeUnseen)
	}
	old := s.question("m-1")
	old.RecordedAt = now.Add(-24 * time.Hour)
	young := s.question("m-2")
	young.RecordedAt = old.RecordedAt
	same(s, "of a message whose marker was deleted, and one whose was not", s.answers(old, young), []provider.Outcome{provider.OutcomePruned, provider.OutcomeApplied})
}

// now returns the store's time.
func (s *stage) now() time.Time {
	s.Helper()
	h, err := s.db.Beat(s.ctx, "reads the time", 0, 1000*day)
	s.ok(err, "beat")
	return h.Now
}

func orphans(s *stage) {
	mark := func(handler string, generation, n int) {
		u := s.in(generation).unit()
		for i := range n {
			m := s.message(fmt.Sprint("m-", i), "")
			m.Handlers[0].Name = handler
			u.Messages = append(u.Messages, m)
		}
		s.open(u, nothing)
	}
	of := func(handlers []string) []string {
		return slices.DeleteFunc(handlers, func(h string) bool { return len(h) < len(s.name)+2 || h[:len(s.name)+1] != s.name+"/" })
	}
	list := func(want ...string) {
		handlers, err := s.db.MarkedHandlers(s.ctx)
		s.ok(err, "list handlers")
		s.require(slices.IsSorted(handlers), "the handlers %q are in order", handlers)
		same(s, "handlers with markers", of(handlers), want)
	}
	a, ab, b := s.name+"/a", s.name+"/ab", s.name+"/b"
	mark(b, 1, 3)
	mark(b, 2, 2)
	mark(a, 2, 2)
	mark(ab, 3, 1)
	list(a, ab, b)
	orphaned, err := marker.Orphans(s.ctx, s.db, a, "r/c")
	s.ok(err, "orphans")
	same(s, "orphans", of(orphaned), []string{ab, b})
	for _, want := range []int{2, 2, 1, 0} {
		n, err := s.db.DropMarkers(s.ctx, b, 2)
		s.ok(err, "drop markers")
		same(s, "markers dropped", n, want)
	}
	n, err := marker.Drop(s.ctx, s.db, a)
	s.ok(err, "drop")
	same(s, "markers dropped", n, 2)
	list(ab)
}

var pruneCases = []testCase{
	{
		name: "old markers", play: oldMarkers,
		rule: "Prune deletes at most limit markers of each of handlers that are older than window on the store's clock, the oldest first, and returns how many it deleted; zero means that none is left",
	},
	{
		name: "markers of any generation", play: oldGenerations,
		rule: "Prune deletes markers of any generation",
	},
	{
		name: "old messages", play: oldMessages,
		rule: "Prune deletes at most limit replayed or skipped messages of projector that are older than window, the oldest first, and never a waiting or stuck one",
	},
	{
		name: "the low-water mark", play: lowWaterRises,
		rule: "In the same transaction Prune records the time up to which markers of a handler may be missing",
	},
	{
		// Promise: G6.15
		name: "a redelivery after a prune", play: redeliveredAfterPrune,
		rule: "A message that comes again within the window finds its marker, under each name of its handler",
	},
	{
		name: "many prune at once", play: prunedAtOnce,
		rule: "Prune may run concurrently: each marker is deleted once, and no young one is",
	},
	{
		name: "a parked message after a prune", play: parkedAfterPrune,
		rule: "A parked message is applied once, at any age: no marker decides about it",
	},
}

// pruned prunes handlers of the projector, and fails the case unless so many rows are deleted.
func (s *stage) pruned(handlers []string, window time.Duration, limit, want int) {
	s.Helper()
	full := make([]string, len(handlers))
	for i, h := range handlers {
		full[i] = s.name + "/" + h
	}
	n, err := s.db.Prune(s.ctx, s.name, full, window, limit)
	s.ok(err, "prune")
	same(s, "deleted", n, want)
}

// markedHourly marks m-0, m-1 and so on at two handlers, each an hour after the one before, the
// last one now.
func (s *stage) markedHourly(n int) (ids []string) {
	s.Helper()
	for i := range n {
		if i > 0 {
			s.advance(time.Hour)
		}
		u := s.of(fmt.Sprint("m-", i))
		u.Messages[0].Handlers = append(u.Messages[0].Handlers, s.handler("postedlater"))
		s.open(u, nothing)
		ids = append(ids, u.Messages[0].ID)
	}
	return ids
}

// marked fails the case unless the last of ids, so many, have markers at the handler, and the
// others have none.
func (s *stage) marked(ids []string, handler string, last int) {
	s.Helper()
	for i, id := range ids {
		q, want := s.question(id), provider.OutcomeUnseen
		if q.Handler = s.name + "/" + handler; i >= len(ids)-last {
			want = provider.OutcomeApplied
		}
		same(s, "outcome of "+id, s.answers(q)[0], want)
	}
}

func oldMarkers(s *stage) {
	posted := []string{"posted"}
	s.pruned(posted, time.Hour, 10, 0)
	ids := s.markedHourly(8)
	s.pruned(posted, 24*time.Hour, 10, 0)
	s.pruned(posted, math.MaxInt64, 10, 0)
	s.pruned([]string{"poste", "posted%", ""}, time.Hour, 10, 0)
	s.pruned(nil, time.Hour, 10, 0)
	s.marked(ids, "posted", 8)
	// three are younger
	const window = 150 * time.Minute
	s.pruned(posted, window, 1, 1)
	s.marked(ids, "posted", 7)
	s.pruned(posted, window, 3, 3)
	s.marked(ids, "posted", 4)
	s.pruned(posted, window, 3, 1)
	s.pruned(posted, window, 3, 0)
	s.marked(ids, "posted", 3)
	s.advance(time.Hour)
	s.pruned(posted, window, 3, 1)
	s.marked(ids, "posted", 2)
	s.marked(ids, "postedlater", 8)
	s.advance(10_000 * time.Hour)
	s.pruned([]string{"postedlater", "other", "posted"}, window, 3, 3+2)
	s.marked(ids, "posted", 0)
	s.marked(ids, "postedlater", 5)
}

func oldGenerations(s *stage) {
	s.open(s.of("m-1"), nothing)
	s.generation = 2
	s.open(s.of("m-1", "m-2"), nothing)
	s.advance(2 * time.Hour)
	s.pruned([]string{"posted"}, time.Hour, 10, 3)
	s.generation = 1
	same(s, "fresh", s.open(s.of("m-1"), nothing).Fresh, [][]bool{{true}})
}

func oldMessages(s *stage) {
	var ps []provider.Parked
	for i := range 7 {
		ps = append(ps, s.untyped(fmt.Sprint("m-", i), fmt.Sprint("key ", i)))
	}
	rows := s.park(0, ps...)
	s.park(-1, s.untyped("stuck", "ann"))
	for i, p := range rows[:6] { // resolved in this order, half of them replayed
		if i%2 == 0 {
			s.skip(p)
		} else {
			s.decide(provider.ParkedFilter{Seqs: []int64{p.Seq}}, provider.StateWaiting, 1)
			s.runs("it", []provider.Parked{s.row(p.Seq)}, true)
		}
		s.advance(time.Hour)
	}
	n, err := s.db.Prune(s.ctx, s.name+"x", nil, time.Minute, 100)
	s.ok(err, "prune another projector")
	same(s, "deleted of another projector", n, 0)
	s.pruned(nil, 10*time.Hour, 100, 0)
	s.pruned(nil, 210*time.Minute, 2, 2)
	left := func() []string {
		return idsOfParked(s.list(provider.ParkedFilter{Projector: s.name, States: allStates}))
	}
	same(s, "left", left(), []string{"m-2", "m-3", "m-4", "m-5", "m-6", "stuck"})
	s.pruned(nil, 210*time.Minute, 2, 1)
	s.pruned(nil, 210*time.Minute, 2, 0)
	s.advance(10_000 * time.Hour)
	s.pruned([]string{"posted"}, time.Hour, 10, 3)
	same(s, "left", left(), []string{"m-6", "stuck"})
	same(s, "held by the messages left", s.open(s.unit(s.message(newID(), "key 0"), s.message(newID(), "key 6")), nothing).Held, []bool{false, true})
	same(s, "a skipped message that was deleted is parked again", len(s.park(0, s.untyped("m-0", "key 0"))), 1)
	s.require(s.rows()[2].Seq > rows[6].Seq, "the next Seq is greater than all before")
}

func lowWaterRises(s *stage) {
	s.markedHourly(3)
	outcome := func(ago time.Duration) provider.Outcome {
		q := s.question("unseen")
		q.RecordedAt = s.now().Add(-ago)
		return s.answers(q)[0]
	}
	s.pruned([]string{"posted"}, 24*time.Hour, 10, 0)
	same(s, "after nothing was pruned", outcome(100*time.Hour), provider.OutcomeUnseen)
	n, err := s.db.DropMarkers(s.ctx, s.name+"/postedlater", 1)
	s.ok(err, "drop a marker")
	same(s, "markers dropped", n, 1)
	for _, c := range []struct {
		deleted       int
		pruned, above time.Duration // how long ago
	}{{1, 130 * time.Minute, 110 * time.Minute}, {1, 70 * time.Minute, 50 * time.Minute}, {0, 70 * time.Minute, 50 * time.Minute}} {
		s.pruned([]string{"posted"}, 30*time.Minute, 1, c.deleted)
		same(s, "before the low-water mark", outcome(c.pruned), provider.OutcomePruned)
		same(s, "after the low-water mark", outcome(c.above), provider.OutcomeUnseen)
	}
	q := s.question("unseen")
	q.Handler, q.RecordedAt = s.name+"/postedlater", time.Unix(0, 0)
	same(s, "at another handler, whose markers were dropped", s.answers(q)[0], provider.OutcomeUnseen)
	if s.reopen != nil {
		later := s.reopen()
		q = s.question("unseen")
		q.RecordedAt = s.now().Add(-70 * time.Minute)
		same(s, "through a new handle", later.answers(q)[0], provider.OutcomePruned)
	}
}

func redeliveredAfterPrune(s *stage) {
	const window = 8 * day
	renamed := s.of("m-1")
	renamed.Messages[0].Handlers = []provider.Handler{s.handler("given", s.name+"/posted")}
	s.open(s.of("m-0"), effects)
	s.advance(2 * time.Hour)
	s.open(renamed, effects)
	s.advance(window - time.Hour)
	s.pruned([]string{"posted", "given"}, window, 10, 1)
	same(s, "fresh within the window", s.open(renamed, effects).Fresh, [][]bool{{false}})
	same(s, "fresh within the window", s.open(s.of("m-1"), effects).Fresh, [][]bool{{false}})
	same(s, "fresh after the window", s.open(s.of("m-0"), effects).Fresh, [][]bool{{true}})
	s.outcomes("applied again", []string{"m-0"}, provider.OutcomeApplied)
}

func prunedAtOnce(s *stage) {
	const n, workers = 1000, 4
	for range 2 {
		u := s.unit()
		for range n / 2 {
			u.Messages = append(u.Messages, s.message(newID(), ""))
		}
		s.open(u, nothing)
	}
	s.advance(2 * time.Hour)
	s.open(s.of("young"), nothing)
	deleted, errs := make([]int, workers), make([]error, workers)
	together(workers, func(i int) {
		for last := 1; last > 0 && errs[i] == nil; deleted[i] += last {
			last, errs[i] = s.db.Prune(s.ctx, s.name, []string{s.name + "/posted"}, time.Hour, 100)
		}
	})
	s.ok(errors.Join(errs...), "prune at once")
	s.pruned([]string{"posted"}, time.Hour, 100, 0)
	same(s, "deleted", deleted[0]+deleted[1]+deleted[2]+deleted[3], n)
	s.outcomes("of a young marker", []string{"young"}, provider.OutcomeApplied)
}

func parkedAfterPrune(s *stage) {
	row := s.park(0, s.failed("m-1", "ann"))[0]
	s.advance(100 * day)
	s.pruned([]string{"posted"}, day, 10, 1)
	s.outcomes("without its marker", []string{"m-1"}, provider.OutcomeWaiting)
	s.runs("without its marker", []provider.Parked{row}, true)
	s.runs("again", []provider.Parked{row}, false)
	same(s, "total", s.total("m-1"), 1)
}
