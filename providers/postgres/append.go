package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

// PostgreSQL keeps a plan that it made while a table was empty when the table grows. Therefore prepared statements leave the
// planner no choice: lookups are lateral subqueries with a limit, or in a case, which is never turned into a join.
// Statements for a whole batch are planned on each call instead.

// An append is one statement: the clock, read once, and at least local durability; the stream's row, raised from the
// expected version unless an id is stored; the events; their entries. It returns no row for a conflict or a repeat.
const (
	appendHead = `
with ck as materialized (
	select clock_timestamp() t, case when current_setting('synchronous_commit') = 'off'
		then set_config('synchronous_commit', 'local', true) end),`

	// The stream's row: $2 is the category, $3 the number of events, $9 the expected version.
	appendExact = `
s as (
	update kinora.streams s set version = version + $3::bigint, ended = e.ended from e
	where stream = $1::text and version = $9::bigint and not s.ended and $2::text <> '' and not exists (select from known)
	returning version),`
	appendNoStream = `
s as (
	insert into kinora.streams (stream, category, version, ended)
	select $1::text, $2::text, $3::bigint, e.ended from e where $9::bigint = 0 and not exists (select from known)
	on conflict (stream) do nothing
	returning version),`
	appendAny = `
s as (
	insert into kinora.streams as s (stream, category, version, ended)
	select $1::text, $2::text, $3::bigint, e.ended from e where $9::bigint = -1 and not exists (select from known)
	on conflict (stream) do update set version = s.version + excluded.version, ended = excluded.ended where not s.ended
	returning version),`

	// One event, the usual case, is sent as scalars: see docs/adr/0004.
	appendOneKnown = `
e as (select $5::text = 'kinora.ended' as ended),
known as materialized (select from kinora.events where id = $4::uuid limit 1),`
	appendOneEvent = `
ev as (
	insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select $1::text, s.version, $4::uuid, $5::text, $6::int, $7::jsonb, $8::jsonb, ck.t from s, ck
	returning version, position)`
	appendOneEntry = `,
ob as (
	insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
	select $4::uuid::text, $10::text, $1::text, $11::bytea, ($12::text` + headersPlace + `, ck.t, ck.t from s, ck, ev)`
	appendOneTail = `
select s.version, ev.position from s, ev`

	appendKnown = `
e as (select 'kinora.ended' = any($5::text[]) as ended),
i as (
	select * from unnest($4::text[]::uuid[], $5::text[], $6::int[], $7::jsonb[], $8::jsonb[])
		with ordinality u(id, type, schema_version, data, metadata, o)),
known as materialized (
	select from i, lateral (select from kinora.events where id = i.id limit 1) e limit 1),`
	appendEvents = `
ev as (
	insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select $1::text, s.version - $3::bigint + i.o, i.id, i.type, i.schema_version, i.data, i.metadata, ck.t
	from s, i, ck order by i.o
	returning version, position)`
	appendEntries = `,
ob as (
	insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
	select n.id, n.topic, $1::text, n.payload, (n.headers` + headersPlace + `, ck.t, ck.t
	from s, ck, unnest($10::text[], $11::text[], $12::bytea[], $13::text[], $14::int[]) with ordinality n(id, topic, payload, headers, at, o)
	join ev on ev.version = (select version from s) - $3::bigint + n.at order by n.o)`
	appendTail = `
select s.version, (select max(position) from ev) from s`

	// Headers are sent as the text of an object that ends in the middle: headersTail. Its end is added
	// here. This takes half of the time of jsonb_build_object and the operator ||.
	headersPlace = ` || ev.position::text || '","` + provider.HeaderVersion + `":"' || ev.version::text || '"}')::jsonb`
	headersTail  = `,"` + provider.HeaderPosition + `":"`
)

// The statements by expected version, without and with entries: for one event with at most one
// entry, and for any number.
const (
	appendOneExactSQL         = appendHead + appendOneKnown + appendExact + appendOneEvent + appendOneTail
	appendOneNoStreamSQL      = appendHead + appendOneKnown + appendNoStream + appendOneEvent + appendOneTail
	appendOneAnySQL           = appendHead + appendOneKnown + appendAny + appendOneEvent + appendOneTail
	appendOneExactEntrySQL    = appendHead + appendOneKnown + appendExact + appendOneEvent + appendOneEntry + appendOneTail
	appendOneNoStreamEntrySQL = appendHead + appendOneKnown + appendNoStream + appendOneEvent + appendOneEntry + appendOneTail
	appendOneAnyEntrySQL      = appendHead + appendOneKnown + appendAny + appendOneEvent + appendOneEntry + appendOneTail

	appendExactSQL           = appendHead + appendKnown + appendExact + appendEvents + appendTail
	appendNoStreamSQL        = appendHead + appendKnown + appendNoStream + appendEvents + appendTail
	appendAnySQL             = appendHead + appendKnown + appendAny + appendEvents + appendTail
	appendExactEntriesSQL    = appendHead + appendKnown + appendExact + appendEvents + appendEntries + appendTail
	appendNoStreamEntriesSQL = appendHead + appendKnown + appendNoStream + appendEvents + appendEntries + appendTail
	appendAnyEntriesSQL      = appendHead + appendKnown + appendAny + appendEvents + appendEntries + appendTail
)

// whereSQL reads, in a snapshot newer than any wait of the append, where its events are (how many
// are stored; at which version they begin, if they are in order in this stream; the highest
// position) and the version of the stream.
const whereSQL = `
with known as materialized (
	select e.stream, e.version, e.position, i.o from unnest($2::text[]::uuid[]) with ordinality i(id, o),
		lateral (select stream, version, position from kinora.events where id = i.id limit 1) e)
select (select count(*) from known),
	(select case when bool_and(stream = $1::text) and min(version - o) = max(version - o) then min(version - o) end from known),
	(select max(position) from known), coalesce((select version from kinora.streams where stream = $1::text), 0),
	coalesce((select ended from kinora.streams where stream = $1::text), false)`

// appending is one append in progress.
type appending struct {
	db       *Provider
	stream   string
	expected eventstore.Expected
	ids      []string // as text: pgx encodes slices of uuids only if it knows the parameter's type
	log      string   // LogID.Lineage
	sql      string
	args     []any
	entries  bool
	refusal  bool // the server has replied that nothing was written; the reason is read next
}

func (db *Provider) newAppend(ctx context.Context, q querier, stream string, expected eventstore.Expected, events []eventstore.Draft) (*appending, error) {
	if err := provider.CheckAppend(stream, expected, events, db.cfg.MaxPayload); err != nil {
		return nil, err
	}
	topics, err := provider.Topics(db.cfg.Route, stream, events)
	if err != nil {
		return nil, err
	}
	log, err := db.logName(ctx, q)
	if err != nil {
		return nil, fmt.Errorf("append to %s: %w", stream, err)
	}
	n := len(events)
	a := &appending{db: db, stream: stream, expected: expected, ids: make([]string, n)}
	a.log, _, _ = strings.Cut(log, "/")
	types, schemas, data, metadata := make([]string, n), make([]int32, n), make([]json.RawMessage, n), make([]json.RawMessage, n)
	var at []int32
	var ids, topic, headers []string
	var payloads [][]byte
	for i, d := range events {
		a.ids[i] = uuid.MustParse(d.ID).String() // CheckAppend has parsed it
		types[i], schemas[i], data[i] = d.Type, int32(d.Schema), d.Data
		if metadata[i], err = metadataJSON(&d.Metadata); err != nil {
			return nil, err
		}
		for _, t := range topics[i] {
			m := provider.FromEvent(stream, 0, d, t)
			m.Headers[provider.HeaderLog] = log
			delete(m.Headers, provider.HeaderVersion) // the statement sets it, and the position
			h := headersJSON(m.Headers)
			at, ids = append(at, int32(i+1)), append(ids, m.ID)
			topic, payloads, headers = append(topic, t), append(payloads, m.Payload), append(headers, string(h[:len(h)-1])+headersTail)
		}
	}
	a.entries = len(at) > 0
	a.args = []any{stream, provider.Category(stream), int64(n)}
	if n == 1 && len(at) <= 1 {
		a.args = append(a.args, a.ids[0], types[0], schemas[0], data[0], metadata[0], int64(expected))
		if a.entries {
			a.args = append(a.args, topic[0], payloads[0], headers[0])
		}
		a.sql = db.q(pick(expected, a.entries, appendOneAnySQL, appendOneNoStreamSQL, appendOneExactSQL,
			appendOneAnyEntrySQL, appendOneNoStreamEntrySQL, appendOneExactEntrySQL))
		return a, nil
	}
	a.args = append(a.args, a.ids, types, schemas, data, metadata, int64(expected))
	if a.entries {
		a.args = append(a.args, ids, topic, payloads, headers, at)
	}
	a.sql = db.q(pick(expected, a.entries, appendAnySQL, appendNoStreamSQL, appendExactSQL,
		appendAnyEntriesSQL, appendNoStreamEntriesSQL, appendExactEntriesSQL))
	return a, nil
}

func metadataJSON(m *eventstore.Metadata) (json.RawMessage, error) {
	if m.CorrelationID == "" && m.CausationID == "" && m.Traceparent == "" && m.Actor == "" && len(m.Extra) == 0 {
		return json.RawMessage(`{}`), nil
	}
	return json.Marshal(m)
}

// pick returns the statement for any version, no stream or an exact version; with entries, of the second three.
func pick(expected eventstore.Expected, entries bool, statements ...string) string {
	if entries {
		statements = statements[3:]
	}
	return statements[min(expected, 1)-eventstore.Any]
}

// run sends the statement once.
func (a *appending) run(ctx context.Context, q querier) (eventstore.Appended, error) {
	at := eventstore.Appended{Stream: a.stream, Count: len(a.ids), Log: a.log}
	a.refusal = false
	crash.Point("append: before")
	err := q.QueryRow(ctx, a.sql, a.args...).Scan(&at.Version, &at.Position)
	crash.Point("append: after")
	switch a.refusal = errors.Is(err, pgx.ErrNoRows); {
	case a.refusal:
		return a.refused(ctx, q)
	case violates(err, "outbox_topic_message_id_key"): // an enqueued message has an event's id
		err = fmt.Errorf("%w: %w", eventstore.ErrEventIDReused, err)
	case violates(err, "events_stream_version_key"):
		return eventstore.Appended{}, a.damaged()
	}
	if err != nil {
		return eventstore.Appended{}, a.wrap(explain(err))
	}
	return at, nil
}

func (a *appending) wrap(err error) error { return wrap("append to "+a.stream, err) }

// refused reads why nothing was written.
func (a *appending) refused(ctx context.Context, q querier) (eventstore.Appended, error) {
	var known int
	var base, last *int64
	var actual int64
	var ended bool
	if err := q.QueryRow(ctx, a.db.q(whereSQL), a.stream, a.ids).Scan(&known, &base, &last, &actual, &ended); err != nil {
		return eventstore.Appended{}, a.wrap(explain(err))
	}
	isRepeat := known == len(a.ids) && base != nil && (a.expected == eventstore.Any || *base == int64(a.expected))
	switch {
	case isRepeat:
		n := len(a.ids)
		return eventstore.Appended{Stream: a.stream, Version: *base + int64(n), Position: *last, Count: n, Log: a.log, Replayed: true}, nil
	case ended:
		return eventstore.Appended{}, a.wrap(eventstore.ErrStreamEnded)
	case known > 0:
		return eventstore.Appended{}, a.wrap(eventstore.ErrEventIDReused)
	}
	return eventstore.Appended{}, a.conflict(ctx, q, actual)
}

const beyondSQL = `
select exists (select from kinora.events where stream = $1::text
	and version > coalesce((select version from kinora.streams where stream = $1::text), 0))`

// conflict returns the error of an append that expects another version. A reader has seen no more events than the row of the
// stream counts, unless the row is damaged.
func (a *appending) conflict(ctx context.Context, q querier, actual int64) error {
	if int64(a.expected) > actual {
		var beyond bool
		if err := q.QueryRow(ctx, a.db.q(beyondSQL), planned, a.stream).Scan(&beyond); err != nil {
			return a.wrap(explain(err))
		}
		if beyond {
			return a.damaged()
		}
	}
	return &eventstore.ConflictError{Stream: a.stream, Expected: a.expected, Actual: actual}
}

func (a *appending) damaged() error {
	return fmt.Errorf("append to %s: %w: restore the row: insert into %[3]s.streams as s (stream, category, version, ended) "+
		"select stream, '%[4]s', max(version), bool_or(type = 'kinora.ended') from %[3]s.events where stream = '%[5]s' group by stream "+
		"on conflict (stream) do update set version = greatest(s.version, excluded.version), ended = excluded.ended", a.stream, eventstore.ErrDamaged,
		a.db.cfg.Schema, provider.Category(a.stream), strings.ReplaceAll(a.stream, "'", "''"))
}

const resolveTries = 20

// isRolledBack reports whether the server may execute a transaction that it rolled back on another try.
func isRolledBack(err error) bool {
	e := pgError(err)
	return e != nil && (e.Code == deadlockDetected || e.Code == serializationFailed)
}

// tryOnce calls run on a connection of the pool. sent reports whether it got a connection.
func (a *appending) tryOnce(ctx context.Context) (at eventstore.Appended, sent bool, err error) {
	conn, err := a.db.acquire(ctx)
	if err != nil {
		return at, false, a.wrap(err)
	}
	defer conn.Release()
	at, err = a.run(ctx, conn)
	return at, true, err
}

// Append implements eventstore.Store with one statement in one round trip. Many callers at once share transactions, and so
// commits, each with its own result and without the values of its context. After a deadlock or a serialization failure it
// tries again, up to 20 times, with pauses of 15 seconds in total.
func (db *DB) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	shared := isSmall(events)
	if shared {
		events = slices.Clone(events) // the shared transaction may send them after this call has returned
		for i := range events {
			events[i].Data = slices.Clone(events[i].Data)
		}
	}
	a, err := db.newAppend(ctx, db.pool, stream, expected, events)
	if err == nil {
		err = a.wrap(ctx.Err())
	}
	if err != nil {
		return eventstore.Appended{}, err
	}
	send := a.tryOnce
	if shared {
		send = a.share
	}
	at, err := a.tryUntilKnown(ctx, send)
	if err == nil && !at.Replayed {
		db.appended(a.entries)
	}
	return at, err
}

// tryUntilKnown tries an append until its outcome is known, or there is no hope: first by send, and then alone.
func (a *appending) tryUntilKnown(ctx context.Context, send func(context.Context) (eventstore.Appended, bool, error)) (eventstore.Appended, error) {
	ambiguous := false // an earlier try may have been executed
	for try := 1; ; try++ {
		at, sent, err := send(ctx)
		send = a.tryOnce
		lost := sent && maybeExecuted(err)
		switch {
		case err == nil:
			at.Replayed = at.Replayed && !ambiguous // else this call wrote them, and the reply was lost
			return at, nil
		case isAnswer(err):
			return eventstore.Appended{}, err
		case try > resolveTries:
		case violates(err, "events_id_key"): // a concurrent append of these ids: the next try finds them
			continue
		case isRolledBack(err):
			if pause(ctx, try) == nil {
				continue
			}
		case ctx.Err() == nil && (lost || ambiguous && (!sent || isNetwork(err))):
			// A second try is safe: the statement finds the ids if they were written. If only the reply to
			// whereSQL is lost, nothing was written.
			ambiguous = ambiguous || !a.refusal
			if pause(ctx, try) == nil {
				continue
			}
		}
		if ambiguous || lost && !a.refusal {
			return eventstore.Appended{}, fmt.Errorf("%w: %w", eventstore.ErrAmbiguous, err)
		}
		return eventstore.Appended{}, err
	}
}

// isAnswer reports whether the server has refused an append.
func isAnswer(err error) bool {
	return errors.Is(err, eventstore.ErrConflict) || errors.Is(err, eventstore.ErrEventIDReused) ||
		errors.Is(err, eventstore.ErrDamaged) || errors.Is(err, eventstore.ErrStreamEnded)
}

// pauseAfter returns a pause that is longer after each try, 20ms to 1s.
func pauseAfter(try int) time.Duration {
	return pauses.Doubled(20*time.Millisecond, try-1, time.Second)
}

func pause(ctx context.Context, try int) error {
	pauses.Wait(ctx, pauseAfter(try), nil)
	return ctx.Err()
}

// Append implements eventstore.TxStore with one exception to "usable": if another transaction is appending one of the ids
// at the same time, or a message was enqueued under it, the caller's transaction is aborted with ErrEventIDReused. A new
// one finds the ids. ErrDamaged may leave the transaction aborted too.
func (t *Tx) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (at eventstore.Appended, err error) {
	err = t.in(ctx, func(q session) error {
		a, err := t.db.newAppend(ctx, q, stream, expected, events)
		if err != nil {
			return err
		}
		at, err = a.run(ctx, q)
		return err
	})
	if violates(err, "events_id_key") {
		err = fmt.Errorf("%w: %w", eventstore.ErrEventIDReused, err)
	}
	return at, err
}
