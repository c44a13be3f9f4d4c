package providertest

import (
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var independentCases = []testCase{
	{
		// Promise: R1.1
		name: "messages and held lanes", play: heldApart,
		rule: "A generation has its own parked messages and held lanes: a message that is parked in one holds no lane of another",
	},
	{
		// Promise: R1.1
		name: "lanes in use", play: lanesInUseApart,
		rule: "A unit has the lanes of its generation: it does not keep another generation from a message of the same lane",
	},
	{
		name: "due messages", play: dueApart,
		rule: "Due returns messages by build and lane. Try delays the lane in the generation of its message",
	},
	{
		name: "listing and deciding", play: decideApart,
		rule: "ParkedFilter.Generation is one of the projector's. Zero means all",
	},
	{
		// Promise: R1.1
		name: "messages in flight", play: inFlightApart,
		rule: "Found.Suspect: messages in flight are those of the unit's generation",
	},
	{
		name: "no generation means the live one", play: zeroIsLive,
		rule: "In Progress and Records, a Generation of zero means the live one; everywhere else it means 1",
	},
	{
		// Promise: R1.1
		name: "what prunes leave", play: prunesApart,
		rule: "PruneApplied deletes markers of its generation. Prune leaves the markers with a position in every generation that has a checkpoint",
	},
}

// heldApart parks the same messages in two generations.
func heldApart(s *stage) {
	next := s.in(2)
	rows := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"))
	same(s, "generations of the messages", []int{rows[0].Generation, rows[1].Generation}, []int{1, 1})
	s.isHeld("in its generation", "ann", true)
	next.isHeld("in another generation", "ann", false)
	found := next.open(next.unit(next.message("m-1", "ann"), next.message("m-3", "ann")), effects)
	same(s, "fresh in another generation", found.Fresh, [][]bool{{true}, {true}})
	same(s, "held in another generation", found.Held, []bool{false, false})

	third := s.in(3)
	row := third.park(-1, third.failed("m-1", "ann"))[0]
	same(s, "generation of the message", row.Generation, 3)
	same(s, "rows", idsOfParked(s.rows()), []string{"m-1", "m-2", "m-1"})
	for generation, want := range map[int]provider.Outcome{1: provider.OutcomeWaiting, 2: provider.OutcomeApplied, 3: provider.OutcomeStuck} {
		s.in(generation).outcomes("in each generation", []string{"m-1"}, want)
	}
	s.runs("in its generation", rows, true, true)
	s.isHeld("after its messages were applied", "ann", false)
	third.isHeld("in the third generation", "ann", true)
	third.decide(provider.ParkedFilter{Seqs: []int64{row.Seq}}, provider.StateWaiting, 1)
	third.runs("in the third generation", third.rows(), true)
	third.isHeld("after its messages were applied", "ann", false)
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-3")}, []int{3, 1, 1})
}

// lanesInUseApart runs a message of generation 2 while generation 1 applies one of the same lane.
func lanesInUseApart(s *stage) {
	next := s.in(2)
	row, other := s.park(0, s.behind("m-1", "ann"))[0], next.park(0, next.failed("m-1", "ann"))[0]
	var tried bool
	var live []bool
	wait := func() error { return nil }
	s.open(s.parkedUnit(row), func(o opened) (provider.Closing, error) {
		wait = begin(func() (err error) {
			if tried, err = s.db.Try(s.ctx, other, -1, time.Hour); err != nil {
				return err
			}
			counted := other
			counted.Attempts++
			return next.do(s.ctx, next.parkedUnit(counted), func(o opened) (provider.Closing, error) {
				live = o.Live
				return effects(o)
			})
		})
		return effects(o)
	})
	s.ok(wait(), "a unit of another generation")
	same(s, "tried", tried, true)
	same(s, "live", live, []bool{true})
	same(s, "left", len(s.rows()), 0)
	same(s, "total", s.total("m-1"), 2)
}

func dueApart(s *stage) {
	next, third := s.in(2), s.in(3)
	s.park(0, s.failed("m-1", "ann"), s.failed("m-2", "ben"))
	row := next.park(0, next.failed("m-1", "ann"), next.failed("m-3", "ben"), next.failed("m-4", "cid"))[0]
	third.park(0, third.failed("m-5", "ann"))
	s.isDue("in the first generation", "m-1", "m-2")
	next.isDue("in the second generation", "m-1", "m-3", "m-4")
	for _, c := range []struct {
		keys int
		want []int // messages of generations 1 and 2
	}{{10, []int{2, 3}}, {1, []int{1, 1}}, {2, []int{2, 2}}} {
		due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build(), next.build()}, Keys: c.keys, Each: 1})
		s.ok(err, "list due messages")
		n, of := []int{0, 0}, []int{}
		for _, p := range due {
			n[p.Generation-1]++
			of = append(of, p.Generation)
		}
		same(s, "due messages of both generations", n, c.want)
		s.require(len(slices.Compact(of)) == 2, "the messages of a generation are listed together")
	}
	unnamed, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{{Projector: s.name}}, Keys: 10, Each: 1})
	s.ok(err, "list due messages of no generation")
	same(s, "due messages of no generation", len(unnamed), 2)
	tried, err := s.db.Try(s.ctx, row, -1, time.Hour)
	s.ok(err, "try")
	same(s, "tried", tried, true)
	s.isDue("in the first generation, after a try in the second", "m-1", "m-2")
	next.isDue("in the second generation, after a try", "m-3", "m-4")
}

func decideApart(s *stage) {
	next := s.in(2)
	s.park(-1, s.failed("m-1", "ann"))
	s.park(0, s.behind("m-2", "ann"))
	next.park(-1, next.failed("m-1", "ann"))
	next.park(0, next.behind("m-2", "ann"))
	for generation, want := range [][]int{{1, 1, 2, 2}, {1, 1}, {2, 2}, {}} {
		got := []int{}
		for _, p := range s.list(provider.ParkedFilter{Projector: s.name, Generation: generation}) {
			got = append(got, p.Generation)
		}
		same(s, "generations of the messages listed", got, want)
	}
	first := provider.ParkedFilter{States: []provider.ParkedState{provider.StateStuck}}
	first.Generation = 3
	s.decide(first, provider.StateWaiting, 0)
	first.Generation = 2
	s.decide(first, provider.StateSkipped, 1)
	next.isDue("behind a skipped message", "m-2")
	s.isDue("in the other generation")
	s.decide(provider.ParkedFilter{Generation: 1}, provider.StateWaiting, 2)
	s.isDue("after a replay", "m-1")
	s.decide(provider.ParkedFilter{}, provider.StateSkipped, 3)
	same(s, "left", len(s.rows()), 0)
}

func inFlightApart(s *stage) {
	next := s.in(2)
	one := provider.Worker{Runner: "one " + s.name, Number: 1}
	next.inFlight(one, "m-1", "m-2")
	ids := []string{"m-1", "m-2", "m-3"}
	next.isSuspect("in its generation", ids, true, true, false)
	s.isSuspect("in another generation", ids, false, false, false)
	next.inFlight(one)
	unnamed := s.in(0)
	unnamed.inFlight(one, "m-3")
	s.isSuspect("of no generation", ids, false, false, true)
	next.isSuspect("in another generation", ids, false, false, false)
}

// zeroIsLive asks without a generation, while 1, then 2, then 1 again is live.
func zeroIsLive(s *stage) {
	next, asks := s.in(2), s.in(0)
	first := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	s.park(-1, s.failed("m-1", "ann"))
	second := next.move(next.begins(0, provider.ModeCatchUp), 2)
	next.open(next.reading(next.events(3)), effects)
	follows := func(what string, live int, want provider.Checkpoint, outcomes ...provider.Outcome) {
		s.Helper()
		is, err := s.db.Checkpoint(s.ctx, asks.build())
		s.ok(err, "read the checkpoint")
		same(s, "generation of the live checkpoint "+what, is.Generation, live)
		same(s, "position of the live checkpoint "+what, is.Place.Position, want.Place.Position)
		asks.applied(what, []int64{2, 3, 5, 6, 7}, true, true, live == 1, live == 1, false)
		placed := asks.question("e-5")
		placed.Position = 5
		same(s, "outcomes "+what, s.answers(asks.question("e-3"), asks.question("e-6"), asks.question("m-1"), placed), outcomes)
	}
	ofFirst := []provider.Outcome{provider.OutcomeUnseen, provider.OutcomeApplied, provider.OutcomeStuck, provider.OutcomeApplied}
	follows("before a switch", 1, first, ofFirst...)
	s.in(1).switchTo(2, 1)
	follows("after a switch", 2, second, provider.OutcomeApplied, provider.OutcomeUnseen, provider.OutcomeUnseen, provider.OutcomeUnseen)
	second = asks.set(second, moved(second, 4))
	same(s, "checkpoint of the live generation", next.checkpoint(), second)
	asks.prunedApplied("of the live generation", []string{"posted"}, 10, 1)
	s.in(2).switchTo(1, 2)
	same(s, "position after a rollback", s.checkpoint().Place, first.Place)
	follows("after a rollback", 1, first, ofFirst...)
}

func prunesApart(s *stage) {
	next, third := s.in(2), s.in(3)
	c := s.begins(0, provider.ModeLive)
	next.begins(0, provider.ModeLive)
	for _, of := range []*stage{s, next, third} {
		u := of.events(1, 2, 3)
		u.Messages = append(u.Messages, of.message("foreign", ""))
		of.open(u, nothing)
		of.skip(of.park(0, of.untyped("m-1", "ann"))[0])
	}
	s.move(c, 2)
	s.prunedApplied("of the first generation", []string{"posted"}, 10, 2)
	marked := func(of *stage, want ...provider.Outcome) {
		s.Helper()
		of.outcomes("in generation "+of.build().String(), []string{"e-1", "e-2", "e-3", "foreign"}, want...)
	}
	const gone, kept = provider.OutcomeUnseen, provider.OutcomeApplied
	marked(s, gone, gone, kept, kept)
	marked(next, kept, kept, kept, kept)
	marked(third, kept, kept, kept, kept)
	s.advance(2 * time.Hour)
	s.pruned([]string{"posted"}, time.Hour, 100, 3+3+3) // foreign and skipped ones, and the events of generation 3
	marked(s, gone, gone, kept, gone)
	marked(next, kept, kept, kept, gone)
	marked(third, gone, gone, gone, gone)
}
