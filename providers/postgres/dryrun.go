package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	// The next transaction id and the next multixact id: the dry run's are these or later ones. A statement that
	// must wait for a lock longer than a second fails, because the lock may be waiting for the dry run.
	beginDryRunSQL = `
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint & 4294967295, (mxid_age('1'::xid) + 1::bigint) & 4294967295,
	set_config('lock_timeout', '1s', true)`

	// Both sides write values alike, whatever the handler or the session has set.
	dryRunFormatsSQL = `
select pg_backend_pid(), set_config('TimeZone', 'UTC', true) || set_config('DateStyle', 'ISO', true) || set_config('IntervalStyle', 'postgres', true)
	|| set_config('bytea_output', 'hex', true) || set_config('extra_float_digits', '1', true)`

	// A transaction holds a lock on each table that it has written to. If that is exclusive, it has created the table,
	// or no other transaction can read it.
	writtenTablesSQL = `
select c.oid::bigint, format('%I.%I', n.nspname, c.relname),
	case when pg_table_is_visible(c.oid) then c.relname::text else n.nspname || '.' || c.relname end,
	coalesce((
		select 'jsonb_build_array(' || string_agg('t.' || quote_ident(a.attname), ', ' order by k.o) || ')'
		from pg_index i, unnest(i.indkey::smallint[]) with ordinality k(attnum, o), pg_attribute a
		where i.indrelid = c.oid and i.indisprimary and k.o <= i.indnkeyatts and a.attrelid = c.oid and a.attnum = k.attnum), 'to_jsonb(t)'),
	row_security_active(c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' and c.relpersistence <> 't' and n.nspname <> $1::text and n.nspname !~ '^pg_' and c.oid in (
	select relation from pg_locks where pid = pg_backend_pid() and locktype = 'relation' and mode in ('RowExclusiveLock', 'AccessExclusiveLock'))
order by 3`

	// The same tables as others see them.
	knownTablesSQL = `
select c.oid::bigint, c.oid::regclass::text, bool_or(l.mode = 'AccessExclusiveLock'), row_security_active(c.oid)
from pg_locks l join pg_database d on d.oid = l.database join pg_class c on c.oid = l.relation
where d.datname = current_database() and l.pid = $1::int and l.locktype = 'relation' and l.mode in ('RowExclusiveLock', 'AccessExclusiveLock')
	and c.relkind in ('r', 'p') and c.relpersistence <> 't'
group by c.oid`

	maxDryRunRows = 100_000 // of one table
)

// dryRun finds the rows that a transaction changed, without its commit. It compares the versions of rows that the
// transaction sees with those that everyone else sees, through a connection of its own: the pool may have only one.
type dryRun struct {
	schema     string
	conn       *pgx.Conn
	outside    pgx.Tx // read only; read committed, so that each statement sees the latest commits
	xid, multi int64
	over       func() // lets the next dry run begin
}

// writtenTable is a table of the transaction as SQL names it and as a change names it. key is an SQL expression of
// type jsonb on a row t.
type writtenTable struct {
	name, show, key string
	known           bool // to others: the transaction has not created it
}

// beginDryRun prepares a dry run. Call it before the transaction begins: behind a pooler, those who wait for locks of that
// transaction may use all connections. Dry runs of a DB follow one another: if several had one of a pooler's connections each,
// none might get its second. Call end afterwards.
func (db *DB) beginDryRun(ctx context.Context) (*dryRun, error) {
	select {
	case db.dryRuns <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("dry run: wait for another one: %w", ctx.Err())
	}
	conn, err := connect(ctx, db.pool.Config())
	if err != nil {
		<-db.dryRuns
		return nil, fmt.Errorf("dry run: connect: %w", err)
	}
	d := &dryRun{schema: db.cfg.Schema, conn: conn, over: func() { <-db.dryRuns }}
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
	shut(ctx, d.conn)
	d.over()
}

// changes returns the rows that tx has changed, by table and primary key, without those that are as they were. It runs deferred
// triggers and constraints first, and leaves out Kinora's own tables and temporary ones. Times are in UTC. It reads each table
// that tx has written to twice, and returns at most 100,000 rows of one ("too_many_rows"). It cannot see changes, and returns an
// error, if row security is active on such a table ("row_security"), and if tx has locked a table against readers, as truncate
// and alter do ("locked"). tx must be rolled back afterwards.
func (d *dryRun) changes(ctx context.Context, tx pgx.Tx) ([]provider.Change, error) {
	if _, err := tx.Exec(ctx, `set constraints all immediate`); err != nil {
		return nil, fmt.Errorf("dry run: run what is deferred: %w", err)
	}
	tables, err := d.tables(ctx, tx)
	if err != nil {
		return nil, fmt.Errorf("dry run: list tables: %w", err)
	}
	var all []provider.Change
	for _, t := range tables {
		changes, err := d.table(ctx, tx, t)
		if err != nil {
			return nil, fmt.Errorf("dry run: read changes of %s: %w", t.show, err)
		}
		all = append(all, changes...)
	}
	return all, nil
}

// tables returns the tables that tx has written to.
func (d *dryRun) tables(ctx context.Context, tx pgx.Tx) ([]writtenTable, error) {
	var pid int
	for _, side := range []pgx.Tx{d.outside, tx} { // the pid is that of tx
		if err := side.QueryRow(ctx, dryRunFormatsSQL, planned).Scan(&pid, nil); err != nil {
			return nil, err
		}
	}
	rows, err := d.outside.Query(ctx, knownTablesSQL, planned, pid)
	if err != nil {
		return nil, err
	}
	var oid int64
	var name string
	var locked, hides bool
	known := map[int64]bool{} // whether row security is active
	if _, err := pgx.ForEachRow(rows, []any{&oid, &name, &locked, &hides}, func() error {
		if locked {
			return hidden("locked", fmt.Errorf("the handler has locked %s against readers, as truncate does", name))
		}
		known[oid] = hides
		return nil
	}); err != nil {
		return nil, err
	}
	if rows, err = tx.Query(ctx, writtenTablesSQL, planned, d.schema); err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (t writtenTable, err error) {
		if err = row.Scan(&oid, &t.name, &t.show, &t.key, &hides); err != nil {
			return t, err
		}
		outside, ok := known[oid]
		if hides || outside {
			return t, hidden("row_security", fmt.Errorf("row security is active on %s and may hide changes", t.show))
		}
		t.known = ok
		return t, nil
	})
}

// table pairs former and new versions by their keys. Without a primary key, versions that are equal are a pair.
func (d *dryRun) table(ctx context.Context, tx pgx.Tx, t writtenTable) ([]provider.Change, error) {
	former := "[]"
	if t.known {
		gone, err := d.onlySeen(ctx, t, d.outside, tx)
		if err != nil {
			return nil, err
		}
		if err := d.outside.QueryRow(ctx, `
select coalesce(jsonb_agg(jsonb_build_object('key', `+t.key+`, 'content', to_jsonb(t))), '[]')::text
from only `+t.name+` t where t.ctid = any($1::text[]::tid[])`, planned, gone).Scan(&former); err != nil {
			return nil, err
		}
	}
	made, err := d.onlySeen(ctx, t, tx, d.outside)
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `
with was as (
	select key, content, row_number() over (partition by key) as n from jsonb_to_recordset($2::text::jsonb) f(key jsonb, content jsonb)),
now as (
	select `+t.key+` as key, to_jsonb(t) as content, row_number() over (partition by `+t.key+`) as n
	from only `+t.name+` t where t.ctid = any($1::text[]::tid[]))
select $3::text, was.content, now.content from was full join now using (key, n)
where was.content::text is distinct from now.content::text order by key, n`, planned, made, former, t.show)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[provider.Change])
}

// onlySeen returns the places of row versions that tx has written or deleted: one side sees them, and the other does not.
func (d *dryRun) onlySeen(ctx context.Context, t writtenTable, by, notBy pgx.Tx) ([]string, error) {
	var places []string
	// A multixact stands for several transactions that have locked or changed a row.
	err := by.QueryRow(ctx, `
select array_agg(t.ctid::text) from only `+t.name+` t where (t.xmin::text::bigint - $1::bigint) & 4294967295 < 2147483648
	or t.xmax <> '0'::xid and ((t.xmax::text::bigint - $1::bigint) & 4294967295 < 2147483648
		or (t.xmax::text::bigint - $2::bigint) & 4294967295 < mxid_age($2::bigint::text::xid))`, planned, d.xid, d.multi).Scan(&places)
	if err == nil && t.known {
		// If another transaction changes one meanwhile, the first side no longer sees it either when it is read.
		err = notBy.QueryRow(ctx, `
select array_agg(place) from (
	select unnest($1::text[]) place except select t.ctid::text from only `+t.name+` t where t.ctid = any($1::text[]::tid[])) p`, planned, places).Scan(&places)
	}
	if err == nil && len(places) > maxDryRunRows {
		err = hidden("too_many_rows", fmt.Errorf("more than %d rows", maxDryRunRows))
	}
	return places, err
}

// hidden is the error of a dry run that cannot show what changed.
func hidden(code string, err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}
