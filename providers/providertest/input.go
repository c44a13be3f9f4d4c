package providertest

import (
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const inputRule = "Input that no database can store is an *InvalidError (errors.Is ErrInvalid), before any SQL: nothing is written"

var inputCases = []testCase{
	// Promise: G1.15
	{name: "bad streams", rule: inputRule, play: badStreams, options: Options{Route: outbox.ByCategory}},
	// Promise: G1.15
	{name: "bad drafts", rule: inputRule, play: badDrafts, options: Options{Route: outbox.ByCategory}},
	// Promise: G1.15
	{name: "bad JSON", rule: inputRule, play: badJSON, options: Options{Route: outbox.ByCategory}},
	{name: "bad batches", rule: inputRule, play: badBatches, options: Options{Route: outbox.ByCategory}},
	{
		name: "unusual names", play: oddNames, options: Options{Route: outbox.ByCategory},
		rule: "A name is bytes: quotes, wildcards, spaces and any script are kept unchanged, and different names stay different",
	},
	{
		name: "the payload limit", play: payloadLimit, options: Options{MaxPayload: 1000},
		rule: "Data is at most the provider's MaxPayload bytes: exactly as many are stored, and one more is an *InvalidError",
	},
	{
		// Promise: G1.15
		name: "numbers count in full", play: numbersInFull, options: Options{Route: outbox.ByCategory},
		rule: "A number counts towards MaxPayload as it is without an exponent, because a database may return it that way",
	},
}

const replacement = "\xff" // not UTF-8

func badStreams(s *stage) {
	before := s.dump("review-1")
	for _, stream := range []string{
		"", "review", "review-", "-1", "-", "Review-1", "re view-1", "re'view-1", "1review-1", "日本-1",
		"review-\x00", "review-a\nb", "review-\x7f", "review-" + replacement, strings.Repeat("a", 42) + "-1",
		"review-" + strings.Repeat("x", 249),
	} {
		_, err := s.db.Append(s.ctx, stream, eventstore.Any, drafts(2))
		s.invalid(err, fmt.Sprintf("append to stream %q", stream))
	}
	_, err := s.db.Append(s.ctx, "review-1", -2, drafts(2))
	s.invalid(err, "append at version -2")
	_, err = s.db.Append(s.ctx, "review-1", eventstore.Any, nil)
	s.invalid(err, "append of no events")
	s.unchanged(before, "bad appends")
}

// bad is a valid draft and the change that makes it invalid.
type bad struct {
	name  string
	spoil func(d *eventstore.Draft)
}

var bads = []bad{
	{"no id", func(d *eventstore.Draft) { d.ID = "" }},
	{"an id that is no UUID", func(d *eventstore.Draft) { d.ID = "7" }},
	{"an id in upper case", func(d *eventstore.Draft) { d.ID = "0198A6B4-7C52-7D11-9A2E-5F0C3B1D2E4F" }},
	{"an id in braces", func(d *eventstore.Draft) { d.ID = "{" + d.ID + "}" }},
	{"an id as a URN", func(d *eventstore.Draft) { d.ID = "urn:uuid:" + d.ID }},
	{"an id without hyphens", func(d *eventstore.Draft) { d.ID = strings.ReplaceAll(d.ID, "-", "") }},
	{"no type", func(d *eventstore.Draft) { d.Type = "" }},
	{"a type with a NUL", func(d *eventstore.Draft) { d.Type = "a\x00b" }},
	{"a type that is not UTF-8", func(d *eventstore.Draft) { d.Type = replacement }},
	{"a long type", func(d *eventstore.Draft) { d.Type = strings.Repeat("x", 256) }},
	{"schema 0", func(d *eventstore.Draft) { d.Schema = 0 }},
	{"schema -1", func(d *eventstore.Draft) { d.Schema = -1 }},
	{"schema 32768", func(d *eventstore.Draft) { d.Schema = 32768 }},
	{"a correlation id with a NUL", func(d *eventstore.Draft) { d.Metadata.CorrelationID = "\x00" }},
	{"a long causation id", func(d *eventstore.Draft) { d.Metadata.CausationID = strings.Repeat("x", 1025) }},
	{"a trace parent with a line break", func(d *eventstore.Draft) { d.Metadata.Traceparent = "a\r\nb" }},
	{"an actor that is not UTF-8", func(d *eventstore.Draft) { d.Metadata.Actor = replacement }},
	{"an empty extra key", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{"": "v"} }},
	{"a long extra key", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{strings.Repeat("x", 241): "v"} }},
	{"an extra key with a NUL", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{"\x00": "v"} }},
	{"an extra value with a NUL", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{"k": "\x00"} }},
	{"many extra keys", func(d *eventstore.Draft) {
		d.Metadata.Extra = map[string]string{}
		for i := range 49 {
			d.Metadata.Extra[fmt.Sprint(i)] = "v"
		}
	}},
	{"a large payload", func(d *eventstore.Draft) {
		d.Data = []byte(`"` + strings.Repeat("x", provider.DefaultMaxPayload) + `"`)
	}},
}

func badDrafts(s *stage) { s.refuses(bads) }

func badJSON(s *stage) {
	var cases []bad
	for _, data := range []string{
		"", " ", "{", `{"a":1`, `"abc`, `{} {}`, `{}x`, `[1,]`, `{"a":1,}`, `{'a':1}`, `{a:1}`, `NaN`, `Infinity`, `01`, `+1`, `.5`, `1.`,
		"\x00", "\"\x00\"", `"\u0000"`, `{"\u0000":1}`, "\"\n\"", "\"" + replacement + "\"", "\"\xed\xa0\x80\"", "\xef\xbb\xbf{}",
		`"\ud800"`, `"\udc00"`, `"\udc00\ud800"`, `{"\ud800":1}`, `["\ud83cx"]`,
		`1e131072`, `-1e131072`, `{"n":[1E+131072]}`, `1e-16384`, `1e999999999999`, strings.Repeat("9", 131073),
		`{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `[{"b":{"a":1,"a":1}}]`,
		strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000),
		strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000),
		strings.Repeat("[", provider.MaxJSONDepth+1) + strings.Repeat("]", provider.MaxJSONDepth+1),
	} {
		cases = append(cases, bad{fmt.Sprintf("data %.40q", data), func(d *eventstore.Draft) { d.Data = []byte(data) }})
	}
	s.refuses(cases)
}

// refuses plays every bad draft alone, among good ones, and in a transaction that then commits.
func (s *stage) refuses(cases []bad) {
	s.Helper()
	s.append("review-1", eventstore.NoStream, draft())
	before := s.dump("review-1")
	for _, c := range cases {
		ds := drafts(3)
		c.spoil(&ds[1])
		_, err := s.db.Append(s.ctx, "review-1", 1, ds[1:2])
		s.invalid(err, c.name)
		_, err = s.db.Append(s.ctx, "review-1", eventstore.Any, ds)
		s.invalid(err, c.name+" among good ones")
	}
	s.unchanged(before, "bad appends")
	s.ok(s.inTx(s.ctx, func(view TxView, add Add) error {
		for _, c := range cases {
			ds := drafts(3)
			c.spoil(&ds[1])
			_, err := view.Append(s.ctx, "review-1", 1, ds)
			s.invalid(err, c.name+" in a transaction")
		}
		return add(s.ctx, "after them all", 1)
	}), "commit after bad appends")
	same(s, "total written after the bad appends", s.total("after them all"), 1)
	s.unchanged(before, "bad appends in a transaction")
}

func badBatches(s *stage) {
	before := s.dump("review-1")
	ds := drafts(3)
	ds[2].ID = ds[0].ID
	_, err := s.db.Append(s.ctx, "review-1", eventstore.NoStream, ds)
	s.invalid(err, "append of one id twice")
	s.unchanged(before, "a bad batch")
}

func oddNames(s *stage) {
	names := []string{
		`o'brien`, `"quoted"`, `'; drop table events; --`, `%s %d %n`, `back\slash`, `\`, `%`, `_`, `a%`, `a_`, `ab`, `a b`, `a`, `A`, `a `, ` a`,
		`é`, "e\u0301", `日本`, `🎥`, "\u202e", "\ufeff", "\ufffd", `$1`, `?`, `:name`, `@p`, `{}`, `a-b`, `a--b`, `a/b`, `0`, `00`, `null`, `NULL`,
		strings.Repeat("x", 248), strings.Repeat("x", 247), strings.Repeat("é", 124),
	}
	ids := map[string]string{}
	for _, name := range names {
		d := draft()
		d.Type = name
		s.append("review-"+name, eventstore.NoStream, d)
		ids[name] = d.ID
	}
	for _, name := range names {
		events := s.read(s.db, "review-"+name, 0)
		same(s, fmt.Sprintf("events in %q", name), len(events), 1)
		same(s, "event", []string{events[0].ID, events[0].Stream, events[0].Type}, []string{ids[name], "review-" + name, name})
		entries := s.entries(outbox.Filter{Topic: "review", Key: "review-" + name})
		same(s, fmt.Sprintf("entries of key %q", name), len(entries), 1)
		same(s, "entry", []string{entries[0].ID, entries[0].Headers[provider.HeaderType]}, []string{ids[name], name})
	}
}

func payloadLimit(s *stage) {
	d, over := draft(), draft()
	d.Data = []byte(`"` + strings.Repeat("x", 998) + `"`)
	over.Data = []byte(`"` + strings.Repeat("x", 999) + `"`)
	s.append("review-1", eventstore.NoStream, d)
	_, err := s.db.Append(s.ctx, "review-1", 1, []eventstore.Draft{over})
	s.invalid(err, "append of 1001 bytes")
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		s.invalid(view.Enqueue(s.ctx, outbox.Message{Topic: "review", Payload: over.Data}), "enqueue 1001 bytes")
		return view.Enqueue(s.ctx, outbox.Message{Topic: "review", Payload: d.Data})
	}), "enqueue 1000 bytes")
	same(s, "entries", len(s.entries(outbox.Filter{})), 1)
	same(s, "events", len(s.readIDs("review-1")), 1)
}

func numbersInFull(s *stage) {
	numbers := func(n int, number string) []byte {
		return []byte("[" + strings.TrimSuffix(strings.Repeat(number+",", n), ",") + "]")
	}
	var cases []bad
	for name, data := range map[string][]byte{
		"9 KB that are 131 MB":   numbers(1000, "1e131071"),
		"180 KB that are 2.6 GB": numbers(20_000, "1e131071"),
		"small numbers":          numbers(65, "1e-16383"),
		"in an object":           fmt.Appendf(nil, `{"a":{"b":%s}}`, numbers(8, "-9.5E+131071")),
	} {
		cases = append(cases, bad{name, func(d *eventstore.Draft) { d.Data = data }})
	}
	s.refuses(cases)
	large := draft()
	large.Data = numbers(7, "1e131071")
	s.append("review-1", 1, large)
	events := s.read(s.db, "review-1", 0)
	same(s, "events", len(events), 2)
	s.require(sameJSON(events[1].Data, large.Data), "the numbers are read as they were appended")
}
