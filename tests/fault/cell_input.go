package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

var inputCell = &cell{
	// Promise: G1.15
	name: "input", number: 14, summary: "payloads and names that no database can store or must not run",
	full: 15 * time.Second, short: 3 * time.Second, requires: []string{"refused", "stored"}, run: runInput,
}

// statements counts the statements that a pool sends.
type statements struct{ n atomic.Int64 }

// TraceQueryStart implements pgx.QueryTracer.
func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n.Add(1)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements pgx.BatchTracer.
func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	s.n.Add(int64(d.Batch.Len()))
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (s *statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// badPayloads are not JSON, or are JSON that not every provider can store unchanged.
var badPayloads = map[string]string{
	"empty": "", "no_json": "{", "two_values": "1 2", "nul": "\"\x00\"", "escaped_nul": `"\u0000"`, "nul_in_key": `{"a\u0000":1}`,
	"not_utf8": "\"\xff\"", "overlong": "\"\xc0\x80\"", "lone_surrogate": `"\ud800"`, "late_surrogate": `"\udc00\ud800"`,
	"overflow": "1e131072", "underflow": "1e-16384", "exponent": "1e99999999999999999999", "digits": strings.Repeat("9", 131073),
	"deep_arrays":  strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000),
	"deep_objects": strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000),
	"too_long":     `"` + strings.Repeat("x", provider.DefaultMaxPayload) + `"`,
	"expands":      "[" + strings.Repeat("1e131071,", 7) + "1e131071]",
	"key_twice":    `{"a":1,"a":2}`, "nan": "NaN", "infinity": "-Infinity", "hex": "0x10", "comment": "1 -- one",
}

// badTexts are not valid as topics, keys or ids.
var badTexts = map[string]string{
	"nul": "a\x00b", "not_utf8": "a\xffb", "surrogate": "a\xed\xa0\x80b", "newline": "a\nb", "delete": "a\x7fb", "256_bytes": strings.Repeat("é", 128),
}

// badNames are not valid as names of schemas, categories, projectors or handlers. Most are valid as
// other text: see keepable.
var badNames = map[string]string{
	"quote": `a"b`, "apostrophe": "a'b", "injection": "kinora; drop schema kinora cascade; --", "comment": "a;--", "unicode": "größe", "fullwidth": "\uff4binora",
	"64_bytes": strings.Repeat("a", 64), "63_bytes": strings.Repeat("a", 63), "upper": "Kinora", "digit": "1a", "dot": "kinora.events", "space": "a b",
	"dash": "a-b", "newline": "kinora\n", "dollar": "a$b", "nul": "a\x00",
}

// keepable is text that must be stored and read back unchanged, even if it has a meaning in SQL.
var keepable = []string{`a"b`, "a'b", "'; drop schema kinora cascade; --", "a;--", "größe", "名前", `a\b`, "$1", "%s", "{}", "e\u0301", "\u202egnp", "😀", strings.Repeat("a", 200)}

// input is the running cell. Every statement on its database is counted.
type input struct {
	*run
	sent *statements
	db   *postgres.DB
}

func runInput(r *run) {
	r.server(brokerConfig{})
	config, err := pgxpool.ParseConfig(r.dsn + "&application_name=input")
	r.must(err)
	in := &input{run: r, sent: &statements{}}
	config.ConnConfig.Tracer = in.sent
	pool, err := pgxpool.NewWithConfig(r.suite.ctx, config)
	r.must(err)
	defer pool.Close()
	in.db, err = postgres.New(pool, &postgres.Config{Route: func(_ string, d eventstore.Draft) []string { return []string{d.Type} }})
	r.must(err)
	before := in.tables()
	in.appends()
	in.enqueues()
	in.names(pool)
	if after := in.tables(); after != before {
		r.fail("something was written: the tables have %s, before they had %s", after, before)
	}
	in.keeps(pool)
	r.judge()
}

// tables returns the numbers of rows and relations.
func (in *input) tables() string {
	var n [4]int
	in.must(in.pool.QueryRow(in.suite.ctx, `select (select count(*) from kinora.events), (select count(*) from kinora.outbox),
		(select count(*) from kinora.streams), (select count(*) from pg_class)`).Scan(&n[0], &n[1], &n[2], &n[3]))
	return fmt.Sprint(n)
}

// refused makes a call, which must be refused before any statement is sent.
func (in *input) refused(what string, call func() error) {
	before := in.sent.n.Load()
	err := call()
	sent := in.sent.n.Load() - before
	var invalid *eventstore.InvalidError
	switch {
	case err == nil:
		in.fail("%s is accepted", what)
	case !errors.Is(err, eventstore.ErrInvalid) || !errors.As(err, &invalid):
		in.fail("%s is refused with %v", what, err)
	case sent > 0:
		in.fail("%s: %d statements were sent", what, sent)
	default:
		in.inject("refused", 1)
	}
}

func draft(change func(*eventstore.Draft)) []eventstore.Draft {
	good := func() eventstore.Draft {
		return eventstore.Draft{ID: uuid.NewString(), Type: "posted", Schema: 1, Data: []byte(`{}`)}
	}
	bad := good()
	change(&bad)
	return []eventstore.Draft{good(), bad} // the valid draft must not be written either
}

func (in *input) append(stream string, change func(*eventstore.Draft)) func() error {
	return func() error {
		_, err := in.db.Append(in.suite.ctx, stream, eventstore.Any, draft(change))
		return err
	}
}

func (in *input) appends() {
	for kind, text := range badPayloads {
		in.refused("payload "+kind, in.append("a-1", func(d *eventstore.Draft) { d.Data = []byte(text) }))
	}
	for kind, text := range badTexts {
		in.refused("stream "+kind, in.append("a-"+text, func(*eventstore.Draft) {}))
		in.refused("type "+kind, in.append("a-1", func(d *eventstore.Draft) { d.Type = text }))
		in.refused("event id "+kind, in.append("a-1", func(d *eventstore.Draft) { d.ID = text }))
		in.refused("metadata key "+kind, in.append("a-1", func(d *eventstore.Draft) { d.Metadata.Extra = map[string]string{text: ""} }))
		if kind != "256_bytes" {
			in.refused("metadata "+kind, in.append("a-1", func(d *eventstore.Draft) { d.Metadata.Actor = text }))
		}
	}
	for kind, name := range badNames {
		if kind != "dash" {
			in.refused("category "+kind, in.append(name+"-1", func(*eventstore.Draft) {}))
		}
	}
	for _, schema := range []int{-1, 0, 1 << 15} {
		in.refused(fmt.Sprint("schema ", schema), in.append("a-1", func(d *eventstore.Draft) { d.Schema = schema }))
	}
}

func (in *input) enqueues() {
	tx, err := in.db.Pool().Begin(in.suite.ctx)
	in.must(err)
	defer func() { _ = tx.Rollback(in.suite.ctx) }()
	try := func(what string, change func(*outbox.Message)) {
		good := outbox.Message{ID: uuid.NewString(), Topic: "t", Key: "k"}
		bad := outbox.Message{ID: uuid.NewString(), Topic: "t", Key: "k"}
		change(&bad)
		in.refused(what, func() error { return in.db.InTx(tx).Enqueue(in.suite.ctx, good, bad) })
	}
	for kind, text := range badTexts {
		try("topic "+kind, func(m *outbox.Message) { m.Topic = text })
		try("key "+kind, func(m *outbox.Message) { m.Key = text })
		try("message id "+kind, func(m *outbox.Message) { m.ID = text })
		try("header "+kind, func(m *outbox.Message) { m.Headers = map[string]string{text: ""} })
	}
	try("topic empty", func(m *outbox.Message) { m.Topic = "" })
	try("payload too long", func(m *outbox.Message) { m.Payload = make([]byte, provider.DefaultMaxPayload+1) })
	try("header value too long", func(m *outbox.Message) { m.Headers = map[string]string{"h": strings.Repeat("x", 1025)} })
	in.must(tx.Commit(in.suite.ctx))
}

// names tries names that become part of SQL or of markers.
func (in *input) names(pool *pgxpool.Pool) {
	for kind, name := range badNames {
		in.refused("schema "+kind, func() error { _, err := postgres.New(pool, &postgres.Config{Schema: name}); return err })
		in.refused("schema opened "+kind, func() error {
			_, err := postgres.Open(in.suite.ctx, in.dsn, &postgres.Config{Schema: name})
			return err
		})
		if kind == "dash" { // projectors and handlers may contain one
			continue
		}
		src := projector.Subscribe(&subscriber{}, "t")
		handler := func(context.Context, pgx.Tx, eventstore.Event[moved]) error { return nil }
		in.refused("projector "+kind, func() error {
			_, err := projector.NewRunner(in.db, src, projector.RunnerConfig{}, projector.Define(name, types, projector.Options{Markers: true}, projector.On("h", handler)))
			return err
		})
		in.refused("handler "+kind, func() error {
			_, err := projector.NewRunner(in.db, src, projector.RunnerConfig{}, projector.Define("p", types, projector.Options{Markers: true}, projector.On(name, handler)))
			return err
		})
	}
}

// keeps writes allowed text into every text column of its own schema, and must read the same text
// back. Then it tries random texts and payloads: each is either refused before any statement, or
// stored.
func (in *input) keeps(pool *pgxpool.Pool) {
	db, err := postgres.New(pool, &postgres.Config{Schema: "kept", Route: func(_ string, d eventstore.Draft) []string { return []string{d.Type} }})
	in.must(err)
	in.must(db.Migrate(in.suite.ctx))
	in.db = db
	for _, text := range keepable {
		in.keep(text, []byte(`{"a":1}`))
	}
	for end := time.Now().Add(in.length); time.Now().Before(end); {
		in.keep(in.garble(keepable, badTexts), []byte(in.garble([]string{`{"a":[1,"b"]}`, `"\ud83d\ude00"`, "1e131071", "-0.5", "[]"}, badPayloads)))
		in.must(in.suite.ctx.Err())
	}
}

// garble joins pieces and sometimes changes a byte.
func (in *input) garble(good []string, bad map[string]string) string {
	text := good[in.intn(len(good))]
	if in.intn(8) == 0 {
		kinds := slices.Sorted(maps.Keys(bad))
		text = bad[kinds[in.intn(len(kinds))]]
	}
	if b := []byte(text); in.intn(3) == 0 && len(b) > 0 {
		b[in.intn(len(b))] = byte(in.intn(256))
		return string(b)
	}
	return text
}

func (in *input) keep(text string, payload []byte) {
	stream := "a-" + text
	d := eventstore.Draft{ID: uuid.NewString(), Type: text, Schema: 1, Data: payload, Metadata: eventstore.Metadata{Actor: text, Extra: map[string]string{text: text}}}
	before := in.sent.n.Load()
	_, err := in.db.Append(in.suite.ctx, stream, eventstore.Any, []eventstore.Draft{d})
	if errors.Is(err, eventstore.ErrInvalid) {
		if in.sent.n.Load() != before {
			in.fail("%q %q is refused after a statement", text, payload)
		}
		in.inject("refused", 1)
		return
	}
	if err != nil {
		in.fail("%q with %.80q: %v", text, payload, err)
		return
	}
	in.inject("stored", 1)
	var got [4]string
	err = in.pool.QueryRow(in.suite.ctx, `select stream, type, metadata->>'actor', (select topic from kept.outbox where message_id = $1::uuid::text)
		from kept.events where id = $1`, d.ID).Scan(&got[0], &got[1], &got[2], &got[3])
	if want := [4]string{stream, text, text, text}; err != nil || got != want {
		in.fail("%q came back as %q, %v", want, got, err)
	}
}
