package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

const (
	beginDryRun = `savepoint kinora_dry_run`
	undoDryRun  = `rollback to kinora_dry_run`

	// tableColumns lists the columns of table ?1 of schema ?2, and then again those of its
	// primary key in key order. The third column is the name of the rowid: empty if the table has
	// no rowid, null if columns hide all its names.
	tableColumns = `
with c as (select name, pk, cid from pragma_table_xinfo(?1, ?2) where hidden <> 1)
select name, iskey, iif((select wr from pragma_table_list where schema = ?2 and name = ?1), '', (
	select value from json_each('["rowid", "_rowid_", "oid"]') where value not in (select lower(name) from c)))
from (select name, false as iskey, cid as at from c union all select name, true, pk from c where pk > 0)
order by iskey, at`

	// pairRows pairs the rows before (?1) and after (?2) by table and key.
	pairRows = `
with versions as (
	select true as former, value->>'t' as name, value->'k' as k, value->'r' as r from json_each(?1)
	union all select false, value->>'t', value->'k', value->'r' from json_each(?2))
select name, max(r) filter (where former) as was, max(r) filter (where not former) as now from versions
group by name, k having was is not now order by name, k->>0, k->>1, k->>2, k`

	maxDryRunRows = 100_000 // most rows of one table that a dry run reads
)

// errDryRun rolls a dry run back.
var errDryRun = errors.New("it was a dry run")

// dryRun runs p, rolls it back, and passes the changed rows to p.DryRun.
func (d *Provider) dryRun(ctx context.Context, p *provider.Unit, run runFunc) error {
	if !d.owned {
		return &provider.Error{Class: provider.ClassPermanent, Err: errors.New("dry run: a DB from New cannot report changes: use Open")}
	}
	watch := newDryRun()
	var changes []provider.Change
	err := d.writeTx(watched(ctx, watch.note), func(u *unit) error {
		watch.tx = u.tx
		_, err := u.exec(ctx, beginDryRun)
		if err = inStep("begin a dry run", err); err == nil {
			err = u.work(ctx, p, run)
		}
		if err == nil {
			changes, err = watch.changes(ctx)
		}
		return cmp.Or(err, errDryRun)
	})
	if !errors.Is(err, errDryRun) {
		return unitError(ctx, err)
	}
	p.DryRun(changes)
	return nil
}

// dryRun finds the rows that a transaction changed, without a commit. SQLite's pre-update hook reports
// each one. They are read at the end of the transaction, and again after it was rolled back.
type dryRun struct {
	session
	changed map[tableName]map[int64]bool // rowids; zero in a table without rowids
	limit   int                          // most rows of one table
}

func newDryRun() *dryRun {
	return &dryRun{session: session{pool: &pool{}}, changed: map[tableName]map[int64]bool{}, limit: maxDryRunRows}
}

type tableName struct{ schema, name string }

// String returns the table's name in a Change.
func (t tableName) String() string { return strings.TrimPrefix(t.schema+"."+t.name, "main.") }

// note is called before a row changes. It needs no lock: a connection runs one statement at a time.
func (d *dryRun) note(u sqlite.SQLitePreUpdateData) {
	t := tableName{u.DatabaseName, u.TableName}
	isOwn := t.schema == "main" && strings.HasPrefix(strings.ToLower(t.name), "kinora_")
	if isOwn || t.schema == "temp" || len(d.changed[t]) > d.limit {
		return
	}
	if d.changed[t] == nil {
		d.changed[t] = map[int64]bool{}
	}
	if u.Op != sqlite3.SQLITE_INSERT {
		d.changed[t][u.OldRowID] = true
	}
	if u.Op != sqlite3.SQLITE_DELETE {
		d.changed[t][u.NewRowID] = true
	}
}

// changes returns the rows that changed since the savepoint, by table and primary key (or rowid), and
// rolls back to it. It omits unchanged rows, Kinora's tables and temporary ones. Deferred foreign keys
// are not checked. If a table has more than maxDryRunRows changed rows or, without rowids, rows, the
// error has the code "too_many_rows".
func (d *dryRun) changes(ctx context.Context) (changes []provider.Change, err error) {
	var before string
	after, err := d.read(ctx)
	if err == nil {
		_, err = d.exec(ctx, undoDryRun)
	}
	if err == nil {
		before, err = d.read(ctx)
	}
	if err == nil {
		changes, err = rowsOf(ctx, d, func(c *provider.Change) []any { return []any{&c.Table, (*[]byte)(&c.Before), (*[]byte)(&c.After)} }, pairRows, before, after)
	}
	return result(changes, "dry run", err)
}

// read returns the changed rows as they are now: a JSON array of their tables, keys and columns.
func (d *dryRun) read(ctx context.Context) (string, error) {
	var all []string
	for t, rowids := range d.changed {
		rows, err := d.rows(ctx, t, rowids)
		if err != nil {
			return "", wrap("read "+t.String(), err)
		}
		all = append(all, rows...)
	}
	return "[" + strings.Join(all, ",") + "]", nil
}

// rows returns the rows with these rowids, or all of a table without rowids; none if there is no table.
func (d *dryRun) rows(ctx context.Context, t tableName, rowids map[int64]bool) ([]string, error) {
	var columns, primary, key []string
	var rowid sql.NullString
	err := eachRow(ctx, d, func(rows *sql.Rows) error {
		var name string
		var isKey bool
		err := rows.Scan(&name, &isKey, &rowid)
		if isKey {
			primary, key = append(primary, nameSQL(name)), append(key, jsonSQL(name))
		} else {
			columns = append(columns, textSQL(name), jsonSQL(name))
		}
		return err
	}, tableColumns, t.name, t.schema)
	if err != nil || len(columns) == 0 {
		return nil, err
	}
	where := "?1 <> ''"
	if rowid.String != "" {
		where = rowid.String + " in (select value from json_each(?1))"
		// The rowid is the key if the table has no primary key, or if the primary key has a null.
		key = append(key, fmt.Sprintf("iif((%s) is null, %s, null)", cmp.Or(strings.Join(primary, " || "), "null"), rowid.String))
	} else if !rowid.Valid {
		return nil, errors.New("its columns hide its rowid")
	}
	query := fmt.Sprintf(`select json_object('t', %s, 'k', json_array(%s), 'r', json_object(%s)) from %s.%s where %s limit %d`,
		textSQL(t.String()), strings.Join(key, ", "), strings.Join(columns, ", "), nameSQL(t.schema), nameSQL(t.name), where, d.limit+1)
	found, err := column[string](ctx, d, query, jsonOf(slices.Collect(maps.Keys(rowids))))
	if err == nil && max(len(rowids), len(found)) > d.limit {
		err = &provider.Error{Class: provider.ClassPermanent, Code: "too_many_rows", Err: fmt.Errorf("more than %d rows", d.limit)}
	}
	return found, err
}

// jsonSQL is an expression for a column's value in JSON: blobs and infinite numbers become texts.
func jsonSQL(column string) string { return valueSQL(nameSQL(column)) }

func valueSQL(column string) string {
	return fmt.Sprintf(`case typeof(%[1]s) when 'blob' then '\x' || lower(hex(%[1]s))
	when 'real' then iif(abs(%[1]s) < 9e999, %[1]s, printf('%%+f', %[1]s)) else %[1]s end`, column)
}

func nameSQL(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }
func textSQL(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
