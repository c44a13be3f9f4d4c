package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

// Each statement of a survey reads at most $1 rows of a table, in the order of an index. The last
// column before the id is compared with >= and <=: with = the order would be one by id alone, and the planner
// may walk the primary key past all messages of others.
const (
	surveyHeadSQL = `
select clock_timestamp(), coalesce(e.position, 0), coalesce(e.id::text, ''), e.recorded_at from (select) one left join lateral (
	select position, id, recorded_at from kinora.events order by position desc limit 1) e on true`

	// The generations with a checkpoint or held keys: b walks the index of holds from one to the next.
	surveyBuildsSQL = `
with recursive b as (
	(select projector, generation from kinora.holds order by projector, generation limit 1)
	union all
	select n.* from b, lateral (
		select projector, generation from kinora.holds where (projector, generation) > (b.projector, b.generation) order by projector, generation limit 1) n),
builds as (
	select projector, generation from b
	union
	(select projector, generation from kinora.checkpoints where mode <> 'ended' order by projector, generation limit 1000))
select b.projector, b.generation, b.generation, coalesce(c.position, 0), coalesce(c.event_id, ''), c.recorded_at, coalesce(c.lineage, ''), coalesce(c.mode, ''),
	c.token, c.handlers, c.splits, null::jsonb, p.n, (select f.parked_at from kinora.parked f where f.id = p.first), l.n, s.n
from builds b
	left join kinora.checkpoints c on c.projector = b.projector and c.generation = b.generation,
	lateral (
		select count(*) as n, min(id) as first from (
			select o.id from kinora.parked o
			where o.projector = b.projector and o.generation >= b.generation and o.generation <= b.generation and o.state in ('waiting', 'stuck') and o.id > 0
			order by o.generation, o.id limit $1::int) p) p,
	lateral (
		select count(*) as n from (
			select from kinora.holds o where o.projector = b.projector and o.generation = b.generation and o.due_at > '-infinity'
			order by o.projector, o.generation, o.due_at limit $1::int) l) l,
	lateral (
		select count(*) as n from (
			select lane from kinora.holds o where o.projector = b.projector and o.generation = b.generation and o.due_at = 'infinity' and o.due_at > '-infinity'
			order by o.projector, o.generation, o.due_at limit $1::int) h,
			lateral (` + firstOfHold + `) f where f.state = 'stuck') s
order by b.projector, b.generation`

	// firstOfHold is the first message of lane h of build b. A lane without a due time has one that is stuck, or that needs
	// what no program has.
	firstOfHold = `
		select * from kinora.parked f
		where f.projector = b.projector and f.generation = b.generation and f.lane >= h.lane and f.lane <= h.lane and f.lane <> '' and f.state in ('waiting', 'stuck')
		order by f.lane, f.id limit 1`

	surveyStuckSQL = `
select ` + parkedNames + `''::bytea, '{}'::jsonb` + parkedFate + `, ` + never + `, behind.n
from unnest($2::text[], $3::int[]) with ordinality b(projector, generation, o),
	lateral (
		select f.* from (
			select lane from kinora.holds h where h.projector = b.projector and h.generation = b.generation and h.due_at = 'infinity' and h.due_at > '-infinity'
			order by h.projector, h.generation, h.due_at limit $1::int) h,
			lateral (` + firstOfHold + `) f
		where f.state = 'stuck' limit 10) p,
	lateral (
		select count(*) - 1 as n from (
			select from kinora.parked o
			where o.projector = b.projector and o.generation = b.generation and o.lane >= p.lane and o.lane <= p.lane and o.lane <> '' and o.state in ('waiting', 'stuck')
			order by o.lane, o.id limit $1::int + 1) q) behind
order by b.o, p.id`

	// The times that people are shown: JSON has no others.
	shownTimes = never + ` and '9999-12-30 00:00Z'::timestamptz`

	countHeld = `
select status, holder, count(*), min(created_at) filter (where created_at between ` + shownTimes + `),
	max(until) filter (where until between ` + shownTimes + `), max(n) from (`

	surveyEntriesSQL = countHeld + `
	select status, case when status = 'claimed' then claimed_by else '' end as holder, created_at,
		case when status = 'claimed' then next_attempt_at end as until, n
	from (select o.*, count(*) over () as n from (select * from kinora.outbox where open and id > 0 order by id limit $1::int) o) o where status in ('pending', 'claimed')
	union all
	select status, '', created_at, null, count(*) over () from (select * from kinora.outbox where stuck order by topic, key, id limit $1::int) o
	union all
	select status, '', created_at, null, n from (
		select o.*, count(*) over () as n from (select * from kinora.outbox where held and id > 0 order by id limit $1::int) o) o where status = 'held') e
group by status, holder order by status, holder`

	surveyTasksSQL = countHeld + `
	select status, case when status = 'claimed' then claimed_by else '' end as holder, created_at,
		case when status = 'claimed' then next_at end as until, n
	from (select t.*, count(*) over () as n from (select * from kinora.tasks where open order by suspect, kind, next_at, id limit $1::int) t) t where status <> 'failed'
	union all
	select status, '', created_at, null, count(*) over () from (
		select * from kinora.tasks where status in ('failed', 'abandoned') order by kind, id limit $1::int) t) e
group by status, holder order by status, holder`

	// k walks the index from one kind to the next.
	surveyDueSQL = `
with recursive k as (
	(select kind, next_at from kinora.tasks where open and not suspect order by suspect, kind, next_at, id limit 1)
	union all
	select n.* from k, lateral (
		select kind, next_at from kinora.tasks where open and not suspect and kind > k.kind order by suspect, kind, next_at, id limit 1) n)
select kind, next_at from k where next_at <= clock_timestamp() and next_at >= ` + never + ` limit 100`

	surveyLeasesSQL = `select name, holder, expires_at from kinora.leases order by name limit $1::int`

	surveyInFlightSQL = `
select runner, count(*) from (select runner from kinora.in_flight order by runner, worker limit $1::int) f group by runner`
)

// Survey implements provider.Operations.
func (db *Provider) Survey(ctx context.Context, limit int) (s provider.Survey, err error) {
	defer func() { err = classifyOwn(ctx, wrap("survey", explain(err))) }()
	limit = max(limit, 1)
	b := &pgx.Batch{}
	b.Queue(inOrderSQL)
	queueRow(b, []any{scanTime(&s.Now), &s.Head.Position, &s.Head.ID, scanTime(&s.Head.RecordedAt)}, db.q(surveyHeadSQL))
	queueAll(b, &s.Builds, func(row pgx.CollectableRow) (provider.SurveyedBuild, error) { return scanBuild(row, limit) }, db.q(surveyBuildsSQL), limit)
	queueHeldCounts(b, &s.Entries, db.q(surveyEntriesSQL), limit)
	queueHeldCounts(b, &s.Tasks, db.q(surveyTasksSQL), limit)
	queueAll(b, &s.DueTasks, into(func(d *provider.DueTask) []any { return []any{&d.Kind, scanTime(&d.Due)} }), db.q(surveyDueSQL))
	queueAll(b, &s.Services, scanService, db.q(servicesSQL), limit)
	queueAll(b, &s.Leases, into(func(l *provider.NamedLease) []any { return []any{&l.Name, &l.Holder, scanTime(&l.ExpiresAt)} }), db.q(surveyLeasesSQL), limit)
	var runner string
	var n int64
	s.InFlight = map[string]int64{}
	queueRows(b, []any{&runner, &n}, func() { s.InFlight[runner] = n }, db.q(surveyInFlightSQL), limit)
	if err := db.pool.SendBatch(ctx, b).Close(); err != nil {
		return s, err
	}
	if err := db.surveyStuck(ctx, &s, limit); err != nil {
		return s, err
	}
	if s.Waits, err = db.waits(ctx); err != nil {
		return s, err
	}
	return s, db.surveySettled(ctx, &s)
}

// surveySettled sets Settled and Waiting. The events up to a checkpoint are settled.
func (db *Provider) surveySettled(ctx context.Context, s *provider.Survey) (err error) {
	after := int64(0)
	for _, b := range s.Builds {
		after = max(after, b.Checkpoint.Place.Position)
	}
	after = min(after, s.Head.Position)
	_, s.Settled, s.Waiting, err = db.settle(ctx, after)
	s.Settled = min(max(s.Settled, after), s.Head.Position)
	if len(s.Waiting) == 0 {
		s.Settled = s.Head.Position
	}
	return err
}

func (db *Provider) surveyStuck(ctx context.Context, s *provider.Survey, limit int) error {
	var projectors []string
	var generations []int
	for _, b := range s.Builds {
		if b.StuckLanes.N > 0 {
			projectors, generations = append(projectors, b.Projector), append(generations, b.Generation)
		}
	}
	if len(projectors) == 0 {
		return nil
	}
	b := &pgx.Batch{}
	b.Queue(inOrderSQL)
	queueAll(b, &s.Stuck, func(row pgx.CollectableRow) (l provider.StuckLane, err error) {
		l.First, err = scanParked(wider{row, nil, []any{&l.Behind.N}})
		l.First.Payload, l.First.Headers = nil, nil
		l.Behind.AtLeast = l.Behind.N >= int64(limit)
		return l, err
	}, db.q(surveyStuckSQL), limit, projectors, generations)
	return db.pool.SendBatch(ctx, b).Close()
}

// wider is a row with more columns before and after those that a function scans.
type wider struct {
	pgx.CollectableRow
	before, after []any
}

func (r wider) Scan(dest ...any) error {
	return r.CollectableRow.Scan(slices.Concat(r.before, dest, r.after)...)
}

func scanBuild(row pgx.CollectableRow, limit int) (b provider.SurveyedBuild, err error) {
	b.Checkpoint, err = scanCheckpoint(wider{row, []any{&b.Projector, &b.Generation}, []any{&b.Parked.N, scanTime(&b.Oldest), &b.Lanes.N, &b.StuckLanes.N}})
	if malformed := new(json.UnmarshalTypeError); errors.As(err, &malformed) { // a row that another program wrote shows less
		err = nil
	}
	for _, n := range []*provider.Count{&b.Parked, &b.Lanes, &b.StuckLanes} {
		n.AtLeast = n.N >= int64(limit)
	}
	return b, err
}

// queueHeldCounts queues a statement that counts rows. Its last column is the number of rows that were looked at.
func queueHeldCounts[Status ~string](b *pgx.Batch, all *[]provider.HeldCount[Status], sql string, limit int) {
	queueAll(b, all, func(row pgx.CollectableRow) (c provider.HeldCount[Status], err error) {
		var seen int
		err = row.Scan(&c.Status, &c.Holder, &c.N, scanTime(&c.Oldest), scanTime(&c.Until), &seen)
		c.AtLeast = seen >= limit
		return c, err
	}, sql, limit)
}

// The streams of a category are between "category-" and "category.", because "." follows "-".
const streamsSQL = `
select stream, version from kinora.streams
where stream > $1::text and ($2::text = '' or stream >= $2::text || '-' and stream < $2::text || '.') order by stream limit $3::int`

// Streams implements provider.Operations.
func (db *Provider) Streams(ctx context.Context, f provider.StreamFilter) ([]provider.Stream, error) {
	if err := provider.CheckStreamFilter(f); err != nil {
		return nil, wrap("list streams", err)
	}
	f.Limit = cmp.Or(max(f.Limit, 0), 100)
	var all []provider.Stream
	b := &pgx.Batch{}
	b.Queue(inOrderSQL)
	queueAll(b, &all, pgx.RowToStructByPos[provider.Stream], db.q(streamsSQL), f.After, f.Category, f.Limit)
	err := db.pool.SendBatch(ctx, b).Close()
	return all, classifyOwn(ctx, wrap("list streams", explain(err)))
}

const (
	// What a backend n is called, and how to end it.
	backendName = `case when n.pid <> 0 then 'pid ' || n.pid else 'prepared transaction' || coalesce(' ' || n.gid, '') end, case
		when n.pid <> 0 then 'select pg_terminate_backend(' || n.pid || ');'
		when n.gid <> '' then 'rollback prepared ' || quote_literal(n.gid) || ';'
		else 'select * from pg_prepared_xacts;' end`

	// The transactions that hold the gap lock, and so delay readers of the log, the oldest first.
	appendsSQL = `
select distinct 'append', ` + backendName + `,
	coalesce(a.application_name, ''), coalesce(a.usename::text, p.owner::text, ''), case when n.pid <> 0 then coalesce(a.state, '') else 'prepared' end,
	coalesce(nullif(a.query, '<insufficient privilege>'), ''), coalesce(a.xact_start, p.prepared) as since, l.virtualtransaction` + lockHolders + `, lateral (select coalesce(l.pid, 0), p.gid) n(pid, gid)
where ` + gapLock + ` and l.pid is distinct from pg_backend_pid()
order by since limit 20`

	// Sessions of this database that wait for a lock, each with those that it waits for.
	blockedSQL = `
select 'lock', ` + backendName + `,
	coalesce(b.application_name, ''), coalesce(b.usename::text, p.owner::text, ''), case when n.pid <> 0 then coalesce(b.state, '') else 'prepared' end,
	coalesce(nullif(b.query, '<insufficient privilege>'), ''), coalesce(b.xact_start, p.prepared),
	'pid ' || w.pid, 'select pg_terminate_backend(' || w.pid || ');', w.application_name, coalesce(w.usename::text, ''), coalesce(w.state, ''), w.query,
	coalesce((select min(l.waitstart) from pg_locks l where l.pid = w.pid and not l.granted), w.query_start) as since
from (select * from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' order by query_start limit 50) w,
	unnest(pg_blocking_pids(w.pid)) x(pid)
	left join pg_stat_activity b on b.pid = x.pid
	left join pg_prepared_xacts p on x.pid = 0 and p.database = current_database(), lateral (select coalesce(b.pid, 0), p.gid) n(pid, gid)
order by since limit 50`
)

func backendColumns(b *provider.Backend) []any {
	return []any{&b.Name, &b.End, &b.Application, &b.User, &b.State, &b.Query, scanTime(&b.Since)}
}

// waits returns who keeps others waiting. A role that may not see other sessions gets less.
func (db *Provider) waits(ctx context.Context) (all []provider.Wait, err error) {
	b := &pgx.Batch{}
	var appends, blocked []provider.Wait
	queueAll(b, &appends, into(func(w *provider.Wait) []any {
		return append(append([]any{&w.What}, backendColumns(&w.Blocker)...), &w.Blocker.Transaction)
	}), db.q(appendsSQL))
	queueAll(b, &blocked, into(func(w *provider.Wait) []any {
		return slices.Concat([]any{&w.What}, backendColumns(&w.Blocker), backendColumns(&w.Waiter))
	}), db.q(blockedSQL))
	err = db.pool.SendBatch(ctx, b).Close()
	return append(appends, blocked...), err
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
