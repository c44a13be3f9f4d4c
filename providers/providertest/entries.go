package providertest

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// toTopics routes an event to the topics that its type lists.
func toTopics(_ string, d eventstore.Draft) []string {
	return strings.Fields(strings.TrimPrefix(d.Type, "none"))
}

// badTopics are invalid topics, by the event type that toBadTopics routes there.
var badTopics = map[string]string{
	"empty": "", "long": strings.Repeat("x", 256), "control": "a\x01b", "not UTF-8": replacement,
}

func toBadTopics(_ string, d eventstore.Draft) []string {
	if topic, ok := badTopics[d.Type]; ok {
		return []string{"fine", topic}
	}
	return []string{"fine"}
}

var entryCases = []testCase{
	{
		name: "an entry for each topic", play: entryEachTopic, options: Options{Route: toTopics},
		rule: "Append adds an entry for each topic of the route: with the event's id, its stream as the key, its data byte for byte, its place in the headers; pending, in order",
	},
	{
		name: "the place of an event", play: entryPlace, options: Options{Route: toTopics},
		rule: "The entries of an event have its position in the log, and the identity of the log, in their headers",
	},
	{
		name: "no route, no entries", play: noRouteNoEntries,
		rule: "A nil Route makes no entries",
	},
	{
		name: "a bad topic", play: badTopic, options: Options{Route: toBadTopics},
		rule: "An invalid topic is an *InvalidError, and nothing commits",
	},
	{
		name: "enqueued at the commit", play: enqueuedAtCommit,
		rule: "Enqueue adds messages to the outbox. They are added if the transaction commits, and only then",
	},
	{
		name: "a message is kept byte for byte", play: messageKept,
		rule: "A message is published byte for byte, with its headers. An empty ID is replaced by a new one, an empty Key by the ID",
	},
	{
		// Promise: G13.1
		name: "a message inherits", play: messageInherits,
		rule: "A message has the correlation id, the causation id and the traceparent of the metadata of ctx in its headers, unless it has these headers",
	},
	{
		name: "a message is enqueued once", play: enqueuedOnce,
		rule: "A message whose id is in the outbox for that topic already is ignored",
	},
	{
		name: "an event's id taken by a message", play: idTaken, options: Options{Route: outbox.ByCategory},
		rule: "Events and their entries commit together or not at all, even if an entry cannot be added",
	},
	{
		name: "bad messages", play: badMessages,
		rule: "An invalid message is an *InvalidError, nothing of its call is added, and the transaction stays usable",
	},
	{
		name: "a hint at new entries", play: wakes, options: Options{Route: outbox.ByCategory},
		rule: "Enqueued returns a channel that is closed when entries are next added through this value (checked if the provider is a provider.Waker)",
	},
}

func entryEachTopic(s *stage) {
	ds := drafts(5)
	ds[0].Type, ds[1].Type, ds[2].Type, ds[3].Type, ds[4].Type = "mail", "mail audit", "none", "audit mail audit", "mail"
	ds[1].Data = []byte(` { "b" : 1E5, "a":-0 , "s": "\u00e9é" } `)
	ds[1].Metadata = eventstore.Metadata{
		CorrelationID: "c-1", CausationID: "c-2", Traceparent: "00-1", Actor: "ann",
		Extra: map[string]string{"tenant": "42", strings.Repeat("k", 240): "long"},
	}
	s.append("review-1", eventstore.NoStream, ds[:3]...)
	s.append("review-1", 3, ds[3:]...)
	for topic, of := range map[string][]int{"mail": {0, 1, 3, 4}, "audit": {1, 3}} {
		entries := s.entries(outbox.Filter{Topic: topic})
		same(s, "entries of topic "+topic, len(entries), len(of))
		for i, n := range of {
			e := entries[i]
			want := provider.FromEvent("review-1", int64(n+1), ds[n], topic)
			want.SetPlace(s.read(s.db, "review-1", int64(n))[0].Position, e.Headers[provider.HeaderLog])
			same(s, "message", e.OutboxMessage, want)
			s.require(!e.CreatedAt.IsZero(), "an entry has its creation time")
			s.require(!e.NextAttemptAt.After(e.CreatedAt), "a new entry is due")
			same(s, "a new entry", e, outbox.Entry{
				OutboxMessage: want, Seq: e.Seq, Status: outbox.Pending, NextAttemptAt: e.NextAttemptAt, CreatedAt: e.CreatedAt,
			})
		}
	}
	same(s, "entries", len(s.entries(outbox.Filter{})), 6)
	page, err := s.db.Entries(s.ctx, outbox.Filter{Limit: 1})
	s.ok(err, "list entries")
	same(s, "zone of CreatedAt", page[0].CreatedAt.Location(), time.UTC)
}

func entryPlace(s *stage) {
	mail := func(n int) []eventstore.Draft {
		ds := drafts(n)
		for i := range ds {
			ds[i].Type = "mail audit"
		}
		return ds
	}
	s.append("other-1", eventstore.NoStream, drafts(3)...) // topic "thing.happened"
	s.append("review-1", eventstore.NoStream, mail(2)...)
	s.append("review-1", 2, mail(1)...)
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-1", 3, mail(2))
		return err
	}), "append in a transaction")
	positions := map[string]int64{}
	for _, stream := range []string{"other-1", "review-1"} {
		for _, e := range s.read(s.db, stream, 0) {
			positions[e.ID] = e.Position
		}
	}
	entries := s.entries(outbox.Filter{})
	same(s, "entries", len(entries), 3+2*5)
	id := entries[0].Headers[provider.HeaderLog]
	if log, ok := s.store.(provider.Log); ok {
		is, err := log.LogID(s.ctx)
		s.ok(err, "identify the log")
		same(s, "header of the log", id, is.String())
	}
	lineage, _, ok := strings.Cut(id, "/")
	s.require(ok && lineage != "", "the header of the log, %q, has a lineage", id)
	for _, e := range entries {
		same(s, "header of the log", e.Headers[provider.HeaderLog], id)
		same(s, "header of the position", e.Headers[provider.HeaderPosition], strconv.FormatInt(positions[e.ID], 10))
	}
	for _, e := range s.enqueue(outbox.Message{Topic: "mail"}) {
		same(s, "headers of a message that is no event", e.Headers, nil)
	}
	if s.reopen == nil {
		return
	}
	s.reopen().append("review-1", 5, mail(1)...)
	entries = s.entries(outbox.Filter{Topic: "audit"})
	same(s, "header of the log through a new handle", entries[len(entries)-1].Headers[provider.HeaderLog], id)
}

// inKeyOrder fails the case unless the entries of each key are in the order of their events.
func (s *stage) inKeyOrder(entries []outbox.Entry) {
	s.Helper()
	last := map[string]int{}
	for _, e := range entries {
		version, err := strconv.Atoi(e.Headers[provider.HeaderVersion])
		s.ok(err, "read the version in the headers")
		s.require(version > last[e.Key], "version %d of %s comes after %d", version, e.Key, last[e.Key])
		last[e.Key] = version
	}
}

func noRouteNoEntries(s *stage) {
	s.append("review-1", eventstore.NoStream, drafts(3)...)
	same(s, "entries", len(s.entries(outbox.Filter{})), 0)
}

func badTopic(s *stage) {
	before := s.dump("review-1")
	for name := range badTopics {
		ds := drafts(3)
		ds[1].Type = name
		_, err := s.db.Append(s.ctx, "review-1", eventstore.Any, ds)
		s.invalid(err, "append routed to a bad topic: "+name)
		s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
			_, err := view.Append(s.ctx, "review-1", eventstore.Any, ds)
			s.invalid(err, "append routed to a bad topic in a transaction: "+name)
			return nil
		}), "commit")
	}
	s.unchanged(before, "appends to bad topics")
}

func enqueuedAtCommit(s *stage) {
	undo := errors.New("undo")
	err := s.inTx(s.ctx, func(view TxView, _ Add) error {
		s.ok(view.Enqueue(s.ctx, line(3, "mail", "ann")...), "enqueue")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "entries after a rollback", len(s.entries(outbox.Filter{})), 0)
	ms := line(3, "mail", "ann")
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		s.ok(view.Enqueue(s.ctx, ms[0]), "enqueue")
		s.ok(view.Enqueue(s.ctx, ms[1], ms[2]), "enqueue")
		s.ok(view.Enqueue(s.ctx), "enqueue nothing")
		same(s, "entries before the commit", len(s.entries(outbox.Filter{})), 0)
		return nil
	}), "commit")
	for i, e := range s.entries(outbox.Filter{}) {
		same(s, "message in order", e.OutboxMessage, ms[i])
	}
	same(s, "entries after the commit", len(s.entries(outbox.Filter{})), 3)
}

func messageInherits(s *stage) {
	ctx := eventstore.WithMetadata(s.ctx, caused)
	ms := line(3, "mail", "ann")
	ms[1].Headers = map[string]string{provider.HeaderCorrelation: "own", "more": "x"}
	s.ok(s.inTx(ctx, func(view TxView, _ Add) error { return view.Enqueue(ctx, ms[:2]...) }), "enqueue with metadata")
	ctx = eventstore.WithMetadata(s.ctx, eventstore.Metadata{CorrelationID: strings.Repeat("x", 1025), CausationID: "a\nb"})
	s.ok(s.inTx(ctx, func(view TxView, _ Add) error { return view.Enqueue(ctx, ms[2]) }), "enqueue with metadata that cannot be a header")
	entries := s.entries(outbox.Filter{})
	same(s, "entries", len(entries), 3)
	want := map[string]string{provider.HeaderCorrelation: "c-1", provider.HeaderCausation: "e-1", provider.HeaderTraceparent: "00-1"}
	same(s, "headers", entries[0].Headers, want)
	want[provider.HeaderCorrelation], want["more"] = "own", "x"
	same(s, "headers of a message that has some", entries[1].Headers, want)
	same(s, "headers from invalid metadata", len(entries[2].Headers), 0)
	same(s, "headers of the caller", len(ms[1].Headers), 2)
}

// caused is metadata of an event that causes others.
var caused = eventstore.Metadata{CorrelationID: "c-1", CausationID: "e-1", Traceparent: "00-1", Actor: "ann"}

func messageKept(s *stage) {
	binary := make([]byte, 256)
	for i := range binary {
		binary[i] = byte(i)
	}
	for _, payload := range []string{"", string(binary), `{"n": 1E5, "z":-0}`, "\x00", " \n", "not json", "\xff\xfe"} {
		want := outbox.Message{
			ID: "not a uuid: O'Hara's; -- " + newID(), Topic: `t'o"p;ic %`, Key: `k'e"y \ 日本`, Payload: []byte(payload),
			Headers: map[string]string{"plain": "v", `o'dd "header" %s`: `v'al\ue 日本`, "empty": ""},
		}
		got := s.enqueue(want)[0]
		s.require(string(got.Payload) == payload, "payload %q is kept as %q", payload, got.Payload)
		got.Payload, want.Payload = nil, nil
		same(s, "message", got.OutboxMessage, want)
	}
	bare := s.enqueue(outbox.Message{Topic: "mail"}, outbox.Message{Topic: "mail"})
	same(s, "entries of messages without an id", len(bare), 2)
	s.require(bare[0].ID != "" && bare[0].ID != bare[1].ID, "empty ids are replaced by new ones: %q, %q", bare[0].ID, bare[1].ID)
	same(s, "keys of messages without a key", []string{bare[0].Key, bare[1].Key}, []string{bare[0].ID, bare[1].ID})

	m := outbox.Message{Topic: "mail", Headers: map[string]string{"k": "v"}, Payload: []byte("hello")}
	kept := s.enqueue(m)[0]
	// the caller's message, and the returned one
	for _, theirs := range []outbox.Message{m, kept.OutboxMessage} {
		theirs.Headers["k"] = "spoilt"
		copy(theirs.Payload, "spoilt")
		now := s.entry(kept.Seq)
		same(s, "message after the caller changed its copy", []string{now.Headers["k"], string(now.Payload)}, []string{"v", "hello"})
	}
}

func enqueuedOnce(s *stage) {
	m := outbox.Message{ID: newID(), Topic: "mail", Key: "ann", Payload: []byte("first")}
	other, elsewhere := m, m
	other.Payload, elsewhere.Topic = []byte("second"), "audit"
	added := s.enqueue(m, other)
	same(s, "entries of a message enqueued twice in a call", len(added), 1)
	same(s, "payload of the entry", string(added[0].Payload), "first")
	s.ok(s.inTx(s.ctx, func(view TxView, add Add) error {
		s.ok(view.Enqueue(s.ctx, other), "enqueue again")
		s.ok(view.Enqueue(s.ctx, other, elsewhere), "enqueue again, and to another topic")
		return add(s.ctx, "after", 1)
	}), "commit after a repeat")
	same(s, "total", s.total("after"), 1)
	same(s, "entries", len(s.entries(outbox.Filter{})), 2)
	same(s, "the first entry", s.entry(added[0].Seq), added[0])
	s.mark(outbox.Mark{Seq: added[0].Seq, Token: s.claimOne(added[0].Seq).Token, To: outbox.Published})
	same(s, "entries after a repeat of a published message", len(s.enqueue(other)), 0)
}

func badMessages(s *stage) {
	long := strings.Repeat("x", 256)
	many := map[string]string{}
	for i := range 65 {
		many[strconv.Itoa(i)] = "v"
	}
	for name, m := range map[string]outbox.Message{
		"no topic": {}, "long topic": {Topic: long}, "topic with a NUL": {Topic: "a\x00"}, "topic not UTF-8": {Topic: replacement},
		"long id": {Topic: "t", ID: long}, "id with a NUL": {Topic: "t", ID: "\x00"}, "long key": {Topic: "t", Key: long},
		"key not UTF-8": {Topic: "t", Key: replacement}, "many headers": {Topic: "t", Headers: many},
		"empty header": {Topic: "t", Headers: map[string]string{"": "v"}}, "long header": {Topic: "t", Headers: map[string]string{long: "v"}},
		"header with a NUL": {Topic: "t", Headers: map[string]string{"k": "\x00"}},
		"large payload":     {Topic: "t", Payload: make([]byte, provider.DefaultMaxPayload+1)},
	} {
		good := line(1, "good", name)[0]
		s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
			s.invalid(view.Enqueue(s.ctx, m), name)
			s.invalid(view.Enqueue(s.ctx, outbox.Message{Topic: "in a bad call"}, m), name+" next to a good one")
			return view.Enqueue(s.ctx, good)
		}), "commit after "+name)
		same(s, "messages enqueued after "+name, len(s.entries(outbox.Filter{Key: name})), 1)
	}
	same(s, "messages of bad calls", len(s.entries(outbox.Filter{Topic: "in a bad call"})), 0)
}

func wakes(s *stage) {
	waker, ok := s.store.(provider.Waker)
	if !ok {
		s.Log("this provider is not a provider.Waker")
		return
	}
	for i, add := range []func(){
		func() { s.append("review-1", eventstore.Any, draft()) },
		func() { s.append("review-1", eventstore.Any, draft()) },
	} {
		hint := waker.Enqueued()
		select {
		case <-hint:
			s.Fatalf("hint %d came before an entry was added", i)
		default:
		}
		add()
		select {
		case <-hint:
		case <-s.ctx.Done():
			s.Fatalf("hint %d did not come", i)
		}
	}
}

func idTaken(s *stage) {
	d := draft()
	s.enqueue(outbox.Message{ID: d.ID, Topic: "review", Payload: []byte("an application's message")})
	_, err := s.db.Append(s.ctx, "review-1", eventstore.NoStream, []eventstore.Draft{d})
	s.require(errors.Is(err, eventstore.ErrEventIDReused), "the error %v is ErrEventIDReused", err)
	same(s, "events", len(s.readIDs("review-1")), 0)
	same(s, "entries", len(s.entries(outbox.Filter{})), 1)
}
