package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const enqueueSQL = `
insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
select n.message_id, n.topic, n.key, n.payload, n.headers, ck.t, ck.t
from (select clock_timestamp() t) ck,
	unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::jsonb[]) with ordinality n(message_id, topic, key, payload, headers, o)
order by n.o
on conflict (topic, message_id) do nothing`

// enqueueOneSQL is enqueueSQL for one message: without arrays it takes a sixth less of the server's time.
const enqueueOneSQL = `
insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
select $1, $2, $3, $4, $5, ck.t, ck.t from (select clock_timestamp() t) ck
on conflict (topic, message_id) do nothing`

// orderedKeysSQL waits for the other transactions that enqueue under these keys, in this order.
// It runs before the entries get their ids, so these ids follow those of the transactions for
// which it waited. The keys are sorted, so that two calls never deadlock.
const orderedKeysSQL = `select pg_advisory_xact_lock(k) from unnest($1::bigint[]) with ordinality u(k, o) order by o`

// queueEnqueue queues the statements that add messages to the outbox, if there are any.
func (db *Provider) queueEnqueue(ctx context.Context, b *pgx.Batch, ms []outbox.Message) error {
	var ids, topics, keys []string
	var payloads [][]byte
	var headers []json.RawMessage
	var locks []int64
	for i, m := range ms {
		if m.OrderedKey && m.Key != "" { // otherwise the key is the message's new id
			locks = append(locks, orderedKey(db.cfg.Schema, m.Topic, m.Key))
		}
		m, err := m.Normalize(ctx, db.cfg.MaxPayload)
		if err != nil {
			return fmt.Errorf("enqueue message %d: %w", i, err)
		}
		if m.Payload == nil {
			m.Payload = []byte{}
		}
		ids, topics, keys = append(ids, m.ID), append(topics, m.Topic), append(keys, m.Key)
		payloads, headers = append(payloads, m.Payload), append(headers, headersJSON(m.Headers))
	}
	if len(locks) > 0 {
		slices.Sort(locks)
		b.Queue(orderedKeysSQL, slices.Compact(locks))
	}
	switch len(ms) {
	case 0:
	case 1:
		b.Queue(db.q(enqueueOneSQL), ids[0], topics[0], keys[0], payloads[0], headers[0])
	default:
		b.Queue(db.q(enqueueSQL), ids, topics, keys, payloads, headers)
	}
	return nil
}

// Enqueue adds messages to the outbox in the transaction. A message whose id is in the outbox for
// that topic already is ignored. If a message is invalid, Enqueue adds none and returns an
// *eventstore.InvalidError.
func (t *Tx) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	b := &pgx.Batch{}
	if err := t.db.queueEnqueue(ctx, b, ms); err != nil || b.Len() == 0 {
		return err
	}
	crash.Point("enqueue: before")
	err := t.in(ctx, func(q session) error { return q.SendBatch(ctx, b).Close() })
	crash.Point("enqueue: after")
	if err != nil {
		return fmt.Errorf("enqueue: %w", explain(err))
	}
	return nil
}

// headersJSON returns h as a JSON object. For a map, json.Marshal takes several times as long.
func headersJSON(h map[string]string) json.RawMessage {
	b := make([]byte, 0, 64+64*len(h))
	b = append(b, '{')
	for name, value := range h {
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = appendJSON(append(appendJSON(b, name), ':'), value)
	}
	return append(b, '}')
}

// appendJSON appends s as a JSON string.
func appendJSON(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(s) // a string never fails
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// The condition of a filter. $1 to $7 are its arguments in all statements, and $8 is the limit.
const filtered = `
	($1::text[] is null or o.status = any($1::text[])) and ($2::text = '' or o.topic = $2::text)
	and ($3::text = '' or o.key = $3::text) and ($4::bigint[] is null or o.id = any($4::bigint[])) and o.id > $5::bigint
	and ($6::text = '' or o.headers ->> '` + provider.HeaderStream + `' = $6::text)
	and ($7::bigint <= 0 or o.created_at < (select clock_timestamp()) - $7::bigint * interval '1 microsecond')`

// A listing uses the index of the requested statuses and reads no resolved entries. A page of
// open and held entries is merged from a page of each, so that no backlog is sorted.
const (
	entriesSQL      = listEntries + filtered + listLimit
	openEntriesSQL  = listEntries + `o.open and o.id > 0 and` + filtered + listLimit
	heldEntriesSQL  = listEntries + `o.held and o.id > 0 and` + filtered + listLimit
	stuckEntriesSQL = listEntries + `o.stuck and` + filtered + listLimit
	bothEntriesSQL  = `select ` + entryColumns + ` from (` + both + `) o` + listLimit

	listEntries = `select ` + entryColumns + ` from kinora.outbox o where `
	listLimit   = ` order by o.id limit $8::bigint`

	both = `
	(select o.* from kinora.outbox o where o.open and o.id > 0 and` + filtered + listLimit + `)
	union all
	(select o.* from kinora.outbox o where o.held and o.id > 0 and` + filtered + listLimit + `)`

	countsSQL = `select status, count(*) from kinora.outbox where $1::text[] is null or status = any($1::text[]) group by status`

	openCountsSQL = `
select status, count(*) from (select status from kinora.outbox where open and id > 0 union all select status from kinora.outbox where held and id > 0) o
where status = any($1::text[]) group by status`

	stuckCountsSQL = `select status, count(*) from kinora.outbox where stuck and status = any($1::text[]) group by status`
)

// One statement locks and changes the selected entries. Another releases those held behind them: its
// snapshot is newer than any wait for a lock, during which more may have been held.
const (
	requeueSQL = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id from kinora.outbox o where o.stuck and o.status in ('failed', 'abandoned')
		and ($9::bigint <= 0 or o.last_attempt_at is null or ` + readable + `) and` + filtered + `
	order by o.id limit $8::bigint for update),
stale as materialized (
	select count(*) as n from kinora.outbox o, ck
	where o.id = any(array(select id from picked)) and $9::bigint > 0 and o.last_attempt_at < ck.t - $9::bigint * interval '1 microsecond'),
changed as (
	update kinora.outbox o set status = 'pending', open = true, held = false, stuck = false, attempts = 0, suspect = false, next_attempt_at = ck.t
	from picked, ck where o.id = picked.id and (select n from stale) = 0
	returning o.topic, o.key)` + changedLanes + `
union all
select '', '', -n from stale where n > 0`

	skipSQL = `
with ck as materialized (select clock_timestamp() t),
found as materialized (
	select o.id from (` + skippable + `) o order by o.id limit $8::bigint),
picked as materialized (
	select o.id from kinora.outbox o where o.id = any(array(select id from found)) and (o.status in ('pending', 'failed', 'held', 'abandoned') or ` + endless + `)
	order by o.id for update),
changed as (
	update kinora.outbox o set status = 'skipped', open = false, held = false, stuck = false, next_attempt_at = ck.t
	from picked, ck where o.id = picked.id
	returning o.topic, o.key)` + changedLanes

	skippable = `
	(select o.id from kinora.outbox o where o.open and o.id > 0 and (o.status in ('pending', 'failed') or ` + endless + `) and` + filtered + listLimit + `)
	union all
	(select o.id from kinora.outbox o where o.held and o.id > 0 and` + filtered + listLimit + `)`

	// Times from other writers: see provider.Entry.Malformed.
	readable = `o.last_attempt_at >= '0001-01-01 00:00:00+00' and o.last_attempt_at < '10000-01-01 00:00:00+00'`
	endless  = `o.status = 'claimed' and o.next_attempt_at >= '10000-01-01 00:00:00+00'`

	changedLanes = `
select topic, key, count(*) from changed group by topic, key`

	restoreSQL = `
with lanes as (select * from unnest($1::text[], $2::text[]) l(topic, key)),` + noneGone + restored + `
select count(*) from restored`
)

// texts returns nil for an empty list.
func texts[S ~string](list []S) []string {
	return some(mapSlice(list, func(s *S) string { return string(*s) }))
}

func filterArgs(f provider.EntryFilter, limit int64) []any {
	return []any{planned, texts(f.Status), f.Topic, f.Key, f.Seqs, f.After, f.Stream, f.Older.Microseconds(), cmp.Or(int64(f.Limit), limit)}
}

// only reports whether f selects some of these statuses and no other.
func only(f provider.EntryFilter, these ...outbox.Status) bool {
	return len(f.Status) > 0 && !slices.ContainsFunc(f.Status, func(s outbox.Status) bool { return !slices.Contains(these, s) })
}

const noLimit = 1 << 62

// Entries implements outbox.Inspector.
func (db *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	query := entriesSQL
	switch {
	case only(f, outbox.Failed, outbox.Abandoned):
		query = stuckEntriesSQL
	case only(f, outbox.Pending, outbox.Claimed, outbox.Failed):
		query = openEntriesSQL
	case only(f, outbox.Held, outbox.Abandoned):
		query = heldEntriesSQL
	case f.OnlyOpen():
		query = bothEntriesSQL
	}
	return read(ctx, db.Provider, "list entries", provider.CheckFilter(f), scanEntry, query, filterArgs(f, 100)...)
}

// StatusCounts implements outbox.Inspector.
func (db *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	f, query := provider.EntryFilter{Status: of}, countsSQL
	switch {
	case only(f, outbox.Failed, outbox.Abandoned):
		query = stuckCountsSQL
	case f.OnlyOpen():
		query = openCountsSQL
	}
	return counted(ctx, db, "count entries", provider.CheckFilter(f), provider.ZeroCounts(of), query, texts(of))
}

// counted adds the rows of a statement, a status and a number each, to counts.
func counted[S ~string](ctx context.Context, db *DB, doing string, invalid error, counts map[S]int64, sql string, args ...any) (map[S]int64, error) {
	type count struct {
		Status S
		N      int64
	}
	all, err := read(ctx, db.Provider, doing, invalid, pgx.RowToStructByPos[count], sql, args...)
	for _, c := range all {
		counts[c.Status] = c.N
	}
	return counts, err
}

// Requeue implements outbox.Inspector.
func (db *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	window := (db.cfg.RequeueWindow + time.Microsecond - 1).Microseconds() // rounded up: zero means by force
	if f.Force {
		window = 0
	}
	return db.change(ctx, "requeue entries", requeueSQL, f, window)
}

// Skip implements outbox.Inspector.
func (db *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	return db.change(ctx, "skip entries", skipSQL, f)
}

// lane identifies the entries that are published in order.
type lane struct{ topic, key string }

// change runs a statement that returns the lanes of its changed entries and their numbers. A
// negative number counts stale entries.
func (db *Provider) change(ctx context.Context, doing, statement string, f provider.EntryFilter, more ...any) (n int, err error) {
	if err := provider.CheckFilter(f); err != nil {
		return 0, wrap(doing, err)
	}
	var lanes []lane
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, db.q(statement), append(filterArgs(f, noLimit), more...)...) // the rows return its error too
		var l lane
		var some int
		if _, err := pgx.ForEachRow(rows, []any{&l.topic, &l.key, &some}, func() error {
			if some < 0 {
				return fmt.Errorf("%d entries: %w", -some, outbox.ErrStale)
			}
			lanes, n = append(lanes, l), n+some
			return nil
		}); err != nil {
			return err
		}
		for few := range slices.Chunk(lanes, 10_000) { // of one statement
			topics, keys := mapSlice(few, func(l *lane) string { return l.topic }), mapSlice(few, func(l *lane) string { return l.key })
			if _, err := tx.Exec(ctx, db.q(restoreSQL), planned, topics, keys); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, wrap(doing, explain(err))
	}
	if n > 0 {
		db.added()
	}
	return n, nil
}
