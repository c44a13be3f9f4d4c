package sqlite_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// badTexts are refused as an id or a name.
var badTexts = map[string]string{
	"empty": "", "too long": "review-" + strings.Repeat("x", 249), "NUL": "review-\x00", "control": "review-\x1b[2J",
	"not UTF-8": "review-\xff\xfe", "half of a rune": "review-\xc3",
}

// badData is JSON that some provider cannot store.
var badData = map[string]string{
	"nothing": "", "no JSON": "{", "two values": "{} {}", "a NUL": `{"a":"\u0000"}`, "a NUL key": `{"a\u0000":1}`,
	"a lone surrogate": `{"a":"\ud800"}`, "not UTF-8": "{\"a\":\"\xff\"}", "a key twice": `{"a":1,"a":2}`,
	"numbers that expand": `[` + strings.Repeat(`1e131071,`, 7) + `1e131071]`,
	"a great number":      `{"a":1e131072}`, "a small number": `{"a":1e-16384}`, "a raw NUL": "{\"a\":\"\x00\"}",
	"too deep": strings.Repeat("[", 10000) + strings.Repeat("]", 10000), "too large": `"` + strings.Repeat("x", 1<<20) + `"`,
}

// Invalid input is a typed error, and no statement runs.
// Promise: G1.15
func TestBadInputReachesNoStatement(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	refused := func(what string, fn func() error) {
		t.Helper()
		var err error
		ran := tr.during(func() { err = fn() })
		require.ErrorIs(t, err, eventstore.ErrInvalid, what)
		require.Empty(t, ran, what)
		var invalid *eventstore.InvalidError
		require.ErrorAs(t, err, &invalid, what)
	}
	appends := func(what, stream string, change func(*eventstore.Draft)) {
		t.Helper()
		events := drafts(2)
		change(&events[1])
		refused("append: "+what, func() error {
			_, err := db.Append(ctx, stream, eventstore.Any, events)
			return err
		})
	}
	for name, bad := range badTexts {
		appends("stream "+name, bad, func(*eventstore.Draft) {})
		appends("id "+name, "review-1", func(d *eventstore.Draft) { d.ID = bad })
		appends("type "+name, "review-1", func(d *eventstore.Draft) { d.Type = bad })
		refused("read: "+name, func() (err error) {
			for _, err = range db.ReadStream(ctx, bad, 0) {
			}
			return err
		})
		if bad != "" {
			appends("metadata "+name, "review-1", func(d *eventstore.Draft) { d.Metadata.Actor = strings.Repeat(bad, 5) })
			appends("extra "+name, "review-1", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{bad: "v"} })
		}
		for _, m := range []provider.Message{
			{ID: "m", Handlers: []provider.Handler{{Name: bad}}, Mark: true},
			{ID: bad, Handlers: []provider.Handler{{Name: handler}}, Mark: true},
		} {
			refused("mark: "+name, func() error {
				u := delivery("m1")
				u.Messages = append(u.Messages, m)
				err := db.Do(ctx, u, adds("p1"))
				requireClass(t, err, "permanent", "invalid")
				requireMessage(t, err, 1)
				return err
			})
		}
	}
	for name, bad := range badData {
		appends("data: "+name, "review-1", func(d *eventstore.Draft) { d.Data = []byte(bad) })
	}
	for _, stream := range []string{"review", "review-", "-1", "Review-1", "re view-1", "1-1", `re"view-1`, "';--"} {
		appends("stream "+stream, stream, func(*eventstore.Draft) {})
	}
	appends("id not canonical", "review-1", func(d *eventstore.Draft) { d.ID = strings.ToUpper(d.ID) })
	appends("schema", "review-1", func(d *eventstore.Draft) { d.Schema = 0 })
	refused("no events", func() error { _, err := db.Append(ctx, "review-1", eventstore.Any, nil); return err })
	refused("expected", func() error { _, err := db.Append(ctx, "review-1", -2, drafts(1)); return err })
	refused("mark with a negative time", func() error {
		_, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: 1, To: outbox.Failed, After: -1}})
		return err
	})
	refused("mark to skipped", func() error {
		_, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: 1, To: outbox.Published}, {Seq: 1, To: outbox.Skipped}})
		return err
	})
	var err error
	require.Empty(t, tr.during(func() { _, err = db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Lease: 1}) }))
	require.ErrorIs(t, err, claim.ErrTerms)
}

func TestBadTopicOfARoute(t *testing.T) {
	t.Parallel()
	for name, bad := range badTexts {
		db, tr := traced(t, 1, &sqlite.Config{Route: func(string, eventstore.Draft) []string { return []string{"good", bad} }})
		var err error
		ran := tr.during(func() { _, err = db.Append(context.Background(), "review-1", eventstore.Any, drafts(1)) })
		require.ErrorIs(t, err, eventstore.ErrInvalid, name)
		require.Empty(t, ran, name)
	}
}

func TestBadMessages(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, &sqlite.Config{MaxPayload: 100})
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	long := strings.Repeat("x", 256)
	for _, m := range []outbox.Message{
		{}, {Topic: long}, {Topic: "t", ID: long}, {Topic: "t", Key: long}, {Topic: "t", ID: "\xff"}, {Topic: "t", Key: "\x00"},
		{Topic: "t", Payload: make([]byte, 101)}, {Topic: "t", Headers: map[string]string{"": "v"}},
		{Topic: "t", Headers: map[string]string{"k": "\x00"}},
	} {
		var err error
		ran := tr.during(func() { err = db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "good"}, m) })
		require.ErrorIs(t, err, eventstore.ErrInvalid)
		require.Empty(t, ran)
	}
}

// Valid input is returned unchanged, even if it looks like SQL.
func TestUnusualInputIsReturnedUnchanged(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	odd := []string{
		`'; drop table kinora_events; --`, `" or 1=1 --`, `%_?1:name@x$y`, "ünïcode ☂ 漢字 🎬", `\u0000`, `[x]`, "`x`",
		" ", "e\u0301 and \u00e9", strings.Repeat("☂", 80),
	}
	db := open(t, &sqlite.Config{Route: func(string, eventstore.Draft) []string { return odd }})
	for i, s := range odd {
		stream := eventstore.StreamName("review", s)
		events := drafts(1)
		events[0].Type, events[0].Data = s, []byte(`{"e":1E5, "z":-0, "s":"`+"\u2028 é"+`\u00e9", "deep":`+strings.Repeat("[", 999)+strings.Repeat("]", 999)+`}`)
		events[0].Metadata = eventstore.Metadata{Actor: s, Extra: map[string]string{s: s, "empty": ""}}
		_, err := db.Append(ctx, stream, eventstore.NoStream, events)
		require.NoError(t, err, s)
		n := 0
		for e, err := range db.ReadStream(ctx, stream, 0) {
			require.NoError(t, err)
			require.Equal(t, events[0].Data, e.Data)
			require.Equal(t, events[0].Metadata, e.Metadata)
			require.Equal(t, s, e.Type)
			require.Equal(t, stream, e.Stream)
			n++
		}
		require.Equal(t, 1, n)
		entries, err := db.Entries(ctx, outbox.Filter{Topic: s, Key: stream})
		require.NoError(t, err)
		require.Len(t, entries, 1)
		want := provider.FromEvent(stream, 1, events[0], s)
		want.SetPlace(int64(i+1), entries[0].Headers[provider.HeaderLog])
		require.Equal(t, want, entries[0].OutboxMessage, "byte for byte")

		for range 2 {
			require.NoError(t, db.Do(ctx, delivery(s), adds(s)))
		}
		require.Equal(t, 1, total(t, db.SQL(), s))
		claimed, err := db.ClaimEntries(ctx, provider.EntryQuery{Topics: []string{s}}, claim.Terms{Holder: s})
		require.NoError(t, err)
		require.Equal(t, i+1, len(claimed), "one entry of each stream so far")
	}
}
