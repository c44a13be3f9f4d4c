package providertest

import (
	"errors"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

var txCases = []testCase{
	{
		// Promise: G1.1
		name: "a caller's transaction commits it all", play: txCommits, options: Options{Route: outbox.ByCategory},
		rule: "Events, entries and the caller's writes of one transaction are visible when it commits, and not before",
	},
	{
		// Promise: G1.1
		name: "a caller's transaction rolls it all back", play: txRollsBack, options: Options{Route: outbox.ByCategory},
		rule: "A transaction that is rolled back leaves nothing: no event, no entry, no version, no write",
	},
	{
		name: "a caller's transaction reads its own appends", play: txReadsItsOwn,
		rule: "A TxStore is a Store inside a transaction: it reads the events that the transaction appended, in order, and the earlier ones",
	},
	{
		// Promise: G1.2
		name: "errors leave a caller's transaction usable", play: txStaysUsable, options: Options{Route: outbox.ByCategory},
		rule: "After any error that Append documents, the transaction is usable, and nothing of that append is in it",
	},
	{
		name: "a caller's transaction appends to several streams", play: txSeveralStreams, options: Options{Route: outbox.ByCategory},
		rule: "One transaction may append to several streams, and to one several times; the versions continue from append to append",
	},
	{
		name: "a new handle finds it all", unless: Volatile, play: newHandleFindsAll, options: Options{Route: outbox.ByCategory},
		rule: "Committed data outlives the process: a new handle on the same data finds it",
	},
	{
		// Promise: G4.1
		name: "another store is empty", only: Volatile, play: anotherStoreIsEmpty, options: Options{Route: outbox.ByCategory},
		rule: "A volatile provider shares no data: another one in the same process is empty",
	},
}

func txCommits(s *stage) {
	before := s.dump("review-1")
	message := outbox.Message{ID: newID(), Topic: "mail", Key: "ann", Payload: []byte("hello")}
	s.ok(s.inTx(s.ctx, func(view TxView, add Add) error {
		at, err := view.Append(s.ctx, "review-1", eventstore.NoStream, drafts(2))
		s.ok(err, "append")
		same(s, "version", at.Version, int64(2))
		s.ok(view.Enqueue(s.ctx, message), "enqueue")
		s.ok(add(s.ctx, "k", 5), "add")
		s.unchanged(before, "a transaction that has not committed")
		same(s, "total before the commit", s.total("k"), 0)
		return nil
	}), "commit")
	same(s, "events", len(s.readIDs("review-1")), 2)
	same(s, "entries", len(s.entries(outbox.Filter{Topic: "review"})), 2)
	same(s, "messages", len(s.entries(outbox.Filter{Topic: "mail", Key: "ann"})), 1)
	same(s, "total", s.total("k"), 5)
}

func txRollsBack(s *stage) {
	s.append("review-1", eventstore.NoStream, draft())
	before, undo := s.dump("review-1", "review-2"), errors.New("undo")
	err := s.inTx(s.ctx, func(view TxView, add Add) error {
		_, err := view.Append(s.ctx, "review-1", 1, drafts(2))
		s.ok(err, "append")
		_, err = view.Append(s.ctx, "review-2", eventstore.NoStream, drafts(2))
		s.ok(err, "append")
		s.ok(view.Enqueue(s.ctx, outbox.Message{Topic: "mail"}), "enqueue")
		s.ok(add(s.ctx, "k", 5), "add")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	s.unchanged(before, "a transaction that was rolled back")
	same(s, "total", s.total("k"), 0)
	same(s, "version of the next append", s.append("review-1", 1, draft()).Version, int64(2))
	same(s, "version of the other stream", s.append("review-2", eventstore.NoStream, draft()).Version, int64(1))
}

func txReadsItsOwn(s *stage) {
	old, fresh := drafts(2), drafts(3)
	s.append("review-1", eventstore.NoStream, old...)
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-1", 2, fresh)
		s.ok(err, "append")
		for i, e := range s.read(view, "review-1", 1) {
			same(s, "version", e.Version, int64(i+2))
			same(s, "id", e.ID, []string{old[1].ID, fresh[0].ID, fresh[1].ID, fresh[2].ID}[i])
		}
		same(s, "events in the transaction", len(s.read(view, "review-1", 0)), 5)
		for e, err := range view.ReadStream(s.ctx, "review-1", 0) { // it may append while it reads
			s.ok(err, "read in the transaction")
			if e.Version > 5 {
				break
			}
			_, err := view.Append(s.ctx, "review-1", eventstore.Any, drafts(1))
			s.ok(err, "append while reading")
		}
		return nil
	}), "commit")
	same(s, "events", len(s.readIDs("review-1")), 10)
}

func txStaysUsable(s *stage) {
	stored := drafts(2)
	s.append("review-1", eventstore.NoStream, stored...)
	first, last := drafts(1), drafts(1)
	s.ok(s.inTx(s.ctx, func(view TxView, add Add) error {
		_, err := view.Append(s.ctx, "review-1", 2, first)
		s.ok(err, "append before the errors")
		s.ok(add(s.ctx, "before", 1), "add before the errors")
		for range 3 {
			_, err := view.Append(s.ctx, "review-1", 2, drafts(3))
			s.conflict(err, "append", eventstore.ConflictError{Stream: "review-1", Expected: 2, Actual: 3})
			_, err = view.Append(s.ctx, "review-2", 4, drafts(3))
			s.conflict(err, "append", eventstore.ConflictError{Stream: "review-2", Expected: 4})
			for _, ds := range [][]eventstore.Draft{append(drafts(2), stored[0]), append(drafts(2), first[0])} {
				for _, stream := range []string{"review-1", "review-3"} {
					_, err = view.Append(s.ctx, stream, eventstore.Any, ds)
					s.require(errors.Is(err, eventstore.ErrEventIDReused), "the error %v is ErrEventIDReused", err)
				}
			}
			bad := drafts(3)
			bad[2].Data = []byte("{")
			_, err = view.Append(s.ctx, "review-1", 3, bad)
			s.invalid(err, "append")
			s.invalid(view.Enqueue(s.ctx, outbox.Message{Topic: "mail"}, outbox.Message{}), "enqueue")
		}
		_, err = view.Append(s.ctx, "review-1", 3, last)
		s.ok(err, "append after the errors")
		return add(s.ctx, "after", 1)
	}), "commit after the errors")
	same(s, "ids in review-1", s.readIDs("review-1"), []string{stored[0].ID, stored[1].ID, first[0].ID, last[0].ID})
	same(s, "events in review-2 and 3", len(s.readIDs("review-2"))+len(s.readIDs("review-3")), 0)
	same(s, "entries", len(s.entries(outbox.Filter{})), 4)
	same(s, "totals", []int{s.total("before"), s.total("after")}, []int{1, 1})
	same(s, "version of review-2", s.append("review-2", eventstore.NoStream, draft()).Version, int64(1))
}

func txSeveralStreams(s *stage) {
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		for i, stream := range []string{"review-1", "review-2", "review-1", "review-2", "order-1", "review-1"} {
			at, err := view.Append(s.ctx, stream, eventstore.Expected(2*[]int{0, 0, 1, 1, 0, 2}[i]), drafts(2))
			s.ok(err, "append "+stream)
			same(s, "version", at.Version, int64(2*[]int{1, 1, 2, 2, 1, 3}[i]))
		}
		return nil
	}), "commit")
	same(s, "events", []int{len(s.readIDs("review-1")), len(s.readIDs("review-2")), len(s.readIDs("order-1"))}, []int{6, 4, 2})
	entries := s.entries(outbox.Filter{Topic: "review"})
	same(s, "entries of topic review", len(entries), 10)
	s.inKeyOrder(entries)
}

func newHandleFindsAll(s *stage) {
	ds := drafts(3)
	s.append("review-1", eventstore.NoStream, ds...)
	before := s.dump("review-1")
	again := s.reopen()
	again.unchanged(before, "opening a new handle")
	at, err := again.db.Append(s.ctx, "review-1", eventstore.NoStream, ds)
	s.ok(err, "repeat the append")
	s.require(at.Replayed, "the new handle knows the append")
	same(s, "version", again.append("review-1", 3, draft()).Version, int64(4))
	same(s, "events through the first handle", len(s.readIDs("review-1")), 4)
}

func anotherStoreIsEmpty(s *stage) {
	s.append("review-1", eventstore.NoStream, drafts(3)...)
	other := s.another()
	same(s, "content of another store", other.dump("review-1"), dump{
		events: map[string][]eventstore.Raw{"review-1": nil}, entries: []outbox.Entry{},
	})
}
