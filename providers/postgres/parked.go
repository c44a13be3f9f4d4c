package postgres

import (
	"cmp"
	"context"
	"encoding/base64"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// encoded is the prefix of a text that holds bytes in base64.
const encoded = "\uFFFD"

// storable returns a text for s that PostgreSQL can store: s, or its bytes in base64 if they are
// invalid UTF-8 or have a NUL.
func storable(s string) string {
	if utf8.ValidString(s) && !strings.Contains(s, "\x00") && !strings.HasPrefix(s, encoded) {
		return s
	}
	return encoded + base64.StdEncoding.EncodeToString([]byte(s))
}

// original is the inverse of storable.
func original(s string) string {
	if text, ok := strings.CutPrefix(s, encoded); ok {
		if b, err := base64.StdEncoding.DecodeString(text); err == nil {
			return string(b)
		}
	}
	return s
}

// inHeaders applies to to each name and value.
func inHeaders(h map[string]string, to func(string) string) map[string]string {
	changed := make(map[string]string, len(h))
	for k, v := range h {
		changed[to(k)] = to(v)
	}
	return changed
}

const (
	parkedColumns = parkedNames + `p.payload, p.headers` + parkedFate
	parkedNames   = `p.id, p.projector, p.generation, p.handler, p.handlers, p.message_id, p.topic, p.key, p.lane, p.type, `
	parkedFate    = `,
	p.class, p.code, p.error, p.attempts, p.version, p.parked_at, p.state, coalesce(p.resolved_at, ` + never + `), p.resolved_by, p.reason`

	never = `'0001-01-01 00:00Z'::timestamptz` // the zero time

	// Selects from each due lane its first message, or all up to the limit while they are of
	// class held. Each lane costs the same, however many others there are and however long it is.
	// If no lanes are given, an index finds the due ones: due_at > '-infinity' selects that
	// index.
	dueSQL = `
with ck as materialized (select clock_timestamp() t),
h as materialized (
	select n.projector, n.generation, n.o, h.lane, h.due_at from ck, unnest($1::text[], $2::int[]) with ordinality n(projector, generation, o), lateral (
		select lane, due_at from kinora.holds
		where holds.projector = n.projector and holds.generation = n.generation and due_at <= ck.t
			and ($5::bytea[] is not null or due_at > '-infinity') and ($5::bytea[] is null or lane = any($5::bytea[]))
		order by due_at limit $3::bigint) h)
select ` + parkedColumns + `, case when isfinite(h.due_at) then h.due_at else ` + never + ` end from h, lateral (
	select id from (
		select id, state, row_number() over o as n, count(*) filter (where class <> 'held' or state <> 'waiting') over o as counted
		from (
			select id, class, state from kinora.parked
			where parked.projector = h.projector and parked.generation = h.generation and parked.lane = h.lane and parked.lane <> '' and state in ('waiting', 'stuck')
			order by id limit $4::bigint) f
		window o as (order by id)) f
	where f.counted = 0 or f.n = 1 and f.state = 'waiting') f, lateral (select * from kinora.parked where id = f.id limit 1) p
order by h.o, h.due_at, h.lane, p.id`
)

// Due implements provider.Parking.
func (db *Provider) Due(ctx context.Context, f provider.DueFilter) ([]provider.Parked, error) {
	projectors := mapSlice(f.Builds, func(b *provider.Build) string { return b.Projector })
	generations := mapSlice(f.Builds, func(b *provider.Build) int { return b.Number() })
	lanes := mapSlice(f.Lanes, func(l *provider.Lane) []byte { return l[:] })
	list, err := read(ctx, db, "list due messages", provider.CheckDueFilter(f), scanParked, dueSQL, planned,
		projectors, generations, max(f.Keys, 0), max(f.Each, 1), lanes)
	return list, classifyOwn(ctx, err)
}

const trySQL = `
with ck as materialized (select clock_timestamp() t),
h as materialized (
	select 1 from ck, lateral (
		select from kinora.holds where projector = $1::text and generation = $8::int and lane = $2::bytea and due_at <= ck.t limit 1 for update skip locked) h),
p as (
	update kinora.parked set attempts = attempts + case when $6::int < 0 or attempts < $6::int then 1 else 0 end,
		state = case when $6::int < 0 or attempts < $6::int then 'waiting' else 'stuck' end
	where id = $3::bigint and attempts = $4::int and handlers = coalesce($5::text[], '{}') and state = 'waiting'
		and exists (select from h) and id = (
		select id from kinora.parked
		where projector = $1::text and generation = $8::int and lane = $2::bytea and lane <> '' and state in ('waiting', 'stuck') order by id limit 1)
	returning state),
put as (
	update kinora.holds set due_at = case when p.state = 'stuck' then 'infinity' else ck.t + $7::bigint * interval '1 microsecond' end
	from ck, p where projector = $1::text and generation = $8::int and lane = $2::bytea)
select state from p`

// Try implements provider.Parking.
func (db *Provider) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	var state string
	crash.Point("try parked: before")
	_, err := db.row(ctx, "count a try of a parked message", nil, []any{&state}, trySQL, planned, p.Projector, p.Lane[:], p.Seq, p.Attempts,
		p.Handlers, min(limit, math.MaxInt32), again.Microseconds(), provider.Build{Generation: p.Generation}.Number())
	crash.Point("try parked: after")
	return state == provider.StateWaiting.String(), classifyOwn(ctx, err)
}

const (
	// The condition of a filter. $1 to $10 are its arguments in all statements, and $11 is the
	// limit.
	parkedFilter = `
	p.id > 0 and ($1::text = '' or p.projector = $1::text) and ($2::text = '' or p.handler = $2::text)
	and ($3::text = '' or p.key = $3::text) and ($4::text = '' or p.class = $4::text) and ($5::text = '' or p.code = $5::text)
	and ($6::text[] is null or p.type = any($6::text[])) and p.state = any($7::text[])
	and ($8::bigint[] is null or p.id = any($8::bigint[])) and p.id > $9::bigint
	and ($10::int = 0 or p.generation = $10::int)`

	parkedSQL = `
select ` + parkedColumns + `, coalesce((
	select due_at from kinora.holds h
	where h.projector = p.projector and h.generation = p.generation and h.lane = p.lane and isfinite(due_at) and p.state in ('waiting', 'stuck') limit 1), ` + never + `)
from kinora.parked p where ` + parkedFilter + ` order by p.id limit $11::bigint`

	// Locks the lanes of the selected messages, in the same order as units do.
	pickSQL = `
select p.id from (
	select * from (
		select p.id, p.projector, p.generation, p.lane from kinora.parked p
		where p.state in ('waiting', 'stuck') and ` + parkedFilter + ` order by p.id limit $11::bigint) p
	order by projector, generation, lane) p left join lateral (
	select from kinora.holds where holds.projector = p.projector and holds.generation = p.generation and holds.lane = p.lane limit 1 for update) h on true`

	// Returns the lanes of the messages and the first message in each, for releaseSQL.
	decideSQL = `
with decided as (
	update kinora.parked set state = $2::text, attempts = case when $2::text = 'waiting' then 0 else attempts end,
		resolved_at = case when $2::text = 'skipped' then clock_timestamp() end,
		resolved_by = case when $3::text = '' then resolved_by else $3::text end, reason = case when $3::text = '' then reason else $4::text end
	where id = any($1::bigint[]) and state in ('waiting', 'stuck')
	returning id, projector, generation, lane)
select coalesce(sum(n), 0)::bigint, coalesce(json_agg(l), '[]')::text
from (select projector, generation, lane, min(id) as changed, count(*) as n from decided group by projector, generation, lane) l`
)

func parkedArgs(f provider.ParkedFilter, limit int64) []any {
	class := ""
	if f.Class != nil {
		class = f.Class.String()
	}
	types := mapSlice(f.Types, func(s *string) string { return storable(*s) })
	states := mapSlice(f.InStates(), func(s *provider.ParkedState) string { return s.String() })
	return []any{planned, f.Projector, f.Handler, storable(f.Key), class, storable(f.Code), types, states, f.Seqs, f.After, f.Generation, cmp.Or(int64(f.Limit), limit)}
}

// Parked implements provider.Parking.
func (db *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	return read(ctx, db.Provider, "list parked messages", provider.CheckParkedFilter(f), scanParked, parkedSQL, parkedArgs(f, 100)...)
}

const parkedCountSQL = `
select count(*) from kinora.parked p
where p.state in ('waiting', 'stuck') and p.id > 0 and ($1::text = '' or p.projector = $1::text) and not exists (
	select from kinora.generations g where g.projector = p.projector and g.generation = p.generation and g.state <> 'live')`

// ParkedCount returns how many messages of a projector's live generation wait or are stuck. If the
// name is empty, it counts those of all projectors.
func (db *DB) ParkedCount(ctx context.Context, projector string) (n int64, err error) {
	_, err = db.row(ctx, "count parked messages", provider.CheckStorable("projector", projector), []any{&n}, parkedCountSQL, planned, projector)
	return n, err
}

func scanParked(row pgx.CollectableRow) (provider.Parked, error) {
	var p provider.Parked
	var class, state string
	err := row.Scan(&p.Seq, &p.Projector, &p.Generation, &p.Handler, &p.Handlers, &p.MessageID, &p.Topic, &p.Key, &p.Lane, &p.Type, &p.Payload, &p.Headers,
		&class, &p.Code, &p.Error, &p.Attempts, &p.Version, &p.At, &state, &p.ResolvedAt, &p.By, &p.Reason, &p.DueAt)
	for _, text := range []*string{&p.Handler, &p.MessageID, &p.Topic, &p.Key, &p.Type, &p.Code, &p.Error, &p.Version, &p.By, &p.Reason} {
		*text = original(*text)
	}
	p.Headers = inHeaders(p.Headers, original)
	p.Class, p.State = provider.ParseClass(class), provider.ParseParkedState(state)
	p.At, p.ResolvedAt, p.DueAt = p.At.UTC(), p.ResolvedAt.UTC(), p.DueAt.UTC()
	return p, err
}

// Decide implements provider.Parking. It waits for units that have the lanes of these messages.
// After a deadlock it tries again.
func (db *Provider) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	if err = provider.CheckDecision(to, d); err == nil {
		err = provider.CheckParkedFilter(f)
	}
	if err != nil {
		return 0, wrap("decide about parked messages", err)
	}
	var changed string
	for range 5 {
		err = db.inTx(ctx, func(tx pgx.Tx) error {
			seqs, err := collect(ctx, tx, pgx.RowTo[int64], db.q(pickSQL), parkedArgs(f, noLimit)...)
			if err == nil {
				decided := tx.QueryRow(ctx, db.q(decideSQL), planned, seqs, to.String(), storable(d.By), storable(d.Reason))
				err = decided.Scan(&n, &changed)
			}
			if err == nil {
				_, err = tx.Exec(ctx, db.q(releaseSQL), planned, changed, "[]")
			}
			return err
		})
		if !isRolledBack(err) {
			break
		}
	}
	return n, wrap("decide about parked messages", explain(err))
}
