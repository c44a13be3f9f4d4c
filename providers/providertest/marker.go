package providertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var markerCases = []testCase{
	{
		name: "a redelivered message", play: redelivered,
		rule: "apply does not run when w.Marks is not empty and none of them is new; Do then returns nil",
	},
	{
		name: "many deliveries at once", play: deliveriesAtOnce,
		rule: "A concurrent unit that holds the same mark is waited for: where it commits, the mark is not new; the loser has no effect and no error",
	},
	{
		name: "many deliveries at once, the first ones failing", play: firstOnesFail,
		rule: "A concurrent unit that holds the same mark is waited for: where it rolls back, the mark is new",
	},
	{
		name: "distinct messages at once", play: distinctAtOnce,
		rule: "A marker is of one message: every other message takes effect, also at the same moment and on the same total",
	},
	{
		name: "handlers mark for themselves", play: handlersMarkThemselves,
		rule: "A marker is unique on handler and message id: two handlers of one message each apply it once",
	},
	{
		name: "an earlier name of a handler", play: earlierNames,
		rule: "Key.Was: earlier names of the handler: a marker under one of them counts",
	},
	{
		name: "several marks in one unit", play: severalMarks,
		rule: "apply gets the indexes into w.Marks whose message is new to its handler, in order",
	},
	{
		name: "many marks in one unit", play: manyMarks,
		rule: "A unit may record many marks; apply gets the indexes of the new ones, in order",
	},
	{
		name: "crossing units", play: crossingUnits,
		rule: "Concurrent units that share marks, in whatever order, wait for each other; none fails, and each message takes effect once",
	},
	{
		name: "odd message ids", play: oddMessageIDs,
		rule: "A message id is text of any kind, not only a UUID, and no two ids are one",
	},
	{
		name: "a wait that its context ends", unless: Deferred, play: waitEnds,
		rule: "A unit that waits for another ends with its context, says nothing against the message, and records nothing",
	},
	{
		name: "units in apply at once", only: Deferred, play: inApplyAtOnce,
		rule: "Of two units with the same mark that are both in apply, one takes effect",
	},
	{
		name: "outcomes", play: outcomesTold,
		rule: "Outcomes says for each key what became of its message at its handler: Unseen, Applied, or IsParked where it is parked and its marker is not there",
	},
	{
		name: "markers of handlers that are gone", play: orphans,
		rule: "MarkedHandlers lists the handlers that have markers, in order; DropMarkers deletes at most limit markers of handler, and returns how many",
	},
	{
		name: "what is new is told", play: freshTold,
		rule: "Work.Fresh is told once all is committed, or where nothing was new, how many marks were new",
	},
	{
		name: "a new handle knows the markers", unless: Volatile, play: newHandleKnows,
		rule: "A marker commits with the handler's writes and outlives the process: a redelivery after a crash finds it",
	},
	{
		name: "another store knows no marker", only: Volatile, play: anotherStoreKnowsNone,
		rule: "A volatile provider's markers hold for its own life: another store applies the message anew",
	},
}

func redelivered(s *stage) {
	ran := 0
	for i := range 5 {
		s.ok(s.do(s.ctx, work("m-1"), func(u unit) ([]outbox.Message, error) {
			ran++
			same(s, "fresh", u.fresh, []int{0})
			return nil, u.add("k", 7)
		}), fmt.Sprintf("delivery %d", i+1))
		same(s, "total", s.total("k"), 7)
	}
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.Applied)
	s.holds(ran > 0, "apply ran")
}

func orphans(s *stage) {
	list := func(want ...string) {
		names, err := s.db.MarkedHandlers(s.ctx)
		s.ok(err, "list handlers")
		s.holds(slices.Equal(names, want), "handlers with markers: got %q, want %q", names, want)
	}
	list()
	mark := func(handler string, n int) {
		w := projector.Work{Projector: "p"}
		for i := range n {
			w.Marks = append(w.Marks, marker.Key{Handler: handler, MessageID: fmt.Sprint("m", i)})
		}
		s.ok(s.do(s.ctx, w, func(unit) ([]outbox.Message, error) { return nil, nil }), "mark")
	}
	mark("p/b", 3)
	mark("p/a", 2)
	mark("p/ab", 1)
	mark("q/a", 5)
	list("p/a", "p/ab", "p/b", "q/a")
	orphaned, err := marker.Orphans(s.ctx, s.db, "p/a", "p/b", "r/c")
	s.ok(err, "orphans")
	s.holds(slices.Equal(orphaned, []string{"p/ab", "q/a"}), "orphans: %q", orphaned)
	for _, want := range []int{2, 2, 1, 0} {
		n, err := s.db.DropMarkers(s.ctx, "q/a", 2)
		s.ok(err, "drop markers")
		same(s, "markers dropped", n, want)
	}
	n, err := marker.Drop(s.ctx, s.db, "p/a")
	s.ok(err, "drop")
	same(s, "markers dropped", n, 2)
	list("p/ab", "p/b")
	ab, b := marker.Key{Handler: "p/ab", MessageID: "m0"}, marker.Key{Handler: "p/b", MessageID: "m2"}
	same(s, "outcomes of what is left, and what is not", s.outcomes(ab, b, marker.Key{Handler: "p/a", MessageID: "m0"}),
		[]projector.Outcome{projector.Applied, projector.Applied, projector.Unseen})
}

func freshTold(s *stage) {
	told := []int{}
	deliver := func(fail bool, ids ...string) error {
		w := work(ids...)
		w.Fresh = func(n int) { told = append(told, n) }
		return s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
			if fail {
				return nil, errors.New("no")
			}
			return nil, u.add("k", 1)
		})
	}
	s.holds(deliver(true, "m-1") != nil, "a handler's error is returned")
	s.ok(deliver(false, "m-1"), "first delivery")
	s.ok(deliver(false, "m-1"), "second delivery")
	s.ok(deliver(false, "m-1", "m-2", "m-3"), "one of three again")
	s.ok(deliver(false), "a unit without marks")
	same(s, "told", told, []int{1, 0, 2, 0})
}

// fresh runs a unit and returns the indexes that apply got when it took effect: its last run's.
func (s *stage) fresh(w projector.Work, apply func(unit) error) (last []int) {
	s.Helper()
	s.ok(s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
		last = u.fresh
		if apply == nil {
			return nil, nil
		}
		return nil, apply(u)
	}), "a unit")
	return last
}

const storm = 50

// deliver delivers messages at once, one a unit, and ends the case on an error of any of them.
func (s *stage) deliver(units []projector.Work, apply func(i int) func(unit) ([]outbox.Message, error)) {
	s.Helper()
	errs := make([]error, len(units))
	together(len(units), func(i int) { errs[i] = s.do(s.ctx, units[i], apply(i)) })
	s.ok(errors.Join(errs...), "deliver at once")
}

func deliveriesAtOnce(s *stage) {
	for round := range 3 {
		id, k := fmt.Sprint("m-", round), fmt.Sprint("k-", round)
		s.deliver(slices.Repeat([]projector.Work{work(id)}, storm), func(int) func(unit) ([]outbox.Message, error) {
			return func(u unit) ([]outbox.Message, error) {
				return []outbox.Message{{ID: "from " + id, Topic: "mail"}}, u.add(k, 3)
			}
		})
		same(s, "total after many deliveries", s.total(k), 3)
		same(s, "entries", len(s.entries(outbox.Filter{})), round+1)
	}
}

func firstOnesFail(s *stage) {
	refusals := make(chan error, 10)
	cause := errors.New("cause")
	for range cap(refusals) {
		refusals <- cause
	}
	errs := make([]error, storm)
	together(storm, func(i int) {
		errs[i] = s.do(s.ctx, work("m-1"), func(u unit) ([]outbox.Message, error) {
			if err := u.add("k", 3); err != nil {
				return nil, err
			}
			select {
			case err := <-refusals:
				return nil, err
			default:
				return nil, nil
			}
		})
	})
	for _, err := range errs {
		s.holds(err == nil || errors.Is(err, cause), "the error %v is nil, or apply's own", err)
	}
	same(s, "refusals left", len(refusals), 0)
	same(s, "total", s.total("k"), 3)
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.Applied)
}

func distinctAtOnce(s *stage) {
	units := make([]projector.Work, storm)
	for i := range units {
		units[i] = work(fmt.Sprint("m-", i))
	}
	for range 2 {
		s.deliver(units, func(i int) func(unit) ([]outbox.Message, error) { return adds("k", i+1) })
		same(s, "total of distinct messages", s.total("k"), storm*(storm+1)/2)
	}
}

func handlersMarkThemselves(s *stage) {
	for range 3 {
		for i, handler := range []string{"ratings/posted", "ratings/withdrawn", "other/posted"} {
			w := projector.Work{Projector: strings.Split(handler, "/")[0], Marks: []marker.Key{{Handler: handler, MessageID: "m-1"}}}
			s.ok(s.do(s.ctx, w, adds(handler, i+1)), "deliver to "+handler)
			same(s, "total of "+handler, s.total(handler), i+1)
		}
	}
}

func earlierNames(s *stage) {
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "deliver under the first name")
	renamed := func(id string) projector.Work {
		return projector.Work{Projector: "stars", Marks: []marker.Key{
			{Handler: "stars/given", Was: []string{"stars/rated", "ratings/posted"}, MessageID: id},
		}}
	}
	s.ok(s.do(s.ctx, renamed("m-1"), adds("k", 1)), "deliver under the second name")
	same(s, "total of a message that was applied under an earlier name", s.total("k"), 1)
	same(s, "outcome", s.outcomes(renamed("m-1").Marks...)[0], projector.Applied)
	for range 2 {
		s.ok(s.do(s.ctx, renamed("m-2"), adds("k", 1)), "deliver a new message")
		same(s, "total after a new message", s.total("k"), 2)
	}
	same(s, "outcome under the earlier name", s.outcomes(key("m-2"))[0], projector.Applied)
	s.ok(s.do(s.ctx, work("m-2"), adds("k", 1)), "redeliver to an instance of the old code")
	same(s, "total after a redelivery to the old code", s.total("k"), 2)
	storm := make([]projector.Work, 20)
	for i := range storm {
		if storm[i] = work("m-9"); i%2 == 0 {
			storm[i] = renamed("m-9")
		}
	}
	s.deliver(storm, func(int) func(unit) ([]outbox.Message, error) { return adds("rename", 1) })
	same(s, "total of a message delivered to old and new code at once", s.total("rename"), 1)
	both := projector.Work{Projector: "stars", Marks: append(renamed("m-3").Marks, renamed("m-1").Marks...)}
	same(s, "fresh", s.fresh(both, nil), []int{0})
}

func severalMarks(s *stage) {
	s.ok(s.do(s.ctx, work("m-2", "m-5"), adds("k", 2)), "the first unit")
	w := work("m-6", "m-5", "m-1", "m-2", "m-4")
	w.Marks = append(w.Marks, marker.Key{Handler: "ratings/withdrawn", MessageID: "m-2"})
	same(s, "fresh", s.fresh(w, func(u unit) error { return u.add("k", len(u.fresh)) }), []int{0, 2, 4, 5})
	same(s, "total", s.total("k"), 6)
	failing := errors.New("failing")
	err := s.do(s.ctx, work("m-1", "m-7", "m-8"), func(unit) ([]outbox.Message, error) { return nil, failing })
	s.holds(errors.Is(err, failing), "the error %v is apply's", err)
	same(s, "outcomes", s.outcomes(key("m-1"), key("m-7"), key("m-8")), []projector.Outcome{projector.Applied, projector.Unseen, projector.Unseen})
	s.ok(s.do(s.ctx, w, adds("k", 100)), "the second unit again")
	same(s, "total", s.total("k"), 6)
}

func manyMarks(s *stage) {
	const n = 1500
	ids, odd, want := make([]string, n), []string{}, []int{}
	for i := range ids {
		ids[i] = newID()
		if i%2 == 1 {
			odd = append(odd, ids[i])
		} else {
			want = append(want, i)
		}
	}
	s.ok(s.do(s.ctx, work(odd...), adds("k", len(odd))), "the first half")
	same(s, "fresh", s.fresh(work(ids...), func(u unit) error { return u.add("k", len(u.fresh)) }), want)
	same(s, "total", s.total("k"), n)
	same(s, "not applied", slices.IndexFunc(s.outcomes(work(ids...).Marks...), func(o projector.Outcome) bool { return o != projector.Applied }), -1)
}

func crossingUnits(s *stage) {
	const messages, units = 20, 16
	ids := make([]string, messages)
	for i := range ids {
		ids[i] = fmt.Sprintf("m-%02d", i)
	}
	works := make([]projector.Work, units)
	for i := range works {
		rand.Shuffle(messages, func(a, b int) { ids[a], ids[b] = ids[b], ids[a] })
		works[i] = work(ids[:messages-i/2]...)
	}
	s.deliver(works, func(i int) func(unit) ([]outbox.Message, error) {
		return func(u unit) ([]outbox.Message, error) {
			for _, n := range u.fresh {
				if err := u.add(works[i].Marks[n].MessageID, 1); err != nil {
					return nil, err
				}
			}
			return nil, nil
		}
	})
	for _, id := range ids {
		same(s, "effects of "+id, s.total(id), 1)
	}
}

func oddMessageIDs(s *stage) {
	ids := []string{
		"7", "7 ", " 7", "07", "7.0", "a", "A", "é", "e\u0301", "日本", `o'brien`, `"`, `\`, "%", "_", "$1", "?", "'; drop table markers; --", "null", "NULL",
		strings.Repeat("x", 255), strings.Repeat("x", 254), "ratings/posted", "\u202e", "\ufeff", newID(), strings.ToUpper(newID()),
	}
	for range 2 {
		for _, id := range ids {
			s.ok(s.do(s.ctx, work(id), adds("k", 1)), fmt.Sprintf("deliver message %q", id))
		}
		same(s, "total", s.total("k"), len(ids))
	}
}

// waitEnds holds a unit open, and lets another one of the same message wait for it in vain.
func waitEnds(s *stage) {
	inside, leave, done := make(chan struct{}, 8), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- s.do(s.ctx, work("m-1"), func(u unit) ([]outbox.Message, error) {
			inside <- struct{}{}
			select {
			case <-leave:
			case <-s.ctx.Done(): // the other one hangs
			}
			return nil, u.add("k", 1)
		})
	}()
	select {
	case <-inside:
	case err := <-done:
		s.Fatalf("the first unit ended too soon: %v", err)
	}
	ctx, cancel := context.WithTimeout(s.ctx, 50*time.Millisecond)
	defer cancel()
	err := s.do(ctx, work("m-1"), func(u unit) ([]outbox.Message, error) { return nil, u.add("k", 10) })
	close(leave)
	firstErr := <-done
	s.classed(err, "a unit that waits", notPermanent...)
	s.ok(firstErr, "the unit that it waited for")
	same(s, "total", s.total("k"), 1)
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 10)), "a later try")
	same(s, "total", s.total("k"), 1)
}

func inApplyAtOnce(s *stage) {
	var inside sync.WaitGroup
	inside.Add(2)
	arrive := []func(){sync.OnceFunc(inside.Done), sync.OnceFunc(inside.Done)}
	s.deliver([]projector.Work{work("m-1"), work("m-1")}, func(i int) func(unit) ([]outbox.Message, error) {
		return func(u unit) ([]outbox.Message, error) {
			arrive[i]()
			inside.Wait()
			return []outbox.Message{{ID: "one", Topic: "mail"}}, u.add("k", 1)
		}
	})
	same(s, "total", s.total("k"), 1)
	same(s, "entries", len(s.entries(outbox.Filter{})), 1)
}

func outcomesTold(s *stage) {
	same(s, "outcomes of no keys", len(s.outcomes()), 0)
	park := func(handler, id string) projector.Parked {
		return projector.Parked{Projector: "ratings", Handler: handler, MessageID: id, Class: projector.PermanentClass}
	}
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{
		park("ratings/posted", "parked"), park("ratings/other", "parked elsewhere"), park("ratings/posted", "parked, then applied"), park("", "parked before any handler"),
		{Projector: "other", MessageID: "parked at another projector"},
	}}, nil), "park")
	s.ok(s.do(s.ctx, work("applied", "parked, then applied"), adds("k", 1)), "apply")
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings"}, adds("k", 1)), "apply without marks")
	keys := []marker.Key{
		key("unseen"), key("applied"), key("parked"), key("parked elsewhere"), key("parked, then applied"), key("unseen"),
		key("parked before any handler"), key("parked at another projector"), {Handler: "ratings/other", MessageID: "applied"},
	}
	same(s, "outcomes", s.outcomes(keys...), []projector.Outcome{
		projector.Unseen, projector.Applied, projector.IsParked, projector.Unseen, projector.Applied, projector.Unseen,
		projector.IsParked, projector.Unseen, projector.Unseen,
	})
}

func newHandleKnows(s *stage) {
	w, apply := full("m-1", func(unit) error { return nil })
	s.ok(s.do(s.ctx, w, apply), "deliver")
	again := s.reopen()
	again.ok(again.do(s.ctx, work("m-1"), adds("k", 10)), "deliver through a new handle")
	same(again, "total", again.total("k"), 1)
	same(again, "outcome", again.outcomes(key("m-1"))[0], projector.Applied)
	again.ok(again.do(s.ctx, work("m-2"), adds("k", 10)), "deliver another message through a new handle")
	same(s, "total through the first handle", s.total("k"), 11)
}

func anotherStoreKnowsNone(s *stage) {
	s.works("m-1")
	other := s.another()
	other.untouched("m-1", "what was done in another store")
	other.works("m-1")
}
