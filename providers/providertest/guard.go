package providertest

import (
	"time"

	"github.com/kinora-go/kinora/outbox"
)

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
