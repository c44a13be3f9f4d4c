package providertest

import (
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

const againRule = "If the ids of all events are already in this stream, in order and contiguous, from version expected+1 on (for Any: anywhere), " +
	"nothing is written. The result is their place with Replayed set, even if later events were appended. " +
	"If only some ids are stored, or one is stored elsewhere, the error is ErrEventIDReused"

var againCases = []testCase{
	// Promise: G1.5
	{name: "appending again", rule: againRule, options: Options{Route: outbox.ByCategory}, play: appendingAgain},
	{name: "appending again in a caller's transaction", rule: againRule, options: Options{Route: outbox.ByCategory}, play: appendingAgainInTx},
	{
		// Promise: G1.5
		name: "the same append many times at once", play: sameAppendAtOnce, options: Options{Route: outbox.ByCategory},
		rule: againRule + ". Therefore, of many callers with the same append at once, one writes, and all succeed",
	},
	{
		name: "an append that was rolled back is new", play: rolledBackIsNew,
		rule: "Replayed is set only for stored events, not for events that were rolled back",
	},
}

// repeat is an append to streams with these events: review-1 has the events 0 to 4, appended as 0
// 1, 2, and 3 4; review-2 has event 5. The events 6 and 7 are new.
type repeat struct {
	name     string
	stream   string
	expected eventstore.Expected
	events   []int
	version  int64 // version of the last stored event; 0: ErrEventIDReused
}

var repeats = []repeat{
	{"a repeat after later appends", "review-1", eventstore.NoStream, []int{0, 1}, 2},
	{"a repeat of one event", "review-1", 2, []int{2}, 3},
	{"a repeat of the last append", "review-1", 3, []int{3, 4}, 5},
	{"a repeat at any version", "review-1", eventstore.Any, []int{0, 1}, 2},
	{"a repeat of the last append at any version", "review-1", eventstore.Any, []int{3, 4}, 5},
	{"one event of an append", "review-1", 1, []int{1}, 2},
	{"one event of an append at any version", "review-1", eventstore.Any, []int{3}, 4},
	{"across two appends", "review-1", 1, []int{1, 2}, 3},
	{"across all appends at any version", "review-1", eventstore.Any, []int{0, 1, 2, 3, 4}, 5},
	{"reordered", "review-1", eventstore.NoStream, []int{1, 0}, 0},
	{"reordered at any version", "review-1", eventstore.Any, []int{1, 0}, 0},
	{"with a gap", "review-1", eventstore.NoStream, []int{0, 2}, 0},
	{"with a gap at any version", "review-1", eventstore.Any, []int{0, 2}, 0},
	{"expected too late", "review-1", 1, []int{0, 1}, 0},
	{"expected too early", "review-1", 1, []int{2}, 0},
	{"expected at the stream's version", "review-1", 5, []int{2}, 0},
	{"expected beyond the stream", "review-1", 7, []int{0}, 0},
	{"expected as a new stream", "review-1", eventstore.NoStream, []int{3, 4}, 0},
	{"another stream", "review-2", 1, []int{0, 1}, 0},
	{"another stream at any version", "review-2", eventstore.Any, []int{0}, 0},
	{"a stream that does not exist", "review-3", eventstore.NoStream, []int{0, 1}, 0},
	{"two streams", "review-1", eventstore.Any, []int{4, 5}, 0},
	{"old, then new", "review-1", 4, []int{4, 6}, 0},
	{"old, then new at any version", "review-1", eventstore.Any, []int{4, 6}, 0},
	{"new, then old", "review-1", 5, []int{6, 0}, 0},
	{"new, then old at any version", "review-1", eventstore.Any, []int{6, 7, 0}, 0},
	{"new in a new stream, then old", "review-3", eventstore.NoStream, []int{6, 5}, 0},
}

func (s *stage) againSetting() []eventstore.Draft {
	s.Helper()
	ds := drafts(8)
	s.append("review-1", eventstore.NoStream, ds[0:2]...)
	s.append("review-1", 2, ds[2])
	s.append("review-2", eventstore.NoStream, ds[5])
	s.append("review-1", 3, ds[3:5]...)
	return ds
}

func appendingAgain(s *stage) {
	ds := s.againSetting()
	before := s.dump("review-1", "review-2", "review-3")
	for _, c := range repeats {
		s.repeat(s.db, c, ds)
		s.unchanged(before, c.name)
	}
	at := s.append("review-1", 5, ds[6], ds[7])
	same(s, "version of the new events", at.Version, int64(7))
	s.require(!at.Replayed, "new events are not replayed")
}

// repeat plays one row on a store.
func (s *stage) repeat(to eventstore.Store, c repeat, ds []eventstore.Draft) {
	s.Helper()
	events := make([]eventstore.Draft, len(c.events))
	for i, n := range c.events {
		events[i] = ds[n]
	}
	at, err := to.Append(s.ctx, c.stream, c.expected, events)
	if c.version == 0 {
		s.require(errors.Is(err, eventstore.ErrEventIDReused), "%s: the error %v is ErrEventIDReused", c.name, err)
		same(s, c.name, at, eventstore.Appended{})
		return
	}
	s.ok(err, c.name)
	stored := s.read(s.db, c.stream, c.version-1)
	same(s, c.name, at, eventstore.Appended{
		Stream: c.stream, Version: c.version, Position: stored[0].Position, Count: len(events), Log: s.logID(), Replayed: true,
	})
}

func appendingAgainInTx(s *stage) {
	ds := s.againSetting()
	before := s.dump("review-1", "review-2", "review-3")
	s.ok(s.inTx(s.ctx, func(view TxView, add Add) error {
		for _, c := range repeats {
			s.repeat(view, c, ds)
		}
		return add(s.ctx, "after them all", 1)
	}), "commit")
	same(s, "total written after them all", s.total("after them all"), 1)
	s.unchanged(before, "appends again")

	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		// the second append finds the first before its commit
		for replayed := range 2 {
			at, err := view.Append(s.ctx, "review-1", 5, ds[6:8])
			if err != nil {
				return err
			}
			same(s, "Replayed", at.Replayed, replayed == 1)
			same(s, "Version", at.Version, int64(7))
		}
		return nil
	}), "commit")
	same(s, "events", len(s.readIDs("review-1")), 7)
}

func sameAppendAtOnce(s *stage) {
	const callers = 16
	for i, expected := range []eventstore.Expected{eventstore.NoStream, eventstore.Any} {
		stream, ds := fmt.Sprintf("review-%d", i), drafts(3)
		ats, errs := make([]eventstore.Appended, callers), make([]error, callers)
		together(callers, func(i int) { ats[i], errs[i] = s.db.Append(s.ctx, stream, expected, ds) })
		s.ok(errors.Join(errs...), "append the same events")
		wrote := 0
		for _, at := range ats {
			if !at.Replayed {
				wrote++
			}
			at.Replayed, ats[0].Replayed = false, false
			same(s, "result of each caller", at, ats[0])
		}
		same(s, "callers that wrote", wrote, 1)
		same(s, "ids in "+stream, s.readIDs(stream), idsOf(ds))
	}
	same(s, "entries", len(s.entries(outbox.Filter{})), 6)
}

func rolledBackIsNew(s *stage) {
	ds, undo := drafts(2), errors.New("undo")
	err := s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-1", eventstore.NoStream, ds)
		s.ok(err, "append")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	at := s.append("review-1", eventstore.NoStream, ds...)
	s.require(!at.Replayed, "an append after a rollback is new")
	same(s, "version", at.Version, int64(2))
}
