package postgres

import (
	"context"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// window is how many entries of a lane are released at most until they are ahead of the first held one. The others follow as
// these are published. So claims need not walk a large backlog of a key that was stuck, and few are held if it is again.
const window = "500"

// restored releases the first held entries of every lane: at least one, and as many as fill the window together with the open
// ones before them, without those in gone. No entry that stays held is before a released one. Locked rows are skipped: their
// transaction releases or skips them, so no order of locks can cross. An array of ids makes the planner use the primary key.
// Most lanes have no held entry, which costs one index lookup each.
const restored = `
restored as (
	update kinora.outbox o set status = 'pending', open = true, held = false
	where o.id = any(array(
		select h.id from lanes l, lateral (
			select f.id from kinora.outbox f
			where f.held and f.topic <> '' and f.topic = l.topic and f.key = l.key and f.status = 'held'
			order by f.id limit 1) f, lateral (
			select h.id from kinora.outbox h
			where h.held and h.topic <> '' and h.topic = l.topic and h.key = l.key and h.status = 'held'
			order by h.id limit greatest(1, ` + window + ` - (
				select count(*) from (
					select from kinora.outbox e
					where e.open and e.topic <> '' and e.topic = l.topic and e.key = l.key and e.id < f.id
						and e.id not in (select id from gone)
					limit ` + window + `) e))
			for update skip locked) h))
	returning o.id)`

const noneGone = `
gone as (select null::bigint as id where false),`

// A mark is one statement. It locks rows in order, because marks that cross would deadlock. If an entry is published, it
// releases the held ones behind it. Its snapshot is new enough: an entry was held because of this one before this one was
// claimed, in a transaction that had locked it (see lockHeadsSQL), so that the claim waited for that transaction's end. An
// entry that is being held now waits for another one.
const markEntriesSQL = `
with ck as materialized (select clock_timestamp() t),
m as (
	select * from unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::text[], $6::boolean[]) m(id, token, status, after, error, gone)),
locked as materialized (select id from kinora.outbox where id = any($1::bigint[]) order by id for update),
deleted as (
	delete from kinora.outbox o using m
	where m.gone and (select count(*) from locked) > 0 and o.id = m.id and o.token = m.token and o.status = 'claimed'
	returning o.id, o.topic, o.key, 'published' as status),
changed as (
	update kinora.outbox o set
		status          = m.status,
		open            = m.status not in ('published', 'abandoned'),
		held            = m.status = 'abandoned',
		stuck           = m.status in ('failed', 'abandoned') or o.stuck and m.status <> 'published',
		attempts        = greatest(o.attempts, 1) - case when m.status = 'pending' then 1 else 0 end,
		last_error      = case when m.status in ('failed', 'abandoned') or m.status = 'pending' and m.error <> '' then m.error else o.last_error end,
		published_at    = case when m.status = 'published' then ck.t end,
		next_attempt_at = case when m.status in ('failed', 'claimed', 'pending') then ck.t + m.after * interval '1 microsecond' else ck.t end
	from m, ck
	where not m.gone and (select count(*) from locked) > 0 and o.id = m.id and o.token = m.token and o.status = 'claimed'
	returning o.id, o.topic, o.key, o.status),
done as (select * from deleted union all select * from changed),
gone as (select id from done where status = 'published'),
lanes as (select distinct topic, key from done where status = 'published' and ` + anyHeld + `),` + restored + `
select id from done`

// The usual mark publishes all entries of a claim and keeps none, and no entry is held or abandoned.
const dropEntriesSQL = `
delete from kinora.outbox o
where o.id = any($1::bigint[]) and o.token = $2::uuid and o.status = 'claimed' and not (` + anyHeld + `)
returning o.id`

// anyHeld is evaluated once. If no entry is held, it saves the lookup for each lane.
const anyHeld = `(select h.id from kinora.outbox h where h.held and h.id > 0 order by h.id limit 1) is not null`

// MarkEntries implements provider.Outbox with one statement, or two if entries are published and others held.
func (db *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := provider.CheckMarks(marks); err != nil {
		return nil, err
	}
	if seqs := dropped(marks); len(seqs) > 0 {
		done, err := db.mark(ctx, dropEntriesSQL, seqs, uuid.UUID(marks[0].Token))
		if err != nil {
			return nil, err
		}
		if len(done) > 0 {
			return without(seqs, done), nil
		}
		// Here an entry is held, or all marks are late.
	}
	first, late := distinct(marks)
	if len(first) == 0 {
		return late, nil
	}
	seqs := mapSlice(first, func(m *outbox.Mark) int64 { return m.Seq })
	done, err := db.mark(ctx, markEntriesSQL, seqs,
		mapSlice(first, func(m *outbox.Mark) uuid.UUID { return uuid.UUID(m.Token) }),
		mapSlice(first, func(m *outbox.Mark) string { return string(m.To) }),
		mapSlice(first, func(m *outbox.Mark) int64 { return m.After.Microseconds() }),
		mapSlice(first, func(m *outbox.Mark) string { return m.Error }),
		mapSlice(first, func(m *outbox.Mark) bool { return m.Drop }))
	if err != nil {
		return nil, err
	}
	return append(late, without(seqs, done)...), nil
}

// dropped returns the Seqs of marks that all delete published entries of one claim, in order of Seq; nil for others.
func dropped(marks []outbox.Mark) []int64 {
	seqs := make([]int64, len(marks))
	for i, m := range marks {
		if !m.Drop || m.Token != marks[0].Token || i > 0 && m.Seq <= seqs[i-1] {
			return nil
		}
		seqs[i] = m.Seq
	}
	return seqs
}

// distinct returns the first mark of each entry, which ends its claim, and the Seqs of the others.
func distinct(marks []outbox.Mark) (first []outbox.Mark, late []int64) {
	seen := make(map[int64]bool, len(marks))
	for _, m := range marks {
		if seen[m.Seq] {
			late = append(late, m.Seq)
			continue
		}
		seen[m.Seq] = true
		first = append(first, m)
	}
	return first, late
}

// without returns the seqs that are not in done.
func without(seqs, done []int64) (rest []int64) {
	if len(done) == len(seqs) {
		return nil
	}
	slices.Sort(done)
	for _, seq := range seqs {
		if _, ok := slices.BinarySearch(done, seq); !ok {
			rest = append(rest, seq)
		}
	}
	return rest
}

// mark runs a statement that returns which of these ids it changed.
func (db *Provider) mark(ctx context.Context, sql string, seqs []int64, args ...any) (done []int64, err error) {
	crash.Point("mark: before")
	rows, _ := db.pool.Query(ctx, db.q(sql), append([]any{planned, seqs}, args...)...) // the rows return its error too
	done = make([]int64, 0, len(seqs))
	var id int64
	err = eachRow(rows, []any{&id}, func() { done = append(done, id) })
	crash.Point("mark: after")
	return done, wrap("mark entries", explain(err))
}

// Holding takes two statements in one transaction. The first locks the first entry of each key that others wait for. The
// second, with a newer snapshot, holds the entries behind them. A transaction that changes an entry for which others wait
// must have its lock, and releases the held ones with a newer snapshot still. So either it comes first, and the entry is no
// longer locked here, or it finds the held entries. Nothing here waits for a lock.
//
// An earlier statement finds the entries to lock. It scans some stuck ones, from the end of the last scan on, for all relays.
const (
	tryHoldSQL = `select pg_try_advisory_xact_lock($1::int, $2::int)`

	stuckHeadsSQL = `
with ck as materialized (select clock_timestamp() t),
ahead as materialized (
	select o.topic, o.key, o.id, ` + waitsLong + ` as waits from kinora.outbox o, ck
	where o.stuck and (o.topic, o.key, o.id) > ($2::text, $3::text, $4::bigint)
	order by o.topic, o.key, o.id limit $5::int),
wrapped as materialized (
	select o.topic, o.key, o.id, ` + waitsLong + ` as waits from kinora.outbox o, ck
	where o.stuck and (o.topic, o.key, o.id) <= ($2::text, $3::text, $4::bigint)
	order by o.topic, o.key, o.id limit $5::int - (select count(*) from ahead)),
heads as materialized (
	select distinct on (topic, key) topic, key, id from (select * from ahead union all select * from wrapped) scanned
	where waits order by topic, key, id),
last as materialized (
	(select 2 as part, topic, key, id from wrapped order by topic desc, key desc, id desc limit 1)
	union all
	(select 1 as part, topic, key, id from ahead order by topic desc, key desc, id desc limit 1)
	order by part desc limit 1)
select array(
	select h.id from heads h
	where case when exists (
		select from kinora.outbox f
		where f.open and f.topic <> '' and f.topic = h.topic and f.key = h.key and f.id > h.id and f.status = 'pending') then true else false end),
	coalesce((select topic from last), ''), coalesce((select key from last), ''), coalesce((select id from last), 0)`
	stuckScan = 2000 // stuck entries that one call scans; the next call continues

	lockHeadsSQL = `
with ck as materialized (select clock_timestamp() t)
select o.id, o.topic, o.key from kinora.outbox o, ck
where o.id = any($3::bigint[]) and ` + waitsLong + `
order by o.id limit $2::bigint
for update of o skip locked`

	waitsLong = `(o.status = 'abandoned' or o.status = 'failed' and o.next_attempt_at >= ck.t + $1::bigint * interval '1 microsecond')`

	holdEntriesSQL = `
update kinora.outbox o set status = 'held', open = false, held = true
where o.id = any(array(
	select f.id from unnest($1::bigint[], $2::text[], $3::text[]) with ordinality h(id, topic, key, o), lateral (
		select f.id from kinora.outbox f
		where f.open and f.topic <> '' and f.topic = h.topic and f.key = h.key and f.id > h.id and f.status = 'pending'
		order by f.id limit $4::bigint
		for update skip locked) f
	limit $4::bigint))`

	// Walks the lanes with held or abandoned entries by the index. If the first of them is held
	// and no open entry precedes it, it waits for none.
	restoreOrphansSQL = `
with recursive walked as (
	(select topic, key, id, status, 1 as n from kinora.outbox where held and topic <> '' and (topic, key) > ($1::text, $2::text)
	order by topic, key, id limit 1)
	union all
	select f.topic, f.key, f.id, f.status, w.n + 1 from walked w, lateral (
		select topic, key, id, status from kinora.outbox where held and topic <> '' and (topic, key) > (w.topic, w.key)
		order by topic, key, id limit 1) f
	where w.n < $3::int),
lanes as (
	select w.topic, w.key from walked w
	where w.status = 'held' and case when exists (
		select from kinora.outbox e
		where e.open and e.topic <> '' and e.topic = w.topic and e.key = w.key and e.id < w.id) then false else true end),` + noneGone + restored + `
select (select count(*) from restored), coalesce(max(topic) filter (where n = $3::int), ''), coalesce(max(key) filter (where n = $3::int), '')
from walked`
	orphanLanes = 1000 // lanes that one call scans; the next call continues
)

// places are where the next scans for orphans and for stuck entries begin.
type places struct {
	orphans, stuck lane
	id             int64 // of the stuck entry
}

// HoldEntries implements provider.EntryMaintainer.
func (db *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (n int, err error) {
	limit = max(limit, 0)
	from := *db.scans.Load()
	to, restored := from, 0
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		var mine bool
		if err := tx.QueryRow(ctx, tryHoldSQL, lockClassHold, lockKey(db.cfg.Schema)).Scan(&mine); err != nil || !mine {
			return err
		}
		var heads []int64
		b := &pgx.Batch{}
		queueRow(b, []any{&restored, &to.orphans.topic, &to.orphans.key},
			db.q(restoreOrphansSQL), from.orphans.topic, from.orphans.key, orphanLanes)
		queueRow(b, []any{&heads, &to.stuck.topic, &to.stuck.key, &to.id},
			db.q(stuckHeadsSQL), long.Microseconds(), from.stuck.topic, from.stuck.key, from.id, stuckScan)
		if err := tx.SendBatch(ctx, b).Close(); err != nil || len(heads) == 0 {
			return err
		}
		n, err = db.holdBehind(ctx, tx, long, limit, heads)
		return err
	})
	if err != nil {
		return 0, wrap("hold entries", explain(err))
	}
	if n == limit {
		to.stuck, to.id = from.stuck, from.id // there may be more entries behind these
	}
	db.scans.Store(&to)
	if restored > 0 {
		db.added()
	}
	return n, nil
}

// holdBehind holds the entries behind these, if others still wait for them.
func (db *Provider) holdBehind(ctx context.Context, tx pgx.Tx, long time.Duration, limit int, heads []int64) (int, error) {
	rows, _ := tx.Query(ctx, db.q(lockHeadsSQL), planned, long.Microseconds(), limit, heads) // the rows return its error too
	var ids []int64
	var topics, keys []string
	var id int64
	var l lane
	err := eachRow(rows, []any{&id, &l.topic, &l.key}, func() {
		ids, topics, keys = append(ids, id), append(topics, l.topic), append(keys, l.key)
	})
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	tag, err := tx.Exec(ctx, db.q(holdEntriesSQL), planned, ids, topics, keys, limit)
	return int(tag.RowsAffected()), err
}

// inTx runs fn in a transaction.
func (db *Provider) inTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	crash.Point("transaction: before")
	err := pgx.BeginTxFunc(ctx, db.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		err := fn(tx)
		crash.Point("transaction: before its commit")
		return err
	})
	crash.Point("transaction: after")
	return err
}

const deleteScan = 2000 // entries that one call scans

// A published or skipped entry does not change any more, so it can be deleted, unless another relay is
// deleting it. If all scanned entries were created within the shorter retention, the later ones are not
// old enough. Creation times in the future, which other writers left, do not count.
const deleteEntriesSQL = `
with ck as materialized (select clock_timestamp() t),
keep as materialized (
	select t - $3::bigint * interval '1 microsecond' as published, t - $4::bigint * interval '1 microsecond' as skipped from ck),
scanned as materialized (
	select o.id, o.created_at,
		o.status = 'published' and $3::bigint > 0 and o.published_at < keep.published
			or o.status = 'skipped' and o.next_attempt_at < keep.skipped as over
	from (select * from kinora.outbox where id > $1::bigint order by id limit $2::bigint) o, keep),
deleted as (
	delete from kinora.outbox where id = any(array(
		select o.id from kinora.outbox o
		where o.id = any(array(select id from scanned where over)) and o.status in ('published', 'skipped')
		order by o.id for update skip locked))
	returning id)
select (select count(*) from deleted), case
	when count(*) = $2::bigint and coalesce(min(created_at) filter (where created_at <= (select t from ck)), '-infinity') <= (select case when $3::bigint > 0 then greatest(published, skipped) else skipped end from keep) then max(id)
	else 0 end
from scanned`

// DeleteEntries implements provider.EntryMaintainer.
func (db *Provider) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	published := (keep.Published + time.Microsecond - 1).Microseconds() // rounded up: only zero is zero
	_, err = db.row(ctx, "delete entries", nil, []any{&n, &next},
		deleteEntriesSQL, planned, after, deleteScan, published, keep.Skipped.Microseconds())
	if err != nil {
		next = after
	}
	return n, next, err
}
