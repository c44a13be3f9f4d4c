package providertest

import (
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
)

const guardRule = "TakeEntry takes e if e is unchanged since it was read, still eligible, and every earlier open entry of its topic and key " +
	"is held by t.Token. It checks all of that in one atomic step. If e was not taken, the result is (e, false, nil)"

var guardCases = []testCase{
	{
		name: "a waiting head holds its key", play: waitingHead,
		rule: "No key runs past an entry that waits, has failed, or is claimed by another relay; and no other key waits for it",
	},
	{
		name: "an abandoned head holds its key", play: abandonedHead,
		rule: "An abandoned entry changes only by Requeue or Skip. Until then the later entries of its topic and key wait",
	},
	{
		name: "messages without a key wait for no other", play: keylessWaitForNone,
		rule: "An empty key is replaced by the message's id, so the message waits for no other",
	},
	{
		name: "a taken entry", play: takenEntry,
		rule: "Taking counts an attempt, sets the token and holder of t, and leases the entry for t.Lease",
	},
	{name: "an entry that is not eligible", rule: guardRule, play: takeNotEligible},
	// Promise: G3.1
	{name: "the head failed and the run was released meanwhile", rule: guardRule, play: headFailedMeanwhile},
	{name: "the head changed hands meanwhile", rule: guardRule, play: headChangedMeanwhile},
	{name: "the entry changed meanwhile", rule: guardRule, play: entryChangedMeanwhile},
	{name: "the holder of an expired claim came back meanwhile", rule: guardRule, play: expiredCameBack},
}

func waitingHead(s *stage) {
	ann := s.enqueue(line(3, "mail", "ann")...)
	ben := s.enqueue(line(2, "mail", "ben")...)
	audit := s.enqueue(line(1, "audit", "ann")...)
	head := s.claimOne(ann[0].Seq)
	s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Failed, After: 2 * time.Hour})
	s.claimed("a claim while ann's head is in backoff", append(ben, audit...)...)
	more := s.enqueue(line(1, "mail", "ann")...)
	s.claimed("a claim of a later entry of the waiting key")
	s.advance(3 * time.Hour)
	s.claimed("a claim once the backoff is over", append(ann, more...)...)
}

func abandonedHead(s *stage) {
	ann := s.enqueue(line(3, "mail", "ann")...)
	ben := s.enqueue(line(1, "mail", "ben")...)
	abandon := func(seq int64) {
		e := s.claimOne(seq)
		s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned, Error: "*net.OpError"})
	}
	abandon(ann[0].Seq)
	s.claimed("a claim behind an abandoned head", ben...)
	s.advance(100 * time.Hour)
	same(s, "a claim of the other key, a long time later", seqsOf(s.claim(three, 10)), seqsOf(ben))
	n, err := s.db.Requeue(s.ctx, outbox.Filter{Seqs: seqsOf(ann[:1])})
	s.ok(err, "requeue")
	same(s, "entries requeued", n, 1)
	abandon(ann[0].Seq)
	s.claimed("a claim behind the head, abandoned again")
	n, err = s.db.Skip(s.ctx, outbox.Filter{Seqs: seqsOf(ann[:1])})
	s.ok(err, "skip")
	same(s, "entries skipped", n, 1)
	s.claimed("a claim once the head is skipped", ann[1:]...)
}

func keylessWaitForNone(s *stage) {
	entries := s.enqueue(line(4, "mail", "")...)
	head := s.claimOne(entries[0].Seq)
	s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Abandoned})
	second := s.claimOne(entries[1].Seq)
	s.mark(outbox.Mark{Seq: second.Seq, Token: second.Token, To: outbox.Failed, After: time.Hour})
	s.claimed("a claim next to waiting entries", entries[2:]...)
}

// relay claims in single steps.
type relay struct {
	*stage
	terms claim.Terms
}

func (s *stage) relay(holder string) relay {
	return relay{s, claim.Terms{Holder: holder, Token: claim.NewToken(), Lease: lease, Limit: 10}}
}

func (r relay) candidates() []outbox.Entry {
	r.Helper()
	found, err := r.db.EntryCandidates(r.ctx, three, r.terms.Limit)
	r.ok(err, "read candidates")
	return found
}

// take fails the case unless the entry is taken or refused as expected.
func (r relay) take(e outbox.Entry, want bool) outbox.Entry {
	r.Helper()
	got, ok, err := r.db.TakeEntry(r.ctx, e, three, r.terms)
	r.ok(err, "take an entry")
	same(r.stage, "taken by "+r.terms.Holder, ok, want)
	if !ok {
		same(r.stage, "returned entry of a refused take", plain(got), plain(e))
	}
	return got
}

func takenEntry(s *stage) {
	entries := s.enqueue(line(2, "mail", "ann")...)
	a := s.relay("a")
	found := a.candidates()
	same(s, "candidates", seqsOf(found), seqsOf(entries))
	for i, e := range found {
		got := plain(a.take(e, true))
		want := entries[i]
		want.Status, want.Attempts, want.Token, want.ClaimedBy = outbox.Claimed, 1, a.terms.Token, "a"
		want.LastAttemptedAt, want.NextAttemptAt = got.LastAttemptedAt, got.LastAttemptedAt.Add(lease)
		same(s, "taken entry", got, want)
		same(s, "stored entry", s.entry(e.Seq), want)
	}
	before := s.dump()
	for _, e := range found {
		s.relay("b").take(e, false)
	}
	s.unchanged(before, "taking taken entries")
}

func takeNotEligible(s *stage) {
	for status, e := range s.oneOfEach("1") {
		r := s.relay("b")
		before := s.dump()
		r.take(e, status == outbox.Pending)
		if status != outbox.Pending {
			s.unchanged(before, "a refused take of an entry that is "+string(status))
		}
	}
}

// headFailedMeanwhile is the interleaving that a check of the entry alone would permit: v2 would
// be published before v1.
func headFailedMeanwhile(s *stage) {
	v := s.enqueue(line(2, "mail", "ann")...)
	a, b := s.relay("a"), s.relay("b")
	found := a.candidates()
	same(s, "candidates of a", seqsOf(found), seqsOf(v))
	for _, e := range b.candidates() {
		b.take(e, true)
	}
	s.mark(
		outbox.Mark{Seq: v[0].Seq, Token: b.terms.Token, To: outbox.Failed, After: time.Hour},
		outbox.Mark{Seq: v[1].Seq, Token: b.terms.Token, To: outbox.Pending},
	)
	before := s.dump()
	a.take(found[0], false)
	a.take(found[1], false)
	a.take(s.entry(v[1].Seq), false) // not even after reading it again
	s.unchanged(before, "refused takes")
}

// headChangedMeanwhile leaves v2 unchanged since a read it: only the check of v1 can refuse.
func headChangedMeanwhile(s *stage) {
	for name, c := range map[string]struct {
		to    outbox.Status // status that b gives v1; empty: b still holds it
		taken bool          // a may take v2 afterwards
	}{
		"held":      {"", false},
		"renewed":   {outbox.Claimed, false},
		"failed":    {outbox.Failed, false},
		"abandoned": {outbox.Abandoned, false},
		"released":  {outbox.Pending, false},
		"published": {outbox.Published, true},
	} {
		v := s.enqueue(line(2, "mail", "head "+name)...)
		a, b := s.relay("a"), s.relay("b")
		found := a.candidates()
		same(s, "candidates of a", seqsOf(found), seqsOf(v))
		b.take(found[0], true)
		if c.to != "" {
			s.mark(outbox.Mark{Seq: v[0].Seq, Token: b.terms.Token, To: c.to, After: time.Hour})
		}
		same(s, name+": the second entry is unchanged", s.entry(v[1].Seq), plain(found[1]))
		a.take(found[1], c.taken)
		_, err := s.db.Skip(s.ctx, outbox.Filter{}) // so that it does not affect the next row
		s.ok(err, "skip")
	}
	v := s.enqueue(line(2, "mail", "head skipped")...)
	a := s.relay("a")
	found := a.candidates()
	_, err := s.db.Skip(s.ctx, outbox.Filter{Seqs: seqsOf(v[:1])})
	s.ok(err, "skip")
	a.take(found[1], true)

	v = s.enqueue(line(3, "mail", "head not taken")...)
	c := s.relay("c")
	found = c.candidates()
	same(s, "candidates of c", seqsOf(found), seqsOf(v))
	c.take(found[1], false) // its head is claimable, but c does not hold it
	c.take(found[0], true)
	c.take(found[2], false)
	c.take(found[1], true)
	c.take(found[2], true)
}

func entryChangedMeanwhile(s *stage) {
	for name, change := range map[string]func(held outbox.Entry){
		"held":      func(outbox.Entry) {},
		"published": func(e outbox.Entry) { s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}) },
		"failed":    func(e outbox.Entry) { s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Failed}) },
		"backed off": func(e outbox.Entry) {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Failed, After: time.Hour})
		},
		"abandoned": func(e outbox.Entry) { s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned}) },
		"taken again": func(e outbox.Entry) {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Failed})
			s.claimOne(e.Seq)
		},
	} {
		s.enqueue(line(1, "mail", name)...)
		a := s.relay("a")
		found := a.candidates()
		same(s, "candidates", len(found), 1)
		change(s.claimOne(found[0].Seq))
		before := s.dump()
		a.take(found[0], false)
		s.unchanged(before, "a refused take of an entry that was "+name)
		_, err := s.db.Skip(s.ctx, outbox.Filter{}) // so that it does not affect the next row
		s.ok(err, "skip")
	}
}

// expiredCameBack: a reads an expired claim; before it takes the entry, the holder renews or
// publishes.
func expiredCameBack(s *stage) {
	for _, to := range []outbox.Status{outbox.Claimed, outbox.Published} {
		entries := s.enqueue(line(1, "mail", string(to))...)
		held := s.claimOne(entries[0].Seq)
		s.advance(lease + time.Hour)
		a := s.relay("a")
		found := a.candidates()
		same(s, "candidates", seqsOf(found), seqsOf(entries))
		s.mark(outbox.Mark{Seq: held.Seq, Token: held.Token, To: to, After: lease})
		before := s.dump()
		a.take(found[0], false)
		s.unchanged(before, "a refused take of an entry whose holder came back")
		if to == outbox.Claimed { // so that it does not affect the next row
			s.mark(outbox.Mark{Seq: held.Seq, Token: held.Token, To: outbox.Published})
		}
	}
}
