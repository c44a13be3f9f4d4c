package providertest

import (
	"cmp"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var markCases = []testCase{
	{
		name: "the effect of each mark", play: eachMark,
		rule: "Published, Failed (with its backoff and error class), Abandoned (with its error class), Claimed (renews the lease), Pending (releases, and gives the attempt back)",
	},
	{
		name: "a renewed lease", play: renewedLease,
		rule: "A mark to Claimed renews the lease: it ends After from now",
	},
	{
		name: "a released entry", play: releasedEntry,
		rule: "A mark to Pending releases the entry and gives the attempt back: the entry is claimable at once",
	},
	{
		name: "a released entry that waits", play: releasedWaits,
		rule: "A mark to Pending: the entry is not claimable before After. If Error is not empty, it is the last error",
	},
	{
		name: "a published entry that is not kept", play: dropped,
		rule: "Mark.Drop: delete the published entry instead, fenced like any mark; with another status it is an *eventstore.InvalidError",
	},
	{
		// Promise: G2.4
		name: "a late mark changes nothing", play: lateMark,
		rule: "MarkEntries returns the Seqs whose token is no longer that of the entry's claim. Those are unchanged",
	},
	{
		name: "a mark counts once", play: markCountsOnce,
		rule: "Each mark is fenced by its token: once an entry is no longer claimed, a mark with the token of that claim is late",
	},
	{
		name: "late marks next to good ones", play: lateBesideGood,
		rule: "MarkEntries changes the entries that its tokens still hold, and returns the Seqs of the others",
	},
	{
		name: "a mark after the lease's end", play: markAfterLease,
		rule: "A claim ends when it is taken over, not when its lease ends: until then its token counts",
	},
	{
		name: "a mark to a wrong status", play: wrongMark,
		rule: "A mark to a status that Mark.To does not allow is an *eventstore.InvalidError, and nothing is changed",
	},
	{
		name: "published is final", play: publishedIsTheEnd,
		rule: "Published and skipped are final",
	},
}

// mark marks, and fails the case if any of the marks is late.
func (s *stage) mark(marks ...outbox.Mark) {
	s.Helper()
	late, err := s.db.MarkEntries(s.ctx, marks)
	s.ok(err, "mark")
	same(s, "late marks", len(late), 0)
}

// late fails the case if any of the marks is not late.
func (s *stage) late(what string, marks ...outbox.Mark) {
	s.Helper()
	late, err := s.db.MarkEntries(s.ctx, marks)
	s.ok(err, what)
	want := make([]int64, len(marks))
	for i, m := range marks {
		want[i] = m.Seq
	}
	same(s, "late marks: "+what, late, want)
}

// everyMark returns a mark of e to each status that a mark may have.
func everyMark(e outbox.Entry) []outbox.Mark {
	return []outbox.Mark{
		{Seq: e.Seq, Token: e.Token, To: outbox.Published},
		{Seq: e.Seq, Token: e.Token, To: outbox.Failed, After: 3 * time.Hour, Error: "*net.OpError"},
		{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned, Error: "*net.OpError"},
		{Seq: e.Seq, Token: e.Token, To: outbox.Claimed, After: 3 * time.Hour},
		{Seq: e.Seq, Token: e.Token, To: outbox.Pending},
	}
}

func eachMark(s *stage) {
	kinds := len(everyMark(outbox.Entry{}))
	entries := s.enqueue(line(kinds, "mail", "")...)
	var marks []outbox.Mark
	for i, e := range s.claimed("the claim", entries...) {
		marks = append(marks, everyMark(e)[i])
	}
	s.mark(marks...)
	for i, m := range marks {
		e := s.entry(m.Seq)
		want := e // times are checked one by one
		want.Status, want.Attempts, want.Token, want.ClaimedBy, want.LastError = m.To, 1, m.Token, "a", m.Error
		if m.To == outbox.Pending {
			want.Attempts = 0
		}
		same(s, "entry marked "+string(m.To), e, want)
		same(s, "message of the entry", e.OutboxMessage, entries[i].OutboxMessage)
		same(s, "published at a time", !e.PublishedAt.IsZero(), m.To == outbox.Published)
		s.require(!e.PublishedAt.Before(e.LastAttemptedAt) || e.PublishedAt.IsZero(), "the publication follows the attempt")
		wait := e.NextAttemptAt.Sub(e.LastAttemptedAt)
		switch m.To {
		case outbox.Failed, outbox.Claimed:
			s.require(wait >= m.After && wait < m.After+patience.Limit(), "%s: the next attempt is %s after the last: %s", m.To, m.After, wait)
		case outbox.Pending:
			s.require(wait < patience.Limit(), "a released entry does not wait: %s", wait)
		}
	}
	s.mark() // no marks
}

func renewedLease(s *stage) {
	entries := s.enqueue(line(1, "mail", "ann")...)
	held := s.claimOne(entries[0].Seq)
	s.advance(lease - time.Hour)
	s.mark(outbox.Mark{Seq: held.Seq, Token: held.Token, To: outbox.Claimed, After: 4 * time.Hour})
	s.advance(3 * time.Hour) // past the first lease's end
	s.claimed("a claim during the renewed lease")
	same(s, "attempts after the renewal", s.entry(held.Seq).Attempts, 1)
	s.advance(2 * time.Hour)
	again := s.claimed("a claim after the renewed lease", entries...)
	same(s, "attempts after the take-over", again[0].Attempts, 2)
	s.late("a renewal after the take-over", outbox.Mark{Seq: held.Seq, Token: held.Token, To: outbox.Claimed, After: lease})
}

func releasedEntry(s *stage) {
	entries := s.enqueue(line(2, "mail", "ann")...)
	for range 5 { // more often than the entry has attempts
		taken := s.claimed("a claim of released entries", entries...)
		for _, e := range taken {
			same(s, "attempts", e.Attempts, 1)
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
			same(s, "status after the release", s.entry(e.Seq).Status, outbox.Pending)
		}
	}
}

func releasedWaits(s *stage) {
	entries := s.enqueue(line(2, "mail", "ann")...)
	for _, class := range []string{"*net.OpError", ""} {
		for _, e := range s.claimed("a claim", entries...) {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending, After: 2 * time.Hour, Error: class})
			got := s.entry(e.Seq)
			same(s, "status, attempts, error", []any{got.Status, got.Attempts, got.LastError}, []any{outbox.Pending, 0, cmp.Or(class, e.LastError)})
			wait := got.NextAttemptAt.Sub(got.LastAttemptedAt)
			s.require(wait >= 2*time.Hour && wait < 2*time.Hour+patience.Limit(), "the next attempt is two hours after the last: %s", wait)
		}
		entries = append(entries, s.enqueue(line(1, "mail", "ann")...)...)
		s.advance(time.Hour)
		s.claimed("a claim while they wait")
		s.advance(2 * time.Hour)
	}
	s.claimed("a claim once they are due", entries...)
}

func dropped(s *stage) {
	entries := s.enqueue(line(3, "mail", "ann")...)
	taken := s.claim(three, 2)
	for _, to := range []outbox.Status{outbox.Failed, outbox.Abandoned, outbox.Claimed, outbox.Pending} {
		before := s.dump()
		_, err := s.db.MarkEntries(s.ctx, []outbox.Mark{
			{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Published},
			{Seq: taken[1].Seq, Token: taken[1].Token, To: to, Drop: true},
		})
		s.invalid(err, "a drop of an entry marked "+string(to))
		s.unchanged(before, "a refused drop")
	}
	before := s.dump()
	s.late("a drop with another claim's token", outbox.Mark{Seq: taken[0].Seq, Token: claim.NewToken(), To: outbox.Published, Drop: true})
	s.late("a drop of an entry that is not claimed", outbox.Mark{Seq: entries[2].Seq, Token: taken[0].Token, To: outbox.Published, Drop: true})
	s.unchanged(before, "late drops")
	m := outbox.Mark{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Published, Drop: true}
	s.mark(m, outbox.Mark{Seq: taken[1].Seq, Token: taken[1].Token, To: outbox.Published})
	same(s, "entries left", seqsOf(s.entries(outbox.Filter{})), seqsOf(entries[1:]))
	s.late("a second drop", m)
	again := s.enqueue(entries[0].OutboxMessage, entries[1].OutboxMessage) // the second one exists
	same(s, "entries enqueued again", len(again), 1)
	same(s, "its message", again[0].OutboxMessage, entries[0].OutboxMessage)
	s.claimed("a claim of the entry behind it, and of the new one", entries[2], again[0])
}

func lateMark(s *stage) {
	entries := s.enqueue(line(1, "mail", "ann")...)
	first := s.claimOne(entries[0].Seq)
	s.advance(lease + time.Hour)
	second := s.claimOne(entries[0].Seq)
	for _, m := range everyMark(first) {
		before := s.dump()
		s.late("a mark to "+string(m.To)+" after the take-over", m)
		s.unchanged(before, "a late mark to "+string(m.To))
	}
	s.mark(outbox.Mark{Seq: second.Seq, Token: second.Token, To: outbox.Pending})
	for _, m := range append(everyMark(first), everyMark(second)...) {
		before := s.dump()
		s.late("a mark to "+string(m.To)+" after the release", m)
		s.unchanged(before, "a late mark to "+string(m.To))
	}
}

func markCountsOnce(s *stage) {
	s.enqueue(line(5, "mail", "")...)
	for i, e := range s.claim(three, 5) {
		m := everyMark(e)[i]
		s.mark(m)
		if m.To == outbox.Claimed { // renewed: still held
			s.mark(m)
			continue
		}
		before := s.dump()
		for _, again := range everyMark(e) {
			s.late("a mark to "+string(again.To)+" after one to "+string(m.To), again)
		}
		s.unchanged(before, "marks after one to "+string(m.To))
	}
	twice := s.enqueue(line(1, "mail", "")...)
	held := s.claim(provider.EntryQuery{Topics: []string{"mail"}}, 10)
	e := held[len(held)-1]
	same(s, "claimed last", e.Seq, twice[0].Seq)
	m := outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
	_, err := s.db.MarkEntries(s.ctx, []outbox.Mark{m, m})
	s.ok(err, "mark twice in one call")
	same(s, "status after two marks in one call", s.entry(e.Seq).Status, outbox.Published)
}

func lateBesideGood(s *stage) {
	entries := s.enqueue(line(4, "mail", "")...)
	taken := s.claim(three, 2)
	before := s.dump()
	marks := []outbox.Mark{
		// not claimed, no token
		{Seq: entries[2].Seq, To: outbox.Published},
		{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Published}, // good
		// another claim's token
		{Seq: taken[1].Seq, Token: claim.NewToken(), To: outbox.Published},
		// not claimed, another claim's token
		{Seq: entries[3].Seq, Token: taken[0].Token, To: outbox.Published},
		{Seq: entries[3].Seq + 999, Token: taken[0].Token, To: outbox.Pending}, // unknown Seq
	}
	late, err := s.db.MarkEntries(s.ctx, marks)
	s.ok(err, "mark")
	slices.Sort(late)
	same(s, "late marks", late, []int64{taken[1].Seq, entries[2].Seq, entries[3].Seq, entries[3].Seq + 999})
	same(s, "status of the good one", s.entry(taken[0].Seq).Status, outbox.Published)
	after := s.dump()
	same(s, "the other entries", after.entries[1:], before.entries[1:])
}

func markAfterLease(s *stage) {
	s.enqueue(line(5, "mail", "")...)
	taken := s.claim(three, 5)
	s.advance(lease + time.Hour)
	for i, e := range taken {
		m := everyMark(e)[i]
		s.mark(m)
		same(s, "status", s.entry(e.Seq).Status, m.To)
	}
}

func wrongMark(s *stage) {
	s.enqueue(line(2, "mail", "")...)
	taken := s.claim(three, 2)
	before := s.dump()
	for _, to := range []outbox.Status{outbox.Skipped, "", "held", "nonsense'; --"} {
		_, err := s.db.MarkEntries(s.ctx, []outbox.Mark{
			{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Published},
			{Seq: taken[1].Seq, Token: taken[1].Token, To: to},
		})
		s.invalid(err, "a mark to "+string(to))
	}
	_, err := s.db.MarkEntries(s.ctx, []outbox.Mark{{Seq: 1, To: outbox.Failed, After: -1}})
	s.invalid(err, "a mark with a negative time")
	s.unchanged(before, "marks to wrong statuses")
}

func publishedIsTheEnd(s *stage) {
	entries := s.enqueue(line(1, "mail", "ann")...)
	held := s.claimOne(entries[0].Seq)
	s.mark(outbox.Mark{Seq: held.Seq, Token: held.Token, To: outbox.Published})
	before := s.dump()
	for name, change := range map[string]func() (int, error){
		"requeue": func() (int, error) { return s.db.Requeue(s.ctx, outbox.Filter{}) },
		"skip":    func() (int, error) { return s.db.Skip(s.ctx, outbox.Filter{Seqs: []int64{held.Seq}}) },
	} {
		n, err := change()
		s.ok(err, name)
		same(s, "entries that "+name+" changed", n, 0)
	}
	s.claimed("a claim of a published entry")
	s.unchanged(before, "requeue and skip of a published entry")
	s.advance(1000 * time.Hour)
	s.claimed("a claim of an entry published a long time ago")
}
