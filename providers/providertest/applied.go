package providertest

import (
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var appliedCases = []testCase{
	{
		// Promise: G7b.6
		name: "unapplied messages", play: unappliedMessages,
		rule: "Unapplied reports for each message whether a unit could find it fresh: it is behind the checkpoint or has no position, and one of its handlers has no marker of it",
	},
	{
		name: "many messages", play: unappliedMany,
		rule: "Unapplied answers for many messages in one call, in order",
	},
	{
		// Promise: G4.7
		name: "markers at or before the checkpoint", play: prunesApplied,
		rule: "PruneApplied deletes at most limit markers of handlers, in the generation, whose position is not behind the checkpoint. Zero means that none is left",
	},
	{
		// Promise: G4.7
		name: "a redelivery after PruneApplied", play: redeliveredAfterApplied,
		rule: "Messages whose markers PruneApplied deleted are known by the checkpoint",
	},
	{
		// Promise: G4.7
		name: "markers of a projector with a checkpoint", play: agedWithCheckpoint,
		rule: "Prune leaves the markers with a position in a generation that has a checkpoint to PruneApplied. It deletes those of other generations, and those without a position",
	},
	{
		// Promise: G7b.7
		name: "outcomes by position", play: outcomesByPosition,
		rule: "OutcomeApplied: it has a marker or is not behind the checkpoint, and is not parked",
	},
}

func unappliedMessages(s *stage) {
	c := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	s.open(s.of("foreign"), effects)
	given, rated := s.handler("given", s.name+"/graded", s.name+"/posted"), s.handler("rated")
	with := func(m provider.Message, handlers ...provider.Handler) provider.Message {
		m.Handlers, m.Mark = handlers, false
		return m
	}
	messages := []provider.Message{
		s.event(5), s.event(6), s.event(7), s.message("foreign", ""), s.message("unseen", ""), with(s.event(4), rated),
		with(s.event(6), given), with(s.event(6), given, rated), with(s.event(7), given), with(s.message("foreign", ""), rated), with(s.event(7)),
	}
	ask := func(what string, want ...bool) {
		got, err := s.db.Unapplied(s.ctx, s.build(), messages)
		s.ok(err, "look up markers")
		same(s, "unapplied "+what, got, want)
	}
	ask("while it is live", false, false, true, false, true, false, false, true, true, true, false)
	c = s.mode(c, provider.ModeCatchUp)
	ask("while it catches up", false, false, true, false, true, false, false, true, true, true, false)
	s.move(c, 7)
	ask("after a move", false, false, false, false, true, false, false, false, false, true, false)
	none, err := s.db.Unapplied(s.ctx, s.build(), nil)
	s.ok(err, "look up no markers")
	same(s, "unapplied of no messages", len(none), 0)
	other, err := s.db.Unapplied(s.ctx, provider.Build{Projector: s.name + "x"}, []provider.Message{s.event(5), s.event(6)})
	s.ok(err, "look up markers of another projector")
	same(s, "unapplied at another projector, which has no checkpoint", other, []bool{true, false})
}

func unappliedMany(s *stage) {
	const n = 5000
	s.begins(1000, provider.ModeLive)
	var all []int64
	var want []bool
	marked := s.unit()
	for i := range int64(n) {
		at := i + 1
		all, want = append(all, at), append(want, at <= 1000 || at%3 == 0)
		if at > 1000 && at%3 == 0 {
			marked.Messages = append(marked.Messages, s.event(at))
		}
	}
	s.open(marked, nothing)
	slices.Reverse(all)
	slices.Reverse(want)
	s.applied("of many", all, want...)
}

func prunesApplied(s *stage) {
	posted := []string{"posted"}
	c := s.begins(0, provider.ModeLive)
	u := s.events(1, 2, 3, 4, 5, 6)
	for i := range u.Messages {
		u.Messages[i].Handlers = append(u.Messages[i].Handlers, s.handler("postedlater"))
	}
	u.Messages = append(u.Messages, s.message("foreign", ""))
	s.open(u, nothing)
	s.prunedApplied("before a move", posted, 10, 0)
	c = s.move(c, 4)
	s.prunedApplied("of other handlers", []string{"poste", "posted%", ""}, 10, 0)
	s.prunedApplied("of no handlers", nil, 10, 0)
	for _, want := range []int{3, 1, 0} {
		s.prunedApplied("by threes", posted, 3, want)
	}
	s.applied("after it", []int64{4, 5, 6, 7}, true, true, true, false)
	s.outcomes("without positions", []string{"e-1", "e-4", "e-5", "foreign"},
		provider.OutcomeUnseen, provider.OutcomeUnseen, provider.OutcomeApplied, provider.OutcomeApplied)
	c = s.move(c, 5)
	for _, want := range []int{4, 2, 0} { // one of the first handler, five of the second
		s.prunedApplied("of both handlers", []string{"posted", "postedlater"}, 4, want)
	}
	s.marked([]string{"e-5", "e-6"}, "posted", 1)
	s.marked([]string{"e-5", "e-6"}, "postedlater", 1)
	s.move(c, 100)
	s.prunedApplied("of all", []string{"posted", "postedlater"}, 100, 2)
	s.outcomes("of a foreign message", []string{"foreign"}, provider.OutcomeApplied)
	q := s.question("unseen")
	q.RecordedAt = time.Unix(0, 0)
	same(s, "PruneApplied raises no low-water mark", s.answers(q), []provider.Outcome{provider.OutcomeUnseen})
}

func redeliveredAfterApplied(s *stage) {
	c := s.begins(0, provider.ModeLive)
	s.open(s.events(1, 2, 3), effects)
	c = s.move(c, 3)
	s.prunedApplied("after a move", []string{"posted"}, 10, 3)
	for range 2 {
		same(s, "fresh", s.open(s.events(3, 1, 4), nothing).Fresh[:2], [][]bool{{false}, {false}})
		same(s, "fresh for the reader", s.open(s.reading(s.events(2)), effects).Fresh, [][]bool{{false}})
	}
	same(s, "fresh in a move", s.open(s.upTo(c, 5, 3, 5), effects).Fresh, [][]bool{{false}, {true}})
	s.effectsOf("of each event", 4, 1, 2, 3, 5)
}

func agedWithCheckpoint(s *stage) {
	c := s.begins(0, provider.ModeLive)
	s.open(s.events(1, 2, 3), effects)
	s.open(s.of("foreign"), effects)
	c = s.move(c, 1)
	s.generation = 2
	s.open(s.events(1, 2), effects)
	s.open(s.of("foreign 2"), effects)
	s.advance(2 * time.Hour)
	s.open(s.events(3), effects)
	s.pruned([]string{"posted"}, time.Hour, 2, 2)
	s.pruned([]string{"posted"}, time.Hour, 2, 2)
	s.pruned([]string{"posted"}, time.Hour, 2, 0)
	s.outcomes("in a generation without a checkpoint", []string{"e-1", "e-2", "e-3", "foreign 2"},
		provider.OutcomeUnseen, provider.OutcomeUnseen, provider.OutcomeApplied, provider.OutcomeUnseen)
	s.generation = 1
	s.applied("in a generation with a checkpoint", []int64{1, 2, 3, 4}, true, true, true, false)
	s.outcomes("of a foreign message", []string{"foreign"}, provider.OutcomeUnseen)
	s.move(c, 3)
	s.prunedApplied("later", []string{"posted"}, 10, 3)
}

func outcomesByPosition(s *stage) {
	at := func(position int64) provider.Question {
		q := s.question(fmt.Sprint("e-", position))
		q.Position = position
		return q
	}
	same(s, "outcome without a checkpoint", s.answers(at(3)), []provider.Outcome{provider.OutcomeUnseen})
	c := s.begins(5, provider.ModeLive)
	s.open(s.events(7), effects)
	s.park(0, s.failed("e-4", "ann"), s.failed("e-8", "ben"))
	s.park(-1, s.failed("e-3", "cid"))
	s.skip(s.park(0, s.failed("e-2", "dan"))[0])
	lower, old := at(6), at(5)
	old.RecordedAt, lower.RecordedAt = time.Unix(0, 0), time.Unix(0, 0)
	elsewhere := provider.Question{Handler: s.name + "x/posted", MessageID: "e-5", Position: 5}
	unplaced := at(5)
	unplaced.Position = 0
	same(s, "outcomes", s.answers(at(5), at(6), at(7), at(4), at(8), at(3), at(2), old, lower, elsewhere, unplaced), []provider.Outcome{
		provider.OutcomeApplied, provider.OutcomeUnseen, provider.OutcomeApplied, provider.OutcomeWaiting, provider.OutcomeWaiting,
		provider.OutcomeStuck, provider.OutcomeSkipped, provider.OutcomeApplied, provider.OutcomeUnseen, provider.OutcomeUnseen,
		provider.OutcomeUnseen,
	})
	s.advance(2 * time.Hour)
	s.open(s.of("old"), nothing)
	s.advance(2 * time.Hour)
	s.pruned([]string{"posted"}, time.Hour, 10, 6) // old, the markers of four parked deliveries, and the skipped message
	same(s, "outcomes after a prune", s.answers(old, lower), []provider.Outcome{provider.OutcomeApplied, provider.OutcomeUnseen})
	s.move(c, 6)
	same(s, "outcomes after a move", s.answers(lower, at(7)), []provider.Outcome{provider.OutcomeApplied, provider.OutcomeApplied})
}
