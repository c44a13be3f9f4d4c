package providertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// lease is longer than a case runs, unless the case moves the clock.
const lease = 10 * time.Hour

var claimCases = []testCase{
	{
		// Promise: G2.2
		name: "a claim returns the claimed entries", play: claimPostState,
		rule: "Claimed entries are returned in order of Seq and as they are stored: claimed, the attempt counted, token and holder set, leased for t.Lease",
	},
	{
		name: "defaults of a claim", play: claimDefaults,
		rule: "Terms: a zero lease means 5m, a zero limit 50, a zero token a new one; invalid terms are claim.ErrTerms",
	},
	{
		name: "a limit", play: claimLimit,
		rule: "A claim takes at most t.Limit entries, the first ones in order of Seq",
	},
	{
		name: "topics", play: claimTopics,
		rule: "Query.Topics: only entries of these topics; empty: all",
	},
	{
		name: "all topics but some", play: claimExcept,
		rule: "Query.Except: not entries of these topics",
	},
	{
		name: "without order", play: claimUnordered,
		rule: "Query.Unordered: entries do not wait for earlier ones of their key",
	},
	{
		name: "a near scan", play: claimNear,
		rule: "Query.Near: read only the first eligible entries, no more than may be claimed; Query.After: only entries with a greater Seq",
	},
	{
		name: "a near scan past waiting entries", play: claimNearPast,
		rule: "Query.Near: of the first eligible entries, those that do not wait are claimed",
	},
	{
		name: "a scan after a Seq", play: claimAfter,
		rule: "Query.After: only entries with a greater Seq",
	},
	{
		name: "a limit of payload", play: claimBytes,
		rule: "Query.Bytes: at most this much payload, unless a single entry has more; ≤ 0: no limit",
	},
	{
		// Promise: G2.1
		name: "a live lease is never stolen", play: liveLease,
		rule: "An entry has at most one live claim. A live lease is never taken over, an expired one is",
	},
	{
		name: "a failed entry waits for its backoff", play: failedWaits,
		rule: "An entry is eligible only if its NextAttemptAt is not in the future on the store's clock",
	},
	{
		name: "a key is claimed as a run", play: keyIsARun,
		rule: "An entry is claimed only together with all earlier open ones of its topic and key",
	},
	{
		name: "a claim with an ended context", play: claimEndedContext,
		rule: "A claim, a mark or a read whose context has ended returns an error, and nothing changes",
	},
}

// three is the query of most cases: three attempts.
var three = provider.EntryQuery{Attempts: 3}

// claim claims at most limit entries. It fails the case on an error, or if they are not in order.
func (s *stage) claim(q provider.EntryQuery, limit int) []outbox.Entry {
	s.Helper()
	return s.claimAs(q, claim.Terms{Holder: "a", Lease: lease, Limit: limit})
}

func (s *stage) claimAs(q provider.EntryQuery, t claim.Terms) []outbox.Entry {
	s.Helper()
	taken, err := provider.ClaimEntries(s.ctx, s.db, q, t)
	s.ok(err, "claim")
	for i, e := range taken {
		s.require(i == 0 || taken[i-1].Seq < e.Seq, "entry %d comes in order", e.Seq)
	}
	return taken
}

// claimOne claims one entry, which must be this one.
func (s *stage) claimOne(seq int64) outbox.Entry {
	s.Helper()
	taken := s.claim(three, 1)
	same(s, "entries of a claim of one", seqsOf(taken), []int64{seq})
	return taken[0]
}

// claimPast claims one entry, past the entries of other keys ahead of it.
func (s *stage) claimPast(seq int64) outbox.Entry {
	s.Helper()
	taken := s.claim(provider.EntryQuery{Attempts: 3, After: seq - 1}, 1)
	same(s, "entries of a claim of one", seqsOf(taken), []int64{seq})
	return taken[0]
}

// claimed fails the case unless a claim of all entries takes exactly these.
func (s *stage) claimed(what string, want ...outbox.Entry) []outbox.Entry {
	s.Helper()
	taken := s.claim(three, 1000)
	same(s, what, seqsOf(taken), seqsOf(want))
	return taken
}

func claimPostState(s *stage) {
	entries := s.enqueue(append(line(3, "mail", "ann"), line(2, "audit", "ben")...)...)
	t := claim.Terms{Holder: "host'1/77", Token: claim.NewToken(), Lease: 90 * time.Second, Limit: 10}
	taken := s.claimAs(three, t)
	same(s, "claimed", seqsOf(taken), seqsOf(entries))
	for i, e := range taken {
		was := entries[i]
		s.require(!e.LastAttemptedAt.Before(was.CreatedAt), "an attempt at %v follows the creation at %v", e.LastAttemptedAt, was.CreatedAt)
		same(s, "length of the lease", e.NextAttemptAt.Sub(e.LastAttemptedAt), t.Lease)
		want := was
		want.Status, want.Attempts, want.Token, want.ClaimedBy = outbox.Claimed, 1, t.Token, t.Holder
		want.LastAttemptedAt, want.NextAttemptAt = plain(e).LastAttemptedAt, plain(e).NextAttemptAt
		same(s, "returned entry", plain(e), want)
		same(s, "stored entry", s.entry(e.Seq), want)
		same(s, "zone of NextAttemptAt", e.NextAttemptAt.Location(), time.UTC)
		same(s, "zone of LastAttemptedAt", e.LastAttemptedAt.Location(), time.UTC)
	}
}

func claimDefaults(s *stage) {
	s.enqueue(line(60, "mail", "")...)
	taken := s.claimAs(provider.EntryQuery{}, claim.Terms{})
	same(s, "entries of a claim without a limit", len(taken), 50)
	for _, e := range taken {
		same(s, "lease", e.NextAttemptAt.Sub(e.LastAttemptedAt), 5*time.Minute)
		s.require(e.Token != claim.Token{} && e.Token == taken[0].Token, "the claim has a new token")
	}
	for _, t := range []claim.Terms{{Lease: -time.Second}, {Lease: time.Microsecond}, {Limit: -1}} {
		_, err := provider.ClaimEntries(s.ctx, s.db, provider.EntryQuery{}, t)
		s.require(errors.Is(err, claim.ErrTerms), "terms %+v: the error %v is ErrTerms", t, err)
	}
	same(s, "entries left", len(s.claimAs(provider.EntryQuery{}, claim.Terms{Lease: math.MaxInt64})), 10)
	same(s, "entries of an empty claim", len(s.claimAs(provider.EntryQuery{}, claim.Terms{})), 0)
}

func claimLimit(s *stage) {
	entries := s.enqueue(append(line(4, "mail", "ann"), line(4, "mail", "ben")...)...)
	same(s, "a claim of three", seqsOf(s.claim(three, 3)), seqsOf(entries[:3]))
	// ann's last entry waits behind those three.
	same(s, "the next claim of three", seqsOf(s.claim(three, 3)), seqsOf(entries[4:7]))
	same(s, "a claim when all entries wait", len(s.claim(three, 3)), 0)
}

func claimTopics(s *stage) {
	var entries []outbox.Entry
	for _, topic := range []string{"mail", "audit", "mail", "o'dd %", "audit", "mail"} {
		entries = append(entries, s.enqueue(line(1, topic, "")...)...)
	}
	pick := func(is ...int) (seqs []int64) {
		for _, i := range is {
			seqs = append(seqs, entries[i].Seq)
		}
		return seqs
	}
	query := func(topics ...string) provider.EntryQuery { return provider.EntryQuery{Topics: topics} }
	same(s, "entries of an unknown topic", len(s.claim(query("nothing"), 10)), 0)
	same(s, "entries of audit", seqsOf(s.claim(query("audit"), 10)), pick(1, 4))
	same(s, "entries of two topics, limited", seqsOf(s.claim(query("o'dd %", "mail"), 3)), pick(0, 2, 3))
	same(s, "entries of any topic", seqsOf(s.claim(query(), 10)), pick(5))
}

func claimExcept(s *stage) {
	var entries []outbox.Entry
	for _, topic := range []string{"mail", "audit", "o'dd %", "mail"} {
		entries = append(entries, s.enqueue(line(1, topic, "ann")...)...)
	}
	for _, c := range []struct {
		q    provider.EntryQuery
		want []outbox.Entry
	}{
		{provider.EntryQuery{Topics: []string{"mail"}, Except: []string{"mail"}}, nil},
		{provider.EntryQuery{Except: []string{"mail", "o'dd %", "nothing"}}, entries[1:2]},
		{provider.EntryQuery{Topics: []string{"mail", "audit"}, Except: []string{"audit"}}, []outbox.Entry{entries[0], entries[3]}},
		{provider.EntryQuery{Except: []string{"mail"}}, entries[2:3]},
	} {
		same(s, "claimed entries", seqsOf(s.claim(c.q, 10)), seqsOf(c.want))
	}
}

func claimUnordered(s *stage) {
	free := provider.EntryQuery{Attempts: 3, Unordered: true}
	ann := s.enqueue(line(5, "mail", "ann")...)
	taken := s.claim(free, 3)
	same(s, "the first claim", seqsOf(taken), seqsOf(ann[:3]))
	s.mark(
		outbox.Mark{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Failed, After: time.Hour},
		outbox.Mark{Seq: taken[1].Seq, Token: taken[1].Token, To: outbox.Abandoned},
	)
	s.claimed("an ordered claim behind a failed, an abandoned and a claimed entry")
	same(s, "a claim of an entry behind them", seqsOf(s.claim(provider.EntryQuery{Unordered: true, After: ann[3].Seq}, 10)), seqsOf(ann[4:]))
	same(s, "a claim of the last one", seqsOf(s.claim(free, 10)), seqsOf(ann[3:4]))
	same(s, "a claim when all wait or are claimed", len(s.claim(free, 10)), 0)
	// all claims but the first crashed: each entry is claimed alone, whatever is ahead of it
	s.advance(lease + time.Hour)
	for _, e := range []outbox.Entry{ann[0], ann[2], ann[3], ann[4]} {
		again := s.claim(free, 10)
		same(s, "a claim of a crashed entry", seqsOf(again), []int64{e.Seq})
		s.mark(outbox.Mark{Seq: e.Seq, Token: again[0].Token, To: outbox.Published})
	}
}

// claimNear scans near with and without topics. A near scan must respect the order of a key too.
func claimNear(s *stage) {
	for _, q := range []provider.EntryQuery{{}, {Topics: []string{"mail"}}, {Except: []string{"other"}}} {
		behind := func(e outbox.Entry) provider.EntryQuery {
			q := q
			q.Near, q.After = true, e.Seq
			return q
		}
		zoe := s.enqueue(line(1, "mail", "zoe")...)[0]
		ann, ben := s.enqueue(line(4, "mail", "ann")...), s.enqueue(line(2, "mail", "ben")...)
		same(s, "claimed behind the first of a key, which waits", len(s.claim(behind(ann[0]), 3)), 0)
		first := s.claim(behind(zoe), 1)
		same(s, "claimed by a near scan", seqsOf(first), seqsOf(ann[:1]))
		same(s, "claimed among the next three", len(s.claim(behind(zoe), 3)), 0)
		same(s, "claimed among the next four", seqsOf(s.claim(behind(zoe), 4)), seqsOf(ben[:1]))
		same(s, "claimed by a full scan, behind two claims", seqsOf(s.claim(q, 10)), []int64{zoe.Seq})
		s.mark(outbox.Mark{Seq: first[0].Seq, Token: first[0].Token, To: outbox.Abandoned})
		same(s, "claimed by a near scan behind an abandoned entry", len(s.claim(behind(zoe), 10)), 0)
		s.hold(3)
		late := s.enqueue(line(1, "mail", "ann")...)
		same(s, "claimed by a near scan behind held entries", len(s.claim(behind(ben[1]), 10)), 0)
		s.resolve(s.db.Skip, outbox.Filter{Seqs: []int64{ann[0].Seq}}, 1)
		same(s, "claimed by a near scan once the head is skipped", seqsOf(s.claim(behind(zoe), 10)), seqsOf(append(ann[1:], late...)))
		s.advance(2 * lease) // each claim crashed: each entry is claimed alone
		for range 6 {
			again := s.claim(behind(outbox.Entry{Seq: zoe.Seq - 1}), 10)
			same(s, "entries claimed alone", len(again), 1)
			s.mark(outbox.Mark{Seq: again[0].Seq, Token: again[0].Token, To: outbox.Published})
		}
		for _, e := range s.claim(q, 10) {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published})
		}
		same(s, "entries left", len(s.claim(q, 10)), 0)
	}
}

// claimNearPast: a waiting entry counts towards the limit of a near scan, and no more. It does
// not end the batch, as a suspect would, and its payload does not count.
func claimNearPast(s *stage) {
	near := provider.EntryQuery{Attempts: 3, Near: true, Bytes: 100}
	ann := s.enqueue(line(2, "mail", "ann")...)
	first := s.claim(three, 10)
	same(s, "claimed", len(first), 2)
	s.advance(2 * lease) // crashed: each is claimed alone
	head := s.claimOne(ann[0].Seq)
	s.mark(outbox.Mark{Seq: head.Seq, Token: head.Token, To: outbox.Abandoned})
	ben := line(2, "mail", "ben")
	ben[1].Payload = bytes.Repeat([]byte("x"), 1000)
	large := s.enqueue(ben...)
	same(s, "ben's first", seqsOf(s.claim(three, 1)), []int64{large[0].Seq})
	zoe := s.enqueue(line(3, "mail", "zoe")...)
	same(s, "claimed past a waiting suspect and a large waiting entry", seqsOf(s.claim(near, 10)), seqsOf(zoe))
}

func claimAfter(s *stage) {
	for i, q := range []provider.EntryQuery{{}, {Topics: []string{"mail"}}, {Except: []string{"other"}}, {Unordered: true}} {
		ann := s.enqueue(line(3, "mail", fmt.Sprint("ann", i))...)
		ben := s.enqueue(line(3, "mail", fmt.Sprint("ben", i))...)
		q.After = ann[1].Seq
		want := ben // ann's last entry waits for those before After
		if q.Unordered {
			want = append(ann[2:3:3], ben...)
		}
		same(s, "claimed", seqsOf(s.claim(q, 10)), seqsOf(want))
		q.After = 0
		s.claim(q, 10)
	}
}

func claimBytes(s *stage) {
	ms := line(6, "mail", "")
	for i, n := range []int{100, 0, 50, 0, 300, 1} {
		ms[i].Payload = bytes.Repeat([]byte("x"), n)
	}
	entries := s.enqueue(ms...)
	for _, q := range []provider.EntryQuery{{Bytes: 149}, {Bytes: 149, Topics: []string{"mail"}}, {Bytes: 149, Unordered: true}} {
		at := 0
		for _, n := range []int{2, 2, 1, 1, 0} { // 100 + 0, 50 + 0, 300 although it is too much, 1
			taken := s.claim(q, 10)
			same(s, "claimed", seqsOf(taken), seqsOf(entries[at:at+n]))
			at += n
		}
		for _, e := range s.entries(outbox.Filter{}) {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
		}
	}
	same(s, "claimed without a limit", len(s.claim(provider.EntryQuery{}, 10)), 6)
}

func liveLease(s *stage) {
	entries := s.enqueue(line(3, "mail", "")...)
	first := s.claimed("the first claim", entries...)
	s.claimed("a claim during the lease")
	s.advance(lease - time.Hour)
	s.claimed("a claim an hour before the lease's end")
	s.advance(2 * time.Hour)
	for range first { // each alone: its claim crashed
		for _, e := range s.claim(three, 10) {
			s.require(e.Token != first[0].Token, "a claim that takes over has a new token")
			same(s, "attempts after the take-over", e.Attempts, 2)
		}
	}
	s.claimed("a claim after all were taken over")
}

func failedWaits(s *stage) {
	entries := s.enqueue(line(2, "mail", "")...)
	taken := s.claimed("the first claim", entries...)
	s.mark(outbox.Mark{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Failed, After: 2 * time.Hour})
	s.mark(outbox.Mark{Seq: taken[1].Seq, Token: taken[1].Token, To: outbox.Failed})
	again := s.claimed("a claim of the entry that failed without a backoff", entries[1])
	same(s, "attempts", again[0].Attempts, 2)
	s.advance(time.Hour)
	s.claimed("a claim during the backoff")
	s.advance(2 * time.Hour)
	again = s.claimed("a claim after the backoff", entries[0])
	same(s, "attempts", again[0].Attempts, 2)
	same(s, "suspect", again[0].Suspect, false)
}

func keyIsARun(s *stage) {
	ann := s.enqueue(line(3, "mail", "ann")...)
	ben := s.enqueue(line(2, "mail", "ben")...)
	audit := s.enqueue(line(2, "audit", "ann")...)
	first := s.claim(three, 1)
	same(s, "a claim of one", seqsOf(first), seqsOf(ann[:1]))
	rest := s.claimed("a claim of all entries that do not wait behind it", append(ben, audit...)...)
	s.mark(outbox.Mark{Seq: first[0].Seq, Token: first[0].Token, To: outbox.Published})
	s.claimed("the other entries of the key, once its head is published", ann[1:]...)
	for _, e := range rest[:2] {
		s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
	}
	s.claimed("the run of the other key, once it is released", ben...)
}

func claimEndedContext(s *stage) {
	entries := s.enqueue(line(2, "mail", "")...)
	held := s.claimOne(entries[0].Seq)
	before := s.dump()
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	_, claimErr := provider.ClaimEntries(ctx, s.db, three, claim.Terms{Lease: lease})
	_, markErr := s.db.MarkEntries(ctx, []outbox.Mark{{Seq: held.Seq, Token: held.Token, To: outbox.Published}})
	_, listErr := s.db.Entries(ctx, outbox.Filter{})
	_, countErr := s.db.StatusCounts(ctx)
	_, requeueErr := s.db.Requeue(ctx, outbox.Filter{})
	_, skipErr := s.db.Skip(ctx, outbox.Filter{})
	_, holdErr := s.db.HoldEntries(ctx, time.Hour, 10)
	_, _, deleteErr := s.db.DeleteEntries(ctx, outbox.EntryRetention{Published: time.Hour, Skipped: time.Hour}, 0)
	for i, err := range []error{claimErr, markErr, listErr, countErr, requeueErr, skipErr, holdErr, deleteErr} {
		s.require(errors.Is(err, context.Canceled), "the error %v of call %d is context.Canceled", err, i)
	}
	s.unchanged(before, "calls whose context had ended")
}
