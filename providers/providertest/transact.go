package providertest

import (
	"context"
	"errors"
	"runtime"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var transactCases = []testCase{
	{
		// Promise: G1.6
		name: "transact commits it all", play: transacts(txCommits), options: Options{Route: outbox.ByCategory},
		rule: "Events, entries and the caller's writes of one transaction are visible when it commits, and not before",
	},
	{
		// Promise: G1.6
		name: "transact rolls it all back", play: transacts(txRollsBack), options: Options{Route: outbox.ByCategory},
		rule: "If the function returns an error, the transaction leaves nothing, and the error is returned",
	},
	{
		name: "transact reads its own appends", play: transacts(txReadsItsOwn),
		rule: "A TxStore is a Store inside a transaction: it reads the events that the transaction appended, in order, and the earlier ones",
	},
	{
		name: "errors leave transact's transaction usable", play: transacts(txStaysUsable), options: Options{Route: outbox.ByCategory},
		rule: "After any error that Append documents, the transaction is usable, and nothing of that append is in it",
	},
	{
		// Promise: G1.6
		name: "transact ends without a return", play: transacts(transactEnds), options: Options{Route: outbox.ByCategory},
		rule: "If the function panics or calls runtime.Goexit, or if its context ends, the transaction leaves nothing, and the next one does not wait",
	},
	{
		// Promise: G1.6
		name: "transact returns a conflict", play: transacts(transactConflicts),
		rule: "A conflict that another run of the function cannot resolve is returned, after at most two runs",
	},
	{
		name: "transact wakes relays", play: transacts(transactWakes),
		rule: "After the commit, the channel of Enqueued is closed (checked if the provider is a provider.Waker)",
	},
}

// transacts plays a case with Transact in place of InTx, if the provider has it.
func transacts(play func(s *stage)) func(s *stage) {
	return func(s *stage) {
		if s.transact == nil {
			s.Log("this provider has no Transact")
			return
		}
		s.inTx = s.transact
		play(s)
	}
}

func transactEnds(s *stage) {
	before := s.dump("review-1")
	for how, end := range map[string]func(cancel func()){
		"panic": func(func()) { panic("no") }, "Goexit": func(func()) { runtime.Goexit() }, "the end of ctx": func(cancel func()) { cancel() },
	} {
		ctx, cancel := context.WithCancel(s.ctx)
		done := make(chan error, 1)
		go func() {
			err := errors.New("it did not return")
			defer func() { done <- err }()
			defer func() { _ = recover() }()
			err = s.inTx(ctx, func(view TxView, add Add) error {
				_, err := view.Append(ctx, "review-1", eventstore.Any, drafts(2))
				if err = errors.Join(err, add(ctx, "k", 5)); err == nil {
					end(cancel)
				}
				return err
			})
		}()
		s.require(<-done != nil, "a transaction that ends by %s is not committed", how)
		cancel()
		s.unchanged(before, "a transaction that ends by "+how)
		same(s, "total", s.total("k"), 0)
	}
	s.ok(s.inTx(s.ctx, func(_ TxView, add Add) error { return add(s.ctx, "k", 1) }), "the next transaction")
	same(s, "total", s.total("k"), 1)
}

func transactConflicts(s *stage) {
	s.append("review-1", eventstore.NoStream, draft())
	runs := 0
	err := s.inTx(s.ctx, func(view TxView, add Add) error {
		runs++
		s.ok(add(s.ctx, "k", 1), "add")
		_, err := view.Append(s.ctx, "review-1", eventstore.NoStream, drafts(1))
		return err
	})
	s.conflict(err, "append", eventstore.ConflictError{Stream: "review-1", Actual: 1})
	s.require(runs <= 2, "%d runs are at most two", runs)
	same(s, "total", s.total("k"), 0)
}

func transactWakes(s *stage) {
	waker, ok := s.store.(provider.Waker)
	if !ok {
		s.Log("this provider is not a provider.Waker")
		return
	}
	hint := waker.Enqueued()
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		return view.Enqueue(s.ctx, outbox.Message{Topic: "mail"})
	}), "commit")
	select {
	case <-hint:
	case <-s.ctx.Done():
		s.Fatal("nothing woke")
	}
}
