package postgres

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/projector"
)

// What is in an attempt's way is found by the first message of each handler and type in its lane, from one to the
// next by the index, so that a lane of any length costs as much as it has handlers and types. $1 to $6 are attemptArgs.
const (
	laneCTE = `
lane as (
	(select p.handler, left(p.type, 256) as type, p.id from ` + holding + `
	order by p.handler, left(p.type, 256), p.id limit 1)
	union all
	select n.handler, n.type, n.id from lane l, lateral (
		select p.handler, left(p.type, 256) as type, p.id from ` + holding + ` and (p.handler, left(p.type, 256)) > (l.handler, l.type)
		order by p.handler, left(p.type, 256), p.id limit 1) n)`

	holding = `kinora.parked p
	where p.state = 'parked' and p.holds and p.key_hash <> '' and p.projector = $1::text and p.key_hash = $2::bytea and p.id <> all($6::bigint[])`

	inTheWay = `(l.handler = '' or l.handler = any($3::text[]) or l.type <> all($4::text[])) and ($5::bigint = 0 or l.id < $5::bigint)`
)

// attemptArgs are the first arguments of statements with laneCTE: the messages except are in no way.
func attemptArgs(a projector.Attempt, except []int64) []any {
	names := append([]string{a.Handler}, a.Was...)
	return []any{a.Projector, hashOf(a.Key), names, append([]string{}, a.Takes...), a.Seq, append([]int64{}, except...)}
}

// named is whose attempts are counted and named together.
func named(a projector.Attempt) string {
	if a.Handler == "" {
		return a.Projector + "/"
	}
	return a.Handler
}

// Statements that look a few rows up do so whatever the server thinks of the tables: these are empty most of the time, and a
// scan of an empty table is a plan that ages. Units have it in settingsSQL.
const lookUpSQL = `select set_config('enable_seqscan', 'off', true)`

// An attempt is judged by a short statement, which says -1 where something of its lane is parked, and then by one that walks the
// lane. One at a message without an id is never named.
const (
	// A name is taken back only by a later call of the process that gave it: a statement that was given up, and that the server runs
	// late, must not take back what its runner has named again since. Nobody waits for a name: each naming is a row of its own, and
	// one that another transaction has locked stays. That may be a backend whose client is gone, and live for hours.
	doneSQL = `
delete from kinora.inflight where ctid = any(array(
	select ctid from kinora.inflight
	where handler = $1::text and message_hash = $2::bytea and runner = $3::text and call < $4::bigint for update skip locked))`

	beginSQL = `
with verdict as materialized (
	select case
		when exists (select from ` + mine + ` and ($4::bigint = 0 or p.id < $4::bigint)) then 1
		when exists (
			select from kinora.parked p
			where p.state = 'parked' and p.holds and p.key_hash <> '' and p.projector = $1::text and p.key_hash = $2::bytea) then -1
		when exists (
			select from kinora.inflight i where i.handler = $6::text and i.message_hash = $5::bytea and i.runner <> $7::text) then 3
		when exists (
			select from kinora.attempts a where a.handler = $6::text and a.message_hash = $5::bytea and a.vanished) then 3
		else 0 end as v),
put as (
	insert into kinora.inflight (handler, message_hash, runner, call)
	select $6::text, $5::bytea, $7::text, $8::bigint from verdict where v = 0 and $5::bytea <> ''
	on conflict on constraint inflight_pkey do nothing) -- it is there twice
select v from verdict`

	mine = `kinora.parked p
			where p.state <> 'replayed' and p.message_hash <> '' and p.message_hash = $5::bytea and p.projector = $1::text
				and (p.handler = '' or p.handler = any($3::text[]))`

	beginInLaneSQL = `
with recursive ` + laneCTE + `,
verdict as materialized (
	select case
		when exists (select from lane l where ` + inTheWay + `) then 2
		when exists (
			select from kinora.inflight i where i.handler = $8::text and i.message_hash = $7::bytea and i.runner <> $9::text) then 3
		when exists (
			select from kinora.attempts a where a.handler = $8::text and a.message_hash = $7::bytea and a.vanished) then 3
		else 0 end as v),
put as (
	insert into kinora.inflight (handler, message_hash, runner, call)
	select $8::text, $7::bytea, $9::text, $10::bigint from verdict where v = 0 and $7::bytea <> ''
	on conflict on constraint inflight_pkey do nothing) -- it is there twice
select v from verdict`
)

// Apart implements projector.Journal.
func (db *DB) Apart() *sync.RWMutex { return &db.apart }

// Begin implements projector.Journal: one round trip, and another one where something is parked in an attempt's lane.
// Nothing of it waits for a disk.
func (db *DB) Begin(ctx context.Context, runner string, attempts, done []projector.Attempt) ([]projector.Verdict, error) {
	verdicts, call := make([]projector.Verdict, len(attempts)), db.calls.Add(1)
	b := &pgx.Batch{}
	b.Queue(lookUpSQL)
	for _, a := range done {
		b.Queue(db.q(doneSQL), named(a), hashOf(a.MessageID), runner, call)
	}
	judge := func(i int, sql string, args ...any) {
		a := attempts[i]
		b.Queue(db.q(sql), append(args, hashOf(a.MessageID), named(a), runner, call)...).QueryRow(func(row pgx.Row) error {
			return row.Scan(&verdicts[i])
		})
	}
	for i, a := range attempts {
		args := attemptArgs(a, nil)
		judge(i, beginSQL, args[0], args[1], args[2], a.Seq)
	}
	crash.Point("begin attempts: before")
	err := db.sendLookUps(ctx, b)
	crash.Point("begin attempts: judged")
	if err != nil {
		return nil, err
	}
	b = &pgx.Batch{}
	b.Queue(lookUpSQL)
	for i, v := range verdicts {
		if v < projector.Clear {
			judge(i, beginInLaneSQL, attemptArgs(attempts[i], nil)...)
		}
	}
	err = db.sendLookUps(ctx, b)
	crash.Point("begin attempts: after")
	if err != nil {
		return nil, err
	}
	return verdicts, nil
}

// bounded is a limit that the server has a number for.
func bounded(limit int) int { return min(limit, math.MaxInt32) }

// sendLookUps sends what there is beside lookUpSQL, in the implicit transaction of its one Sync.
func (db *DB) sendLookUps(ctx context.Context, b *pgx.Batch) error {
	if b.Len() == 1 {
		return nil
	}
	if err := db.pool.SendBatch(ctx, b).Close(); err != nil {
		return class(fmt.Errorf("keep the journal: %w", err))
	}
	return nil
}

// Runners that are at one suspect follow one another, and each one's statement sees what the one before it did.
const (
	oneAtATimeSQL = `select pg_advisory_xact_lock($1::int, $2::int)`

	beginAloneSQL = `
with ck as materialized (select clock_timestamp() as t),
others as materialized (
	select distinct i.runner, coalesce(r.expires_at > ck.t, false) as alive
	from ck, kinora.inflight i left join kinora.runners r on r.runner = i.runner
	where i.handler = $1::text and i.message_hash = $2::bytea and i.runner <> $3::text),
gone as (
	delete from kinora.inflight where ctid = any(array(
		select ctid from kinora.inflight
		where handler = $1::text and message_hash = $2::bytea and runner in (select runner from others where not alive) for update skip locked))
	returning runner),
counted as (
	insert into kinora.attempts as a (handler, message_hash, attempts, last_at, vanished)
	select $1::text, $2::bytea, count(distinct runner), max(ck.t), true from gone, ck having count(*) > 0
	on conflict on constraint attempts_pkey do update set attempts = a.attempts + excluded.attempts, last_at = excluded.last_at, vanished = true
	returning attempts),
now as materialized (
	select coalesce((select attempts from counted), (select attempts from kinora.attempts where handler = $1::text and message_hash = $2::bytea), 0) as attempts,
		(select count(*) from others where runner not in (select runner from gone))::int as alive), -- those that are locked may be
put as (
	insert into kinora.inflight (handler, message_hash, runner, call)
	select $1::text, $2::bytea, $3::text, $5::bigint from now where ($4::int < 0 or attempts + alive < $4::int) and $2::bytea <> '')
select attempts, alive from now`
)

// BeginAlone implements projector.Journal.
func (db *DB) BeginAlone(ctx context.Context, runner string, a projector.Attempt, limit int) (attempts, alive int, err error) {
	hash := hashOf(a.MessageID)
	b := &pgx.Batch{}
	b.Queue(lookUpSQL)
	b.Queue(oneAtATimeSQL, lockClassAttempt, lockKey(db.cfg.Schema+"/"+named(a)+"\x00"+string(hash)))
	b.Queue(db.q(beginAloneSQL), named(a), hash, runner, bounded(limit), db.calls.Add(1)).QueryRow(func(row pgx.Row) error {
		return row.Scan(&attempts, &alive)
	})
	crash.Point("begin alone: before")
	err = db.sendLookUps(ctx, b)
	crash.Point("begin alone: after")
	if err != nil {
		return 0, 0, err
	}
	return attempts, alive, nil
}

// A unit that forgets the count has its row for as long as its handler runs: whoever counts does not wait for that.
const countSettingsSQL = `select set_config('enable_seqscan', 'off', true), set_config('lock_timeout', $1::text, true)`

const countWait = "100ms"

// The count and the end of the name are one: see doneSQL. What reaches the limit is judged by the row as it is when it is locked.
const countAttemptSQL = `
with counted as (
	insert into kinora.attempts as a (handler, message_hash, attempts, last_at)
	select $1::text, $2::bytea, 1, clock_timestamp() where $3::text = '' or $5::int < 0 or 1 < $5::int
	on conflict on constraint attempts_pkey do update set attempts = a.attempts + 1, last_at = excluded.last_at
	where $3::text = '' or $5::int < 0 or a.attempts + 1 < $5::int
	returning attempts),
back as (
	delete from kinora.inflight where exists (select from counted) and ctid = any(array(
		select ctid from kinora.inflight
		where handler = $1::text and message_hash = $2::bytea and runner = $3::text and call < $4::bigint for update skip locked)))
select coalesce((select attempts from counted), greatest($5::int,
	1 + coalesce((select attempts from kinora.attempts where handler = $1::text and message_hash = $2::bytea), 0)))`

// CountAttempt implements projector.Journal. A wait of more than 100 ms for a unit that forgets the count is a transient error (55P03).
func (db *DB) CountAttempt(ctx context.Context, runner string, a projector.Attempt, limit int) (n int, err error) {
	b := &pgx.Batch{}
	b.Queue(countSettingsSQL, countWait)
	b.Queue(db.q(countAttemptSQL), named(a), hashOf(a.MessageID), runner, db.calls.Add(1), bounded(limit)).QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
	crash.Point("count attempt: before")
	err = db.sendLookUps(ctx, b)
	crash.Point("count attempt: after")
	if err != nil {
		return 0, err
	}
	return n, nil
}

const (
	aliveSQL = `
insert into kinora.runners (runner, expires_at) values ($1::text, clock_timestamp() + $2::bigint * interval '1 microsecond')
on conflict on constraint runners_pkey do update set expires_at = excluded.expires_at`

	endedSQL = `
with names as (delete from kinora.inflight where runner = $1::text)
delete from kinora.runners where runner = $1::text`
)

// Alive implements projector.Journal.
func (db *DB) Alive(ctx context.Context, runner string, lease time.Duration) error {
	sql, args := aliveSQL, []any{runner, lease.Microseconds()}
	if lease <= 0 {
		sql, args = endedSQL, args[:1]
	}
	crash.Point("alive: before")
	_, err := db.pool.Exec(ctx, db.q(sql), args...)
	crash.Point("alive: after")
	if err != nil {
		return class(fmt.Errorf("say that a runner is alive: %w", err))
	}
	return nil
}

// Whether a runner that never said that it is alive is dead for long is known from its names.
const pruneJournalSQL = `
with ck as materialized (select clock_timestamp() - $1::bigint * interval '1 microsecond' as t),
resolved as (
	delete from kinora.parked where state <> 'parked' and id = any(array(
		select id from kinora.parked where state <> 'parked' and projector = $3::text and resolved_at < (select t from ck)
		order by resolved_at limit $2::int))
	returning 1),
counted as (
	delete from kinora.attempts where last_at < (select t from ck) and ctid = any(array(
		select ctid from kinora.attempts where split_part(handler, '/', 1) = $3::text and last_at < (select t from ck)
		order by last_at limit $2::int))
	returning 1),
names as (
	delete from kinora.inflight where ctid = any(array(
		select i.ctid from ck, kinora.inflight i left join kinora.runners r on r.runner = i.runner
		where greatest(r.expires_at, i.named_at) < ck.t limit $2::int))
	returning 1),
runners as (delete from kinora.runners where expires_at < (select t from ck))
select (select count(*) from resolved) + (select count(*) from counted) + (select count(*) from names)`

// PruneJournal implements projector.Journal.
func (db *DB) PruneJournal(ctx context.Context, name string, keep time.Duration, limit int) (n int, err error) {
	if err := db.pool.QueryRow(ctx, db.q(pruneJournalSQL), planned, keep.Microseconds(), max(limit, 0), name).Scan(&n); err != nil {
		return 0, class(fmt.Errorf("prune the journal: %w", err))
	}
	return n, nil
}
