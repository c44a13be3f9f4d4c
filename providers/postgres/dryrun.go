package postgres

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	// The next transaction id and the next multixact id: those of the dry run are these or later
	// ones. A statement that waits for a lock longer than a second fails, because the lock's
	// holder may be waiting for the dry run.
	beginDryRunSQL = `
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint, (mxid_age('1'::xid) + 1::bigint) & 4294967295,
	set_config('lock_timeout', '1s', true) || ` + sameFormats

	writerSQL = `select pg_backend_pid(), ` + sameFormats

	// Both sides format values alike, whatever the handler or the session has set.
	sameFormats = `set_config('TimeZone', 'UTC', true) || set_config('DateStyle', 'ISO', true)
	|| set_config('IntervalStyle', 'postgres', true) || set_config('bytea_output', 'hex', true) || set_config('extra_float_digits', '1', true)`

	// A transaction holds a lock on each table that it has written to. If the lock is exclusive, either the transaction
	// created the table, or no other one can read it. The statement returns the tables that others know, why changes of one
	// cannot be seen, and how many transaction ids were assigned since $2: long frozen rows may have ids like later ones.
	knownTablesSQL = `
with known as (
	select c.oid::bigint, case
		when bool_or(l.mode = 'AccessExclusiveLock') then 'locked' when row_security_active(c.oid) then 'row_security' end as hidden
	from pg_locks l join pg_class c on c.oid = l.relation
	where l.pid = $1::int and l.locktype = 'relation' and l.mode in ('RowExclusiveLock', 'AccessExclusiveLock')
		and c.relkind in ('r', 'p') and c.relpersistence <> 't'
	group by c.oid)
select coalesce(array_agg(oid), '{}'), (select array[hidden, oid::regclass::text] from known where hidden <> '' limit 1),
	(age('3'::xid) + 3 - $2::bigint) & 4294967295
from known`

	writtenTablesSQL = `
select format('%I.%I', n.nspname, c.relname),
	case when pg_table_is_visible(c.oid) then c.relname::text else n.nspname || '.' || c.relname end as show,
	coalesce((
		select 'jsonb_build_array(' || string_agg('t.' || quote_ident(a.attname), ', ' order by k.o) || ')'
		from pg_index i, unnest(i.indkey::smallint[]) with ordinality k(attnum, o), pg_attribute a
		where i.indrelid = c.oid and i.indisprimary and k.o <= i.indnkeyatts and a.attrelid = c.oid and a.attnum = k.attnum), 'to_jsonb(t)'),
	c.oid = any($2::bigint[]), row_security_active(c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' and c.relpersistence <> 't' and n.nspname <> $1::text and n.nspname !~ '^pg_' and c.oid in (
	select relation from pg_locks where pid = pg_backend_pid() and locktype = 'relation' and mode in ('RowExclusiveLock', 'AccessExclusiveLock'))
order by show`

	maxDryRunRows = 100_000 // most rows of one table
)

// unseen has the reasons why changes of a table cannot be shown, by the code of the error.
var unseen = map[string]string{
	"locked":        "the handler has locked it against readers, as truncate does",
	"row_security":  "row security is active and may hide changes",
	"too_many_rows": "more than 100,000 rows have changed",
}

func hidden(code, table string) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: fmt.Errorf("%s: %s", table, unseen[code])}
}

// dryRun finds the rows that a transaction changed, without a commit. It compares the row versions that the transaction sees
// with those that others see, through a separate connection: the pool may have only one.
type dryRun struct {
	db                *Provider
	conn              *pgx.Conn
	outside           pgx.Tx // read only, read committed: each statement sees the latest commits
	xid, multi, drawn int64  // see the statements
}

type writtenTable struct {
	Name  string // in SQL
	Show  string // in a Change
	Key   string // an SQL expression of type jsonb on a row t
	Known bool   // others know it: the transaction has not created it
	Hides bool   // row security is active
}

// beginDryRun prepares a dry run. Call it before the transaction begins: behind a pooler, waiters for locks of that
// transaction may use all connections. Dry runs of a DB take turns: if several had one of a pooler's connections each,
// none might get its second. Call end afterwards.
func (db *Provider) beginDryRun(ctx context.Context) (*dryRun, error) {
	if !take(ctx, db.dryRuns) {
		return nil, fmt.Errorf("dry run: wait for another one: %w", ctx.Err())
	}
	conn, err := connect(ctx, db.pool.Config())
	if err != nil {
		<-db.dryRuns
		return nil, fmt.Errorf("dry run: connect: %w", err)
	}
	d := &dryRun{db: db, conn: conn}
	if d.outside, err = conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}); err == nil {
		err = d.outside.QueryRow(ctx, beginDryRunSQL, planned).Scan(&d.xid, &d.multi, nil)
	}
	if err != nil {
		d.end(ctx)
		return nil, fmt.Errorf("dry run: begin: %w", err)
	}
	return d, nil
}

func (d *dryRun) end(ctx context.Context) {
	if d.outside != nil {
		rollback(ctx, d.outside) // the server would end it later than the connection
	}
	closeConn(ctx, d.conn)
	<-d.db.dryRuns
}

// changes returns the rows that tx has changed, by table and primary key, with times in UTC, and without unchanged rows,
// Kinora's tables and temporary tables. It runs deferred triggers and constraints first, and reads each table that tx has
// written to twice. It returns an error if one has more than 100,000 rows ("too_many_rows") or row security
// ("row_security"), or if tx has locked one against readers, as truncate and alter do ("locked"). Roll tx back afterwards.
func (d *dryRun) changes(ctx context.Context, tx pgx.Tx) (all []provider.Change, err error) {
	var pid int
	var known []int64
	var why []string // why changes of a table cannot be seen
	if _, err = tx.Exec(ctx, `set constraints all immediate`); err == nil {
		err = tx.QueryRow(ctx, writerSQL, planned).Scan(&pid, nil)
	}
	if err == nil {
		err = d.outside.QueryRow(ctx, knownTablesSQL, planned, pid, d.xid).Scan(&known, &why, &d.drawn)
	}
	if err == nil && why != nil {
		err = hidden(why[0], why[1])
	}
	if err != nil {
		return nil, wrap("dry run", err)
	}
	tables, err := collect(ctx, tx, pgx.RowToStructByPos[writtenTable], writtenTablesSQL, planned, d.db.cfg.Schema, known)
	for _, t := range tables {
		changes, err := d.table(ctx, tx, t)
		if err != nil {
			return nil, wrap("dry run: read changes of "+t.Show, err)
		}
		all = append(all, changes...)
	}
	return all, wrap("dry run: list tables", err)
}

// table pairs the former and new versions of rows by key. Without a primary key, equal versions
// are a pair. Former versions are those that others see and tx does not; if another transaction
// changes one meanwhile, others no longer see it when it is read. A new version belongs to a
// transaction that is still in progress. A multixact stands for several transactions that have
// locked or changed a row.
func (d *dryRun) table(ctx context.Context, tx pgx.Tx, t writtenTable) ([]provider.Change, error) {
	if t.Hides {
		return nil, hidden("row_security", t.Show)
	}
	in := strings.NewReplacer("{table}", "only "+t.Name+" t", "{key}", t.Key).Replace
	former := "[]"
	if t.Known {
		var places []string
		err := d.outside.QueryRow(ctx, in(`
select array_agg(t.ctid::text) from {table}
where t.xmax <> '0'::xid and ((t.xmax::text::bigint - $1::bigint) & 4294967295 < 2147483648
	or (t.xmax::text::bigint - $2::bigint) & 4294967295 < mxid_age($2::bigint::text::xid))`),
			planned, d.xid, d.multi).Scan(&places)
		if err == nil {
			err = tx.QueryRow(ctx, in(`
select array_agg(place) from (
	select unnest($1::text[]) place except select t.ctid::text from {table} where t.ctid = any($1::text[]::tid[])) p`),
				planned, places).Scan(&places)
		}
		if len(places) > maxDryRunRows {
			return nil, hidden("too_many_rows", t.Show)
		}
		if err == nil {
			err = d.outside.QueryRow(ctx, in(`
select coalesce(jsonb_agg(jsonb_build_object('key', {key}, 'content', to_jsonb(t))), '[]')::text
from {table} where t.ctid = any($1::text[]::tid[])`), planned, places).Scan(&former)
		}
		if err != nil {
			return nil, err
		}
	}
	changes, err := collect(ctx, tx, pgx.RowToStructByPos[provider.Change], in(`
with was as (
	select key, content, row_number() over (partition by key) as n from jsonb_to_recordset($2::text::jsonb) f(key jsonb, content jsonb)),
now as (
	select {key} as key, to_jsonb(t) as content, row_number() over (partition by {key}) as n from {table}
	where case when (t.xmin::text::bigint - $1::bigint) & 4294967295 < $5::bigint
		then pg_xact_status(($1::bigint + ((t.xmin::text::bigint - $1::bigint) & 4294967295))::text::xid8) = 'in progress' end)
select $3::text, was.content, now.content from was full join now using (key, n)
where was.content::text is distinct from now.content::text order by key, n limit $4::int + 1`),
		planned, d.xid, former, t.Show, maxDryRunRows, d.drawn)
	if len(changes) > maxDryRunRows {
		return nil, hidden("too_many_rows", t.Show)
	}
	return changes, err
}
