package providertest

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const keepsPlace = "A held entry keeps its place: no later one of its key is claimed before it. It becomes pending again, with its attempts unchanged, " +
	"once the entry that it waits for is published, requeued or skipped"

var heldCases = []testCase{
	{
		name: "a long wait is held", play: longIsHeld,
		rule: "HoldEntries holds pending entries that wait for long: those behind an entry of their topic and key that is abandoned, or failed with at least long of its backoff left",
	},
	{
		name: "a limit of held entries", play: holdLimit,
		rule: "HoldEntries holds at most limit entries, and returns how many it held",
	},
	// Promise: G3.5
	{name: "held until the head is published", rule: keepsPlace, play: heldUntilPublished},
	// Promise: G3.5
	{name: "held until the head is requeued", rule: keepsPlace, play: heldUntilRequeued},
	// Promise: G3.5
	{name: "held until the head is skipped", rule: keepsPlace, play: heldUntilSkipped},
	{name: "held entries keep their attempts", rule: keepsPlace, play: heldKeepsAttempts},
	{
		// Promise: G3.5
		name: "two abandoned ones in a key", play: twoAbandoned,
		rule: "An abandoned entry changes only by Requeue or Skip. Until then the later entries of its topic and key wait",
	},
	{
		name: "a skip of held entries", play: skipHeld,
		rule: "Skip gives up the held entries that f selects; the later entries of their keys are claimed without them",
	},
	{
		name: "many held", play: manyHeld,
		rule: "If an entry is published, held entries of its topic and key become pending: the first of them, and at least the next one",
	},
}

// hold holds entries that wait for an hour or longer, and fails the case unless it holds so many.
func (s *stage) hold(want int) {
	s.Helper()
	n, err := s.db.HoldEntries(s.ctx, time.Hour, 10_000)
	s.ok(err, "hold entries")
	same(s, "entries held", n, want)
}

// heldRun enqueues n entries of a key. The first fails for two hours or is abandoned; the others
// are held.
func (s *stage) heldRun(n int, key string, head outbox.Status) []outbox.Entry {
	s.Helper()
	run := s.enqueue(line(n, "mail", key)...)
	e := s.claimOne(run[0].Seq)
	s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: head, After: 2 * time.Hour, Error: "*net.OpError"})
	s.hold(n - 1)
	s.inStatus(outbox.Held, run[1:]...)
	return run
}

func (s *stage) inStatus(want outbox.Status, entries ...outbox.Entry) {
	s.Helper()
	for _, e := range entries {
		same(s, "status", s.entry(e.Seq).Status, want)
	}
}

// resolve requeues or skips, and fails the case unless that changes n entries.
func (s *stage) resolve(change func(context.Context, outbox.Filter) (int, error), f outbox.Filter, n int) {
	s.Helper()
	changed, err := change(s.ctx, f)
	s.ok(err, "requeue or skip")
	same(s, "entries requeued or skipped", changed, n)
}

func longIsHeld(s *stage) {
	s.hold(0)
	elsewhere := s.enqueue(line(2, "audit", "abandoned")...)
	var waiting, others []outbox.Entry
	for _, c := range []struct {
		key   string
		to    outbox.Status // status of the head; empty: unchanged
		after time.Duration
		long  bool
	}{
		{"pending", "", 0, false},
		{"claimed", outbox.Claimed, 2 * time.Hour, false},
		{"released", outbox.Pending, 2 * time.Hour, false}, // a delay, not a backoff
		{"published", outbox.Published, 0, false},
		{"short", outbox.Failed, 30 * time.Minute, false},
		{"long", outbox.Failed, 90 * time.Minute, true},
		{"abandoned", outbox.Abandoned, 0, true},
	} {
		run := s.enqueue(line(3, "mail", c.key)...)
		if c.to != "" {
			head := s.claimPast(run[0].Seq)
			s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: c.to, After: c.after})
		}
		if c.long {
			waiting = append(waiting, run[1:]...)
		} else {
			others = append(others, run[1:]...)
		}
		others = append(others, s.entry(run[0].Seq))
	}
	s.hold(len(waiting))
	for _, e := range waiting {
		e.Status = outbox.Held
		same(s, "held entry", s.entry(e.Seq), e)
	}
	for _, e := range append(others, elsewhere...) {
		same(s, "entry that is not held", s.entry(e.Seq), e)
	}
	before := s.dump()
	s.hold(0)
	s.unchanged(before, "holding again")
	late := s.enqueue(append(line(1, "mail", "long"), line(1, "mail", "abandoned")...)...)
	s.advance(time.Hour) // half an hour of the long backoff is left
	s.hold(1)
	s.inStatus(outbox.Pending, late[0])
	s.inStatus(outbox.Held, late[1])
}

func holdLimit(s *stage) {
	run := s.enqueue(line(6, "mail", "ann")...)
	head := s.claimOne(run[0].Seq)
	s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Abandoned})
	for _, want := range []int{2, 2, 1, 0} {
		n, err := s.db.HoldEntries(s.ctx, time.Hour, 2)
		s.ok(err, "hold entries")
		same(s, "entries held, at most two", n, want)
		s.claimed("a claim while some are held")
	}
	s.inStatus(outbox.Held, run[1:]...)
	s.resolve(s.db.Skip, outbox.Filter{Seqs: []int64{head.Seq}}, 1)
	s.claimed("a claim once the head is skipped", run[1:]...)
}

func heldUntilPublished(s *stage) {
	for _, drop := range []bool{false, true} {
		run := s.heldRun(3, "ann", outbox.Failed)
		run = append(run, s.enqueue(line(2, "mail", "ann")...)...)
		s.claimed("a claim before the head's backoff is over")
		s.advance(3 * time.Hour)
		s.hold(0)
		head := s.claimed("a claim once it is over", run[0])[0]
		s.claimed("a claim behind the head")
		s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Failed})
		head = s.claimed("a claim of the head again", run[0])[0]
		s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Published, Drop: drop})
		s.inStatus(outbox.Pending, run[1])
		s.publishAll(run[1:])
	}
}

// publishAll claims and publishes until no entry is left, and fails the case unless these were
// published in order.
func (s *stage) publishAll(want []outbox.Entry) {
	s.Helper()
	seqs := []int64{}
	for taken := s.claim(three, 300); len(taken) > 0; taken = s.claim(three, 300) {
		marks := make([]outbox.Mark, len(taken))
		for i, e := range taken {
			seqs = append(seqs, e.Seq)
			marks[i] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
		}
		s.mark(marks...)
	}
	same(s, "published entries, in order", seqs, seqsOf(want))
}

func heldUntilRequeued(s *stage) {
	for i, status := range []outbox.Status{outbox.Failed, outbox.Abandoned} {
		run := s.heldRun(3, "ann", status)
		run = append(run, s.enqueue(line(2, "mail", "ann")...)...)
		only := []outbox.Filter{{Seqs: []int64{run[0].Seq}}, {Status: []outbox.Status{status}, Limit: 1}}[i]
		s.resolve(s.db.Requeue, only, 1)
		s.inStatus(outbox.Pending, run[1])
		s.publishAll(run)
	}
}

func heldUntilSkipped(s *stage) {
	ben := s.heldRun(2, "ben", outbox.Abandoned)
	for i, status := range []outbox.Status{outbox.Failed, outbox.Abandoned} {
		run := s.heldRun(3, "ann", status)
		run = append(run, s.enqueue(line(2, "mail", "ann")...)...)
		only := []outbox.Filter{{Key: "ann", Limit: 1}, {Seqs: []int64{run[0].Seq}}}[i]
		s.resolve(s.db.Skip, only, 1)
		s.inStatus(outbox.Pending, run[1])
		s.publishAll(run[1:])
		s.inStatus(outbox.Held, ben[1])
	}
}

func heldKeepsAttempts(s *stage) {
	run := s.enqueue(line(2, "mail", "ann")...)
	s.claimed("the first claim", run...)
	s.advance(lease + time.Hour)
	free := provider.EntryQuery{Attempts: 3, Unordered: true}
	// both claims crashed, so each is claimed alone
	taken := append(s.claim(free, 1), s.claim(free, 1)...)
	same(s, "taken over", seqsOf(taken), seqsOf(run))
	s.mark(
		outbox.Mark{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Abandoned},
		outbox.Mark{Seq: taken[1].Seq, Token: taken[1].Token, To: outbox.Pending},
	)
	second := s.entry(run[1].Seq)
	same(s, "attempts, suspect", []any{second.Attempts, second.Suspect}, []any{1, true})
	s.hold(1)
	s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{run[0].Seq}}, 1)
	same(s, "entry that was held", s.entry(second.Seq), second)
}

func twoAbandoned(s *stage) {
	for _, c := range []struct {
		first int // abandoned entry that is requeued first
		free  int // entries that this releases
	}{{0, 2}, {2, 0}} {
		run := s.enqueue(line(5, "mail", "ann")...)
		taken := s.claim(three, 3)
		for i, to := range []outbox.Status{outbox.Abandoned, outbox.Pending, outbox.Abandoned} {
			s.mark(outbox.Mark{Seq: taken[i].Seq, Token: taken[i].Token, To: to})
		}
		s.hold(3)
		s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{run[c.first].Seq}}, 1)
		s.publishAll(run[:c.free])
		s.resolve(s.db.Requeue, outbox.Filter{Topic: "mail", Key: "ann"}, 1)
		s.publishAll(run[c.free:])
	}
}

func skipHeld(s *stage) {
	run := s.heldRun(5, "ann", outbox.Abandoned)
	s.resolve(s.db.Skip, outbox.Filter{Seqs: []int64{run[2].Seq}}, 1)
	s.claimed("a claim behind the head, once a held one is skipped")
	_, err := s.db.HoldEntries(s.ctx, time.Hour, 10)
	s.ok(err, "hold entries")
	s.resolve(s.db.Skip, outbox.Filter{Status: []outbox.Status{outbox.Held}, Limit: 1}, 1)
	s.claimed("a claim behind the head, once another is skipped")
	s.inStatus(outbox.Skipped, run[1], run[2])
	s.resolve(s.db.Requeue, outbox.Filter{}, 1)
	s.publishAll(slices.Concat(run[:1], run[3:]))
}

func manyHeld(s *stage) {
	const n = 801 // more than a provider releases at once
	run := s.enqueue(line(n, "mail", "ann")...)
	head := s.claimOne(run[0].Seq)
	s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Abandoned})
	s.hold(n - 1)
	s.counted(map[outbox.Status]int64{outbox.Abandoned: 1, outbox.Held: n - 1})
	run = append(run, s.enqueue(line(3, "mail", "ann")...)...)
	s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{head.Seq}}, 1)
	s.publishAll(run)
	s.counted(map[outbox.Status]int64{outbox.Published: n + 3})
}
