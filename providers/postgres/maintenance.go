package postgres

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
)

// Holding takes two statements in one transaction. The first locks the first entry of each key
// that others wait for. The second, with a newer snapshot, holds the entries behind them. A
// transaction that changes an entry for which others wait must have its lock, and releases the
// held ones with a newer snapshot still. So either it comes first, and the entry is no longer
// locked here, or it finds the held entries. Nothing here waits for a lock.
//
// An earlier statement finds the entries to lock: it scans some stuck ones, from the end of the
// last scan on, and at most all of them once. One relay at a time does this for all relays.
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
	// stuck entries that one call scans; the next call continues
	stuckScan = 2000

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
	// lanes that one call scans; the next call continues
	orphanLanes = 1000
)

// walk is where the next scans for orphans and for stuck entries begin.
type walk struct {
	mu   sync.Mutex
	from places
}

type places struct{ orphans, stuck place }

type place struct {
	lane
	id int64
}

// HoldEntries implements provider.EntryMaintainer.
func (db *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error) {
	n, restored, err := db.hold(ctx, long, max(limit, 0))
	if err != nil {
		return 0, fmt.Errorf("hold entries: %w", explain(err))
	}
	if restored > 0 {
		db.added()
	}
	return n, nil
}

func (db *Provider) hold(ctx context.Context, long time.Duration, limit int) (n, restored int, err error) {
	db.scans.mu.Lock()
	from := db.scans.from
	db.scans.mu.Unlock()
	to := from
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		var mine bool
		if err := tx.QueryRow(ctx, tryHoldSQL, lockClassHold, lockKey(db.cfg.Schema)).Scan(&mine); err != nil || !mine {
			return err
		}
		var heads []int64
		b := &pgx.Batch{}
		b.Queue(db.q(restoreOrphansSQL), from.orphans.topic, from.orphans.key, orphanLanes).QueryRow(func(row pgx.Row) error {
			return row.Scan(&restored, &to.orphans.topic, &to.orphans.key)
		})
		b.Queue(db.q(stuckHeadsSQL), long.Microseconds(), from.stuck.topic, from.stuck.key, from.stuck.id, stuckScan).QueryRow(func(row pgx.Row) error {
			return row.Scan(&heads, &to.stuck.topic, &to.stuck.key, &to.stuck.id)
		})
		if err := tx.SendBatch(ctx, b).Close(); err != nil || len(heads) == 0 {
			return err
		}
		n, err = db.holdBehind(ctx, tx, long, limit, heads)
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	if n == limit {
		to.stuck = from.stuck // there may be more entries behind these
	}
	db.scans.mu.Lock()
	db.scans.from = to
	db.scans.mu.Unlock()
	return n, restored, nil
}

// holdBehind holds the entries behind these, if others still wait for them.
func (db *Provider) holdBehind(ctx context.Context, tx pgx.Tx, long time.Duration, limit int, heads []int64) (int, error) {
	rows, err := tx.Query(ctx, db.q(lockHeadsSQL), planned, long.Microseconds(), limit, heads)
	if err != nil {
		return 0, err
	}
	var ids []int64
	var topics, keys []string
	var id int64
	var l lane
	if _, err := pgx.ForEachRow(rows, []any{&id, &l.topic, &l.key}, func() error {
		ids, topics, keys = append(ids, id), append(topics, l.topic), append(keys, l.key)
		return nil
	}); err != nil || len(ids) == 0 {
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

// A published or skipped entry does not change any more, so a scanned one can be deleted, unless
// another relay is deleting it. If all scanned entries were created within the shorter retention,
// the later ones are not old enough. Rows with a creation time in the future, which other writers
// left, do not count.
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
	// rounded up: only zero is zero
	published := (keep.Published + time.Microsecond - 1).Microseconds()
	err = db.pool.QueryRow(ctx, db.q(deleteEntriesSQL), planned, after, deleteScan, published, keep.Skipped.Microseconds()).Scan(&n, &next)
	if err != nil {
		return 0, after, fmt.Errorf("delete entries: %w", explain(err))
	}
	return n, next, nil
}
