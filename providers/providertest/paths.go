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

func noClaimInTx(s *stage) {
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		for name, has := range map[string]bool{
			"MarkEntries": is[interface {
				MarkEntries(context.Context, []provider.EntryMark) ([]int64, error)
			}](view),
			"ClaimEntries": is[interface {
				ClaimEntries(context.Context, provider.EntryQuery, claim.Terms) ([]provider.Entry, error)
			}](view),
			"AcquireLease": is[provider.Leases](view),
			"ClaimTasks": is[interface {
				ClaimTasks(context.Context, provider.TaskQuery, claim.Terms) ([]provider.Task, error)
			}](view),
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
	var taken []outbox.Entry
	var wait func() error
	err := s.inTx(s.ctx, func(view TxView, add Add) error {
		s.ok(add(s.ctx, "k", 1), "add") // takes the locks of a writer
		s.ok(view.Enqueue(s.ctx, line(2, "mail", "ben")...), "enqueue")
		wait = beginFor(200*time.Millisecond, func() (err error) { // it waits in a store with a single writer
			taken, err = provider.ClaimEntries(s.ctx, s.db, three, claim.Terms{Lease: lease, Limit: 10})
			return err
		})
		return undo
	})
	s.ok(wait(), "claim")
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	taken = append(taken, s.claim(three, 10)...)
	same(s, "claimed beside the transaction and after it", seqsOf(taken), seqsOf(committed))
}
