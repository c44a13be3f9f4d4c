package providertest

import (
	"context"
	"errors"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var pathCases = []testCase{
	{
		// Promise: G2.1
		name: "the path of a claim", play: claimPath,
		rule: "ClaimEntries makes one call of BatchClaimer if the store implements it, and otherwise takes one entry after another, as ClaimEntriesPortably always does",
	},
	{
		// Promise: G2.2
		name: "no claim in a transaction", play: noClaimInTx,
		rule: "A transaction of the caller has no claims, marks or leases: a claim is a transaction of its own",
	},
	{
		// Promise: G2.2
		name: "a claim beside an open transaction", play: claimBesideTx,
		rule: "A claim takes nothing of a transaction that is not committed: it takes the other entries, or waits until its context ends",
	},
}

// portable counts the calls of a claim. It does not implement BatchClaimer.
type portable struct {
	provider.Outbox
	reads, takes int
}

func (p *portable) EntryCandidates(ctx context.Context, q provider.EntryQuery, limit int) ([]provider.Entry, error) {
	p.reads++
	return p.Outbox.EntryCandidates(ctx, q, limit)
}

func (p *portable) TakeEntry(ctx context.Context, e provider.Entry, q provider.EntryQuery, t claim.Terms) (provider.Entry, bool, error) {
	p.takes++
	return p.Outbox.TakeEntry(ctx, e, q, t)
}

// batching implements BatchClaimer.
type batching struct {
	portable
	batches int
}

func (b *batching) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	b.batches++
	return b.Outbox.(provider.BatchClaimer).ClaimEntries(ctx, q, t)
}

func claimPath(s *stage) {
	entries := s.enqueue(line(3, "mail", "ann")...)
	p := &portable{Outbox: s.db}
	b := &batching{portable: portable{Outbox: s.db}}
	claims := func(what string, from provider.Outbox, claims claimFunc, reads, takes, batches int) {
		p.reads, p.takes, b.reads, b.takes, b.batches = 0, 0, 0, 0, 0
		taken, err := claims(s.ctx, from, three, claim.Terms{Lease: lease, Limit: 10})
		s.ok(err, what)
		same(s, what+": entries", seqsOf(taken), seqsOf(entries))
		same(s, what+": calls of EntryCandidates", p.reads+b.reads, reads)
		same(s, what+": calls of TakeEntry", p.takes+b.takes, takes)
		same(s, what+": calls of BatchClaimer", b.batches, batches)
		for _, e := range taken {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
		}
	}
	claims("ClaimEntries without BatchClaimer", p, provider.ClaimEntries, 1, 3, 0)
	claims("ClaimEntriesPortably", p, provider.ClaimEntriesPortably, 1, 3, 0)
	if is[provider.BatchClaimer](s.db) {
		claims("ClaimEntries with BatchClaimer", b, provider.ClaimEntries, 0, 0, 1)
		claims("ClaimEntriesPortably with BatchClaimer", b, provider.ClaimEntriesPortably, 1, 3, 0)
	}
}

func noClaimInTx(s *stage) {
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		for name, has := range map[string]bool{
			"EntryCandidates": is[interface {
				EntryCandidates(context.Context, provider.EntryQuery, int) ([]provider.Entry, error)
			}](view),
			"TakeEntry": is[interface {
				TakeEntry(context.Context, provider.Entry, provider.EntryQuery, claim.Terms) (provider.Entry, bool, error)
			}](view),
			"MarkEntries": is[interface {
				MarkEntries(context.Context, []provider.EntryMark) ([]int64, error)
			}](view),
			"ClaimEntries": is[provider.BatchClaimer](view),
			"AcquireLease": is[provider.Leases](view),
			"TakeTask": is[interface {
				TakeTask(context.Context, provider.Task, provider.TaskQuery, claim.Terms) (provider.Task, bool, error)
			}](view),
			"ClaimTasks": is[provider.TaskBatchClaimer](view),
		} {
			s.require(!has, "the transaction has no method %s", name)
		}
		return nil
	}), "commit")
}

func is[T any](v any) bool {
	_, ok := v.(T)
	return ok
}

func claimBesideTx(s *stage) {
	committed, undo := s.enqueue(line(1, "mail", "ann")...), errors.New("undo")
	for _, claims := range []claimFunc{provider.ClaimEntries, provider.ClaimEntriesPortably} {
		var taken []outbox.Entry
		var wait func() error
		err := s.inTx(s.ctx, func(view TxView, add Add) error {
			s.ok(add(s.ctx, "k", 1), "add") // takes the locks of a writer
			s.ok(view.Enqueue(s.ctx, line(2, "mail", "ben")...), "enqueue")
			wait = beginFor(200*time.Millisecond, func() (err error) { // it waits in a store with a single writer
				taken, err = claims(s.ctx, s.db, three, claim.Terms{Lease: lease, Limit: 10})
				return err
			})
			return undo
		})
		s.ok(wait(), "claim")
		s.require(errors.Is(err, undo), "the error %v is that of the function", err)
		taken = append(taken, s.claim(three, 10)...)
		same(s, "claimed beside the transaction and after it", seqsOf(taken), seqsOf(committed))
		for _, e := range taken {
			s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
		}
	}
}
