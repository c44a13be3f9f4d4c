package postgres

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"math"
	"slices"
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

// storableNeed is storable for a need. The texts of other hands are needs too: each text is stored for one need, and each
// need as one text, so that Due finds what Needs has returned.
func storableNeed(s string) string {
	if utf8.ValidString(s) && !strings.Contains(s, "\x00") && originalNeed(s) == s {
		return s
	}
	return encoded + base64.StdEncoding.EncodeToString([]byte(s))
}

// originalNeed is the inverse of storableNeed.
func originalNeed(s string) string {
	if need := original(s); need != s && storableNeed(need) == s {
		return need
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
	p.class, /*+*/p.needs/*-''*/, p.code, p.error, p.attempts, p.version, p.parked_at, p.state, coalesce(p.resolved_at, ` + never + `), p.resolved_by, p.reason`

	never = `'0001-01-01 00:00Z'::timestamptz` // the zero time

	// The due time of a lane whose first message is unable. That of a lane which waits for a person is infinity.
	unableUntil = `'9999-12-30 00:00Z'::timestamptz`

	// Selects from each due lane its first message, or all up to the limit while they are of class held. Each lane
	// costs the same. If no lanes are given, the index that due_at > '-infinity' selects finds the due ones.
	dueSQL = `
with ck as materialized (select clock_timestamp() t),
h as materialized (
	select n.projector, n.generation, n.o, h.lane, h.due_at from ck, unnest($1::text[], $2::int[]) with ordinality n(projector, generation, o), lateral (` +
		dueHolds + `) h)` + dueMessages + `class` + dueRest

	// The same for a program that has the needs $6 to $8. A lane that begins with one of them comes first, and its other
	// messages that need one count as held. If an earlier program made such a lane due, it is found twice.
	// With a case, the planner expects that many messages are the first of their lanes: it walks the index and sorts none.
	dueAbleSQL = `
with ck as materialized (select clock_timestamp() t),
has as materialized (select * from unnest($6::text[], $7::int[], $8::text[]) n(projector, generation, needs)),
h as materialized (
	select n.projector, n.generation, n.o, h.lane, h.due_at from ck, unnest($1::text[], $2::int[]) with ordinality n(projector, generation, o), lateral (
		select lane, min(due_at) as due_at from (
			select p.lane, '-infinity'::timestamptz as due_at from has, lateral (
				select lane from kinora.parked p
				where $5::bytea[] is null and p.projector = n.projector and p.generation = n.generation and p.needs = has.needs and p.needs <> ''
					and p.state = 'waiting' and p.class = 'unable' and case when p.id = (
						select id from kinora.parked
						where parked.projector = n.projector and parked.generation = n.generation and parked.lane = p.lane and parked.lane <> '' and state in ('waiting', 'stuck')
						order by id limit 1)
					then (select true from kinora.holds where holds.projector = n.projector and holds.generation = n.generation and holds.lane = p.lane limit 1) end
				order by p.id limit $3::bigint) p
			where has.projector = n.projector and has.generation = n.generation
			union all
			select p.lane, '-infinity' from unnest($5::bytea[]) l(lane), lateral (
				select projector, generation, lane, state, class, needs from kinora.parked
				where parked.projector = n.projector and parked.generation = n.generation and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
				order by id limit 1) p
			where p.state = 'waiting' and ` + isAble + `
				and (select true from kinora.holds where holds.projector = n.projector and holds.generation = n.generation and holds.lane = p.lane limit 1)
			union all (` + dueHolds + `)) h
		group by lane order by due_at limit $3::bigint) h)` + dueMessages + `case when ` + isAble + ` then 'held' else class end as class` + dueRest

	dueHolds = `
		select lane, due_at from kinora.holds
		where holds.projector = n.projector and holds.generation = n.generation and due_at <= ck.t
			and ($5::bytea[] is not null or due_at > '-infinity') and ($5::bytea[] is null or lane = any($5::bytea[]))
		order by due_at limit $3::bigint`

	isAble = `p.class = 'unable' and p.needs <> '' and (p.projector, p.generation, p.needs) in (select projector, generation, needs from has)`

	dueMessages = `
select ` + parkedColumns + `, case when isfinite(h.due_at) then h.due_at else ` + never + ` end from h, lateral (
	select id from (
		select id, state, row_number() over o as n, count(*) filter (where class <> 'held' or state <> 'waiting') over o as counted
		from (
			select id, state, `

	dueRest = ` from kinora.parked p
			where p.projector = h.projector and p.generation = h.generation and p.lane = h.lane and p.lane <> '' and state in ('waiting', 'stuck')
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
	sql, args := dueSQL, []any{planned, projectors, generations, max(f.Keys, 0), max(f.Each, 1), lanes}
	if len(f.Needs) > 0 {
		sql, args = dueAbleSQL, append(args,
			mapSlice(f.Needs, func(n *provider.Need) string { return n.Projector }),
			mapSlice(f.Needs, func(n *provider.Need) int { return n.Number() }),
			mapSlice(f.Needs, func(n *provider.Need) string { return storableNeed(n.Needs) }))
	}
	list, err := read(ctx, db, "list due messages", provider.CheckDueFilter(f), scanParked, sql, args...)
	return list, classifyOwn(ctx, err)
}

// The walk skips from need to need by the index; null ends it. Its condition is that of the index, so it also finds waiting
// messages of other classes.
const needsSQL = `
select b.projector, b.generation, n.needs, p.parked_at from unnest($1::text[], $2::int[], $4::text[]) with ordinality b(projector, generation, past, o), lateral (
	with recursive n as (
		select (select min(needs) from kinora.parked p
			where p.projector = b.projector and p.generation = b.generation and p.state = 'waiting' and p.needs <> '' and p.needs > b.past) as needs, 1 as i
		union all
		select (select min(needs) from kinora.parked p
			where p.projector = b.projector and p.generation = b.generation and p.state = 'waiting' and p.needs <> '' and p.needs > n.needs), n.i + 1
		from n where n.needs is not null and n.i < $3::int)
	select needs from n where needs is not null) n, lateral (
	select parked_at from kinora.parked p
	where p.projector = b.projector and p.generation = b.generation and p.needs = n.needs and p.state = 'waiting' and p.needs <> ''
	order by id limit 1) p
order by b.o, n.needs`

// Needs implements provider.Parking.
func (db *Provider) Needs(ctx context.Context, after []provider.Need) ([]provider.Need, error) {
	if older, err := db.isOlder(ctx); older || err != nil {
		return nil, classifyOwn(ctx, wrap("list needs", err)) // the version before has none
	}
	projectors := mapSlice(after, func(a *provider.Need) string { return a.Projector })
	generations := mapSlice(after, func(a *provider.Need) int { return a.Number() })
	past := mapSlice(after, func(a *provider.Need) string { return storableNeed(a.Needs) })
	columns := func(n *provider.Need) []any { return []any{&n.Projector, &n.Generation, &n.Needs, scanTime(&n.Since)} }
	all, err := read(ctx, db, "list needs", provider.CheckNeeds(after), into(columns), needsSQL, planned,
		projectors, generations, provider.MaxNeeds, past)
	for i := range all {
		all[i].Needs = originalNeed(all[i].Needs)
	}
	return all, classifyOwn(ctx, err)
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
	// $1 to $10 are the arguments of a filter in all statements, and $11 is the limit.
	parkedFilter = `
	p.id > 0 and ($1::text = '' or p.projector = $1::text) and ($2::text = '' or p.handler = $2::text)
	and ($3::text = '' or p.key = $3::text) and ($4::text = '' or p.class = $4::text) and ($5::text = '' or p.code = $5::text)
	and ($6::text[] is null or p.type = any($6::text[])) and p.state = any($7::text[])
	and ($8::bigint[] is null or p.id = any($8::bigint[])) and p.id > $9::bigint
	and ($10::int = 0 or p.generation = $10::int)`

	parkedSQL = `
select ` + parkedColumns + `, coalesce((
	select due_at from kinora.holds h
	where h.projector = p.projector and h.generation = p.generation and h.lane = p.lane and isfinite(due_at) and due_at < ` + unableUntil + ` and p.state in ('waiting', 'stuck') limit 1), ` + never + `)
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
		&class, &p.Needs, &p.Code, &p.Error, &p.Attempts, &p.Version, &p.At, &state, &p.ResolvedAt, &p.By, &p.Reason, &p.DueAt)
	for _, text := range []*string{&p.Handler, &p.MessageID, &p.Topic, &p.Key, &p.Type, &p.Code, &p.Error, &p.Version, &p.By, &p.Reason} {
		*text = original(*text)
	}
	p.Needs, p.Headers = originalNeed(p.Needs), inHeaders(p.Headers, original)
	p.Class, p.State = provider.ParseClass(class), provider.ParseParkedState(state)
	p.At, p.ResolvedAt, p.DueAt = p.At.UTC(), p.ResolvedAt.UTC(), p.DueAt.UTC()
	return p, err
}

// Decide implements provider.Parking. It waits for units that have the lanes of these messages.
// After a deadlock it tries again.
func (db *Provider) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	if err := cmp.Or(provider.CheckDecision(to, d), provider.CheckParkedFilter(f)); err != nil {
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

// The numbers are those of provider.Outcome. A parked or skipped message counts for its handlers,
// or for all if it has none.
const outcomesSQL = `
with q as materialized (
	select n.*, coalesce(nullif(n.generation, 0),
		(select g.generation from kinora.generations g where g.projector = n.projector and g.state = 'live'), 1) as build
	from json_to_recordset($1::json) n(o int, projector text, generation int, names text[], message_id text, recorded_at bigint, position bigint))
select coalesce(
	(select case
		when p.state = 'skipped' then 4
		when p.state = 'stuck' then 3
		when (select due_at from kinora.holds h where h.projector = p.projector and h.generation = p.generation and h.lane = p.lane limit 1) = 'infinity' then 3
		else 2 end
	from kinora.parked p
	where p.state <> 'replayed' and p.marker_id <> '' and p.marker_id = q.message_id and p.projector = q.projector and p.generation = q.build
		and (p.handlers = '{}' or p.handlers && q.names) limit 1),
	case
		when (select c.position from kinora.checkpoints c where c.projector = q.projector and c.generation = q.build limit 1) >= q.position then 1
		when exists (
			select from kinora.markers m where m.message_id = q.message_id and m.handler = any(q.names) and m.generation = q.build) then 1
		when q.position is not null and (
			select c.position from kinora.checkpoints c where c.projector = q.projector and c.generation = q.build limit 1) is not null then 0
		when 'epoch'::timestamptz + q.recorded_at * interval '1 microsecond' <= (select max(f.pruned_before) from kinora.low_water_marks f where f.handler = any(q.names)) then 5
		else 0 end)
from q order by q.o`

// Outcomes implements provider.Records.
func (db *Provider) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	asked := make([]map[string]any, len(questions))
	for i, q := range questions {
		asked[i] = map[string]any{"o": i, "projector": q.Projector(), "generation": q.Generation, "names": q.Names(), "message_id": markerID(q.MessageID)}
		if recorded, _ := provider.StoredTime(q.RecordedAt); !recorded.IsZero() {
			asked[i]["recorded_at"] = recorded.UnixMicro()
		}
		if q.Position > 0 {
			asked[i]["position"] = q.Position
		}
	}
	return read(ctx, db, "read outcomes", provider.CheckQuestions(questions), pgx.RowTo[provider.Outcome], outcomesSQL, planned, jsonList(asked))
}

const (
	// One statement, so that no other transaction sees only the deletes or only the low-water mark.
	pruneSQL = `
with recursive ck as materialized (select clock_timestamp() - $3::bigint * interval '1 microsecond' as t),
-- The walk skips from generation to generation of resolved messages.
builds as (
	select min(generation) as generation from kinora.parked where state in ('replayed', 'skipped') and projector = $1::text
	union all
	select (
		select min(generation) from kinora.parked
		where state in ('replayed', 'skipped') and projector = $1::text and generation > b.generation)
	from builds b where b.generation is not null),
c as materialized (select array(select generation from kinora.checkpoints where projector = $1::text) as generations),
gone as (
	delete from kinora.markers where ctid = any(array(
		select m.at from unnest($2::text[]) h(name), lateral (
			select m.at from (
				(select ctid as at, processed_at from kinora.markers
				where handler = h.name and position is null and processed_at < (select t from ck)
				order by handler, position, processed_at limit $4::bigint)
				union all
				(select ctid, processed_at from kinora.markers
				where handler = h.name and position > 0 and processed_at < (select t from ck)
					and generation <> all((select generations from c)::int[])
				order by handler, position limit $4::bigint)) m
			order by m.processed_at limit $4::bigint) m))
	returning handler, processed_at),
raised as (
	insert into kinora.low_water_marks as f (handler, pruned_before)
	select handler, max(processed_at) from gone group by handler order by handler
	on conflict on constraint low_water_marks_pkey do update set pruned_before = greatest(f.pruned_before, excluded.pruned_before)),
resolved as (
	delete from kinora.parked where state in ('replayed', 'skipped') and id = any(array(
		select p.id from builds b, lateral (
			select id, resolved_at from kinora.parked
			where state in ('replayed', 'skipped') and projector = $1::text and generation = b.generation and resolved_at < (select t from ck)
			order by projector, generation, resolved_at limit $4::bigint) p
		order by p.resolved_at limit $4::bigint))
	returning 1)
select (select count(*) from gone) + (select count(*) from resolved)`

	// The walk skips from handler to handler by the key; null ends it.
	markedHandlersSQL = `
with recursive h as (
	select min(handler) as name from kinora.markers
	union all
	select (select min(handler) from kinora.markers where handler > h.name) from h where h.name is not null)
select name from h where name is not null`

	dropMarkersSQL = `
delete from kinora.markers where ctid = any(array(
	select ctid from kinora.markers where handler = $1::text order by handler, position, processed_at limit $2::int))`
)

// Prune implements provider.Records.
func (db *Provider) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (n int, err error) {
	crash.Point("prune: before")
	err = db.ordered(ctx, "prune", provider.CheckPrune(projector, handlers),
		&n, pruneSQL, projector, handlers, window.Microseconds(), max(limit, 0))
	crash.Point("prune: after")
	return n, err
}

// MarkedHandlers implements provider.MarkerMaintainer.
func (db *Provider) MarkedHandlers(ctx context.Context) ([]string, error) {
	return read(ctx, db, "list handlers with markers", nil, pgx.RowTo[string], markedHandlersSQL, planned)
}

// DropMarkers implements provider.MarkerMaintainer.
func (db *Provider) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	crash.Point("drop markers: before")
	n, err := db.exec(ctx, "drop markers", provider.CheckStorable("handler", handler), dropMarkersSQL, planned, handler, limit)
	crash.Point("drop markers: after")
	return n, err
}

const (
	// A message that is parked already keeps its row, which gets the handlers that it lacks, unless it is skipped. It may be
	// in another lane: then the lane does not wait for it, and is due for what was parked behind it. An
	// existing hold is only locked: a unit that applies the last message of the lane must see the messages that this
	// one parks before it deletes the hold.
	parkSQL = `
with ck as materialized (select clock_timestamp() t),
parked as (
	insert into kinora.parked as p (projector, generation, ` + parkedAs + `)
	select $1::text, $2::int, ` + parkedAs + ` from json_populate_recordset(null::kinora.parked, $3::json)
	on conflict (marker_id, projector, generation) where state <> 'replayed' and marker_id <> '' do update
	set handlers = p.handlers || array(select h from unnest(excluded.handlers) h where h <> all(p.handlers))
	where p.state in ('waiting', 'stuck') and not excluded.handlers <@ p.handlers
	returning p.lane, p.state, p.class)
insert into kinora.holds as h (projector, generation, lane, due_at)
select $1::text, $2::int, l.lane, case
	when l.after < 0 and f.stuck then 'infinity'
	/*+*/when l.unable and f.unable then ` + unableUntil + `/*-*/
	else ck.t + greatest(l.after, 0) / 1000 * interval '1 microsecond' end
from ck, unnest($4::bytea[], $5::bigint[], $6::bool[]) l(lane, after, unable), (
	select lane, bool_or(state = 'stuck') as stuck, bool_or(class = 'unable') as unable from parked group by lane) f
where l.lane = f.lane order by l.lane
on conflict on constraint holds_pkey do update set due_at = h.due_at`

	parkedAs = `handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, /*+*/needs, /*-*/code, error, attempts, version, state`

	// Without new handlers, a message keeps its handlers.
	updateParkedSQL = `
update kinora.parked p set class = a.class, /*+*/needs = a.needs, /*-*/code = a.code, error = a.error, attempts = a.attempts, handler = a.handler, version = a.version, state = a.state,
	handlers = case when a.handlers = '{}' then p.handlers else a.handlers end
from json_populate_recordset(null::kinora.parked, $1::json) a where p.id = a.id`

	// A message with a person's decision is kept.
	resolveSQL = `
with gone as (delete from kinora.parked where id = any($1::bigint[]) and resolved_by = '')
update kinora.parked set state = 'replayed', resolved_at = clock_timestamp() where id = any($1::bigint[]) and resolved_by <> ''`

	// The caller has locked these lanes; changed is the first message that it changed in each. A lane without
	// messages is no longer held. If its first message is stuck, it waits for a person; if it is unable, for a program. If that is one of $2,
	// the lane is due after its delay. Otherwise it is due now, unless that precedes all changed ones.
	releaseSQL = `
with ck as materialized (select clock_timestamp() t),
l as materialized (
	select l.*, f.* from json_to_recordset($1::json) l(projector text, generation int, lane bytea, changed bigint) left join lateral (
		select id, state, class/*+*/, needs/*-*/ from kinora.parked
		where parked.projector = l.projector and parked.generation = l.generation and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
		order by id limit 1) f on true),
gone as (delete from kinora.holds h using l where h.projector = l.projector and h.generation = l.generation and h.lane = l.lane and l.id is null)
update kinora.holds h set due_at = case
	when l.state = 'stuck' then 'infinity'
	/*+*/when l.class = 'unable' and l.needs <> '' then ` + unableUntil + `/*-*/
	when l.id < l.changed then h.due_at
	else ck.t + coalesce(a.after, 0) / 1000 * interval '1 microsecond' end
from ck, l left join json_to_recordset($2::json) a(id bigint, after bigint) on a.id = l.id
where h.projector = l.projector and h.generation = l.generation and h.lane = l.lane and l.id is not null`

	// Markers that the opening inserted for parked messages that are not live.
	unmarkSQL = `
delete from kinora.markers where ctid = any(array(
	select m.at from unnest($2::text[], $3::text[]) n(handler, message_id), lateral (
		select ctid as at from kinora.markers
		where handler = n.handler and generation = $1::int and message_id = n.message_id limit 1) m))`
)

// queueClosing queues the unit's own writes: output, and the parking or resolving of messages.
func (w *unit) queueClosing(ctx context.Context, c provider.Closing) error {
	w.begin(ofOutput)
	if err := w.db.queueEnqueue(ctx, &w.Batch, c.Output); err != nil {
		return err
	}
	w.begin(ofUnit)
	if w.IsReplay() {
		w.queueResolved(c)
	} else if len(c.Park) > 0 {
		holds := c.Holds(&w.Unit, w.found)
		w.Queue(w.db.q(parkSQL), w.Projector, w.Generation, w.rows(c.Park),
			mapSlice(holds, func(a *provider.Aside) []byte { return a.Parked.Lane[:] }),
			mapSlice(holds, func(a *provider.Aside) int64 { return int64(a.After) }),
			mapSlice(holds, func(a *provider.Aside) bool { return a.Parked.IsUnable() }))
	}
	w.queueAdvance()
	w.begin(ofCommit)
	return nil
}

func (w *unit) queueResolved(c provider.Closing) {
	for _, m := range w.Markers(&w.found) {
		delete(w.marked, m)
	}
	if len(w.marked) > 0 { // of messages that are not live
		handlers, messages := columns(slices.Collect(maps.Keys(w.marked)))
		w.Queue(noScanSQL)
		w.Queue(w.db.q(unmarkSQL), w.Generation, handlers, messages)
	}
	s := c.Resolution(&w.Unit, w.found)
	if len(s.Changed) == 0 {
		return
	}
	var changed []map[string]any
	for q, seq := range s.Changed {
		changed = append(changed, map[string]any{"projector": q.Projector, "generation": q.Generation, "lane": fmt.Sprintf(`\x%x`, q.Lane), "changed": seq})
	}
	stay := w.rows(s.Failed)
	w.Queue(noScanSQL)
	w.Queue(w.db.q(updateParkedSQL), stay)
	w.Queue(w.db.q(resolveSQL), s.Applied)
	w.Queue(w.db.q(releaseSQL), jsonList(changed), stay)
}

// rows returns a JSON list of rows of kinora.parked. A text that PostgreSQL refuses is encoded.
func (w *unit) rows(asides []provider.Aside) string {
	rows := make([]map[string]any, len(asides))
	for i, a := range asides {
		p, state := &a.Parked, provider.StateWaiting
		if a.After < 0 {
			state = provider.StateStuck
		}
		rows[i] = map[string]any{
			"handler": storable(p.Handler), "handlers": append([]string{}, p.Handlers...),
			"message_id": storable(p.MessageID), "marker_id": markerID(p.MessageID),
			"topic": storable(p.Topic), "key": storable(p.Key), "lane": fmt.Sprintf(`\x%x`, p.Lane), "type": storable(p.Type),
			"payload": fmt.Sprintf(`\x%x`, p.Payload), "headers": inHeaders(p.Headers, storable),
			"class": p.Class.String(), "needs": storableNeed(p.Needs), "code": storable(p.Code), "error": storable(p.Error), "attempts": p.Attempts, "version": storable(p.Version),
			"state": state.String(), "after": a.After,
		}
		if w.IsReplay() {
			rows[i]["id"] = w.Messages[a.Message].Parked.Seq
		}
	}
	return jsonList(rows)
}
