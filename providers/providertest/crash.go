package providertest

import (
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var crashCases = []testCase{
	{
		name: "a crashed claim makes a suspect", play: crashMakesSuspect,
		rule: "An entry whose claim crashed (its lease ended without a mark) becomes suspect and is claimed alone, so that it harms no other entry",
	},
	{
		name: "a suspect stays alone", play: suspectStaysAlone,
		rule: "A suspect is always claimed alone, also after it failed or was released",
	},
	{
		// Promise: G2.3
		name: "at the limit of attempts", play: crashAtLimit,
		rule: "An entry whose claim crashed at q.Attempts is abandoned by the claim (LastError \"crashed\") and not taken; its key waits",
	},
	{
		name: "no limit of attempts", play: noLimit,
		rule: "Query.Attempts ≤ 0: no limit",
	},
	{
		// Promise: G2.3
		name: "an entry that kills its worker", play: killer,
		rule: "An entry that always crashes its worker is abandoned after exactly its attempts, and harms no other entry",
	},
}

// claimOut claims until no entry is left. A suspect must be claimed alone.
func (s *stage) claimOut(limit int) map[int64]outbox.Entry {
	s.Helper()
	all := map[int64]outbox.Entry{}
	for taken := s.claim(three, limit); len(taken) > 0; taken = s.claim(three, limit) {
		for _, e := range taken {
			s.require(!e.Suspect || len(taken) == 1, "suspect %d is claimed alone, not with %d others", e.Seq, len(taken)-1)
			all[e.Seq] = e
		}
	}
	return all
}

func crashMakesSuspect(s *stage) {
	entries := s.enqueue(append(line(2, "mail", "ann"), line(2, "mail", "ben")...)...)
	s.claimed("the first claim", entries...)
	s.advance(lease + time.Hour)
	fresh := s.enqueue(line(2, "mail", "cid")...)
	// The second entries of ann and ben wait behind the first ones, which other claims have.
	all := s.claimOut(1000)
	same(s, "entries claimed, suspects alone", len(all), 4)
	for _, e := range []outbox.Entry{entries[0], entries[2]} {
		got := all[e.Seq]
		same(s, "suspect, attempts", []any{got.Suspect, got.Attempts}, []any{true, 2})
		same(s, "stored entry", s.entry(got.Seq), plain(got))
	}
	for _, e := range fresh {
		same(s, "suspect, attempts of a new one", []any{all[e.Seq].Suspect, all[e.Seq].Attempts}, []any{false, 1})
	}
}

func suspectStaysAlone(s *stage) {
	entries := s.enqueue(line(4, "mail", "")...)
	first, suspect := s.claimOne(entries[0].Seq), entries[1].Seq
	s.claimOne(suspect)
	s.mark(outbox.Mark{Seq: first.Seq, Token: first.Token, To: outbox.Pending})
	s.advance(lease + time.Hour)
	for _, to := range []outbox.Status{outbox.Failed, outbox.Pending, outbox.Failed} {
		all := s.claimOut(1000)
		same(s, "entries claimed", len(all), len(entries))
		for seq, e := range all {
			same(s, "suspect", e.Suspect, seq == suspect)
			m := outbox.Mark{Seq: seq, Token: e.Token, To: outbox.Pending}
			if seq == suspect {
				m.To = to
			}
			s.mark(m)
		}
	}
}

func crashAtLimit(s *stage) {
	ann := s.enqueue(line(2, "mail", "ann")...)
	for attempt := 1; attempt <= three.Attempts; attempt++ {
		taken := s.claim(three, 1)
		same(s, "claimed", seqsOf(taken), seqsOf(ann[:1]))
		same(s, "attempts", taken[0].Attempts, attempt)
		s.advance(lease + time.Hour)
	}
	ben := s.enqueue(line(1, "mail", "ben")...)
	_, other := s.claimOut(10)[ben[0].Seq]
	same(s, "the other key is claimed", other, true)
	e := s.entry(ann[0].Seq)
	same(s, "the abandoned entry", []any{e.Status, e.LastError, e.Attempts, e.Suspect},
		[]any{outbox.Abandoned, "crashed", three.Attempts, true})
	s.advance(1000 * time.Hour)
	s.claimed("a claim a long time later", ben...)
	same(s, "status of the entry behind it", s.entry(ann[1].Seq).Status, outbox.Pending)
	n, err := s.db.Skip(s.ctx, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}})
	s.ok(err, "skip")
	same(s, "entries skipped", n, 1)
	s.claimed("a claim once the head is skipped", ann[1])
}

func noLimit(s *stage) {
	s.enqueue(line(1, "mail", "ann")...)
	for attempt := 1; attempt <= 20; attempt++ {
		taken := s.claim(provider.EntryQuery{}, 1)
		same(s, "entries claimed", len(taken), 1)
		same(s, "attempts", taken[0].Attempts, attempt)
		s.advance(lease + time.Hour)
	}
}

// killer lets one worker claim 50 entries repeatedly, and crash whenever it reaches the deadly
// one. Only that entry may be abandoned. All others must be published, except those behind it.
func killer(s *stage) {
	const batch = 50
	entries := s.enqueue(line(batch, "mail", "")...)
	deadly := entries[17]
	behind := s.enqueue(outbox.Message{Topic: "mail", Key: deadly.Key}, outbox.Message{Topic: "mail", Key: deadly.Key})
	deaths, published := 0, 0
	for claims := 0; published < batch-1 || s.entry(deadly.Seq).Status != outbox.Abandoned; claims++ {
		s.require(claims < 10*batch, "after %d claims, %d entries are published, and the deadly one is %s", claims, published, s.entry(deadly.Seq).Status)
		taken := s.claimAs(three, claim.Terms{Holder: "mortal", Lease: lease, Limit: batch})
		died := false
		for _, e := range taken {
			if died = e.Seq == deadly.Seq; died {
				deaths++
				s.require(deaths == 1 || len(taken) == 1, "a suspect is claimed alone, not with %d others", len(taken)-1)
				break
			}
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published})
			published++
		}
		if died || len(taken) == 0 {
			s.advance(lease + time.Hour)
		}
	}
	same(s, "claims that the deadly entry ended", deaths, three.Attempts)
	s.counted(map[outbox.Status]int64{outbox.Published: batch - 1, outbox.Abandoned: 1, outbox.Pending: int64(len(behind))})
	s.claimed("a claim of the entries behind the deadly one")
}
