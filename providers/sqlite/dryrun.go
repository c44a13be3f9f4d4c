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

	tableColumns = `
select c.name, c.pk, (select t.wr from pragma_table_list t where t.schema = ?2 and t.name = ?1)
from pragma_table_xinfo(?1, ?2) c where c.hidden <> 1 order by c.cid`

	// pairRows pairs the rows before (?1) and after (?2) by table and key.
	pairRows = `
with versions as (
	select true as former, value->>'t' as name, value->'k' as k, value->'r' as r from json_each(?1)
	union all select false, value->>'t', value->'k', value->'r' from json_each(?2))
select name, max(r) filter (where former) as was, max(r) filter (where not former) as now from versions
group by name, k having was is not now order by name, k->>0, k->>1, k->>2, k`

	maxDryRunRows = 100_000 // rows of one table that a dry run reads
)

// dryRun finds the rows that a transaction changed, without its commit. SQLite's pre-update hook reports which rows a
// statement, a trigger, a cascade or a replace changes. They are read at the end, and once more after the transaction
// has been undone.
type dryRun struct {
	tx      *sql.Tx
	changed map[tableName]map[int64]bool // rowids; zero in a table without rowids
	limit   int                          // of the rows of one table
}

type tableName struct{ schema, name string }

// String is the name that a change has.
func (t tableName) String() string { return strings.TrimPrefix(t.schema+"."+t.name, "main.") }

// errDryRun rolls a dry run back.
var errDryRun = errors.New("it was a dry run")

// dryRun runs p, rolls back, and reports the rows that changed to p.DryRun.
func (d *DB) dryRun(ctx context.Context, p *provider.Unit, run runFunc) error {
	if !d.owned {
		return &provider.Error{Class: provider.ClassPermanent, Err: errors.New("dry run: a pool given to New does not report changes")}
	}
	watch := newDryRun()
	var changes []provider.Change
	err := d.unit(watched(ctx, watch.note), func(u *unit) error {
		watch.tx = u.tx
		if _, err := u.exec(ctx, beginDryRun); err != nil {
			return &ownError{err}
		}
		err := u.work(ctx, p, run)
		if err == nil {
			changes, err = watch.changes(ctx)
		}
		if err == nil {
			err = errDryRun
		}
		return err
	})
	if errors.Is(err, errDryRun) {
		p.DryRun(changes)
		return nil
	}
	return err
}

func newDryRun() *dryRun {
	return &dryRun{changed: map[tableName]map[int64]bool{}, limit: maxDryRunRows}
}

// note is called before a row changes. The connection runs one statement at a time, so it needs no lock.
func (d *dryRun) note(u sqlite.SQLitePreUpdateData) {
	t := tableName{u.DatabaseName, u.TableName}
	if t.schema == "temp" || t.schema == "main" && strings.HasPrefix(strings.ToLower(t.name), "kinora_") || len(d.changed[t]) > d.limit {
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

// changes returns the rows that the transaction has changed since its savepoint, by table and primary key (or rowid),
// without those that are as they were, and undoes them. Kinora's own tables and temporary ones are left out. A blob is
// shown as "\x" and hexadecimal digits. Foreign keys that are deferred to the commit are not checked. It reads at most
// 100,000 rows of a table, otherwise it returns an error ("too_many_rows"): those that were changed or, of a table
// without rowids, all.
func (d *dryRun) changes(ctx context.Context) (changes []provider.Change, err error) {
	var before, after string
	after, err = d.read(ctx)
	if err == nil {
		_, err = d.tx.ExecContext(ctx, undoDryRun)
	}
	if err == nil {
		before, err = d.read(ctx)
	}
	if err == nil {
		err = each(ctx, d, func(rows *sql.Rows) error {
			var table string
			var before, after []byte
			err := rows.Scan(&table, &before, &after)
			changes = append(changes, provider.Change{Table: table, Before: before, After: after})
			return err
		}, pairRows, before, after)
	}
	if err != nil {
		return nil, fmt.Errorf("dry run: %w", err)
	}
	return changes, nil
}

// query implements querier.
func (d *dryRun) query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return d.tx.QueryContext(ctx, query, args...)
}

// read returns the changed rows as they are now: a JSON array of their tables, keys and columns.
func (d *dryRun) read(ctx context.Context) (string, error) {
	var found []string
	for t, rowids := range d.changed {
		query, err := d.rowsQuery(ctx, t)
		if err == nil && query != "" {
			start := len(found)
			err = each(ctx, d, func(rows *sql.Rows) error {
				var row string
				err := rows.Scan(&row)
				found = append(found, row)
				return err
			}, query, jsonOf(slices.Collect(maps.Keys(rowids))))
			if err == nil && max(len(rowids), len(found)-start) > d.limit {
				err = &provider.Error{Class: provider.ClassPermanent, Code: "too_many_rows", Err: fmt.Errorf("more than %d rows", d.limit)}
			}
		}
		if err != nil {
			return "", fmt.Errorf("read %s: %w", t, err)
		}
	}
	return "[" + strings.Join(found, ",") + "]", nil
}

// rowsQuery returns the query of the rows with the rowids ?1 or, in a table without rowids, of all. It is empty if there
// is no such table now.
func (d *dryRun) rowsQuery(ctx context.Context, t tableName) (string, error) {
	var names, columns, primary, key []string
	noRowid, where, places := false, "?1 <> ''", map[int]string{}
	err := each(ctx, d, func(rows *sql.Rows) error {
		var name string
		var place int
		err := rows.Scan(&name, &place, &noRowid)
		names, columns, places[place] = append(names, name), append(columns, textSQL(name), jsonSQL(name)), name
		return err
	}, tableColumns, t.name, t.schema)
	if err != nil || len(names) == 0 {
		return "", err
	}
	delete(places, 0) // not in the primary key
	for _, place := range slices.Sorted(maps.Keys(places)) {
		primary, key = append(primary, nameSQL(places[place])), append(key, jsonSQL(places[place]))
	}
	if !noRowid {
		free := slices.DeleteFunc([]string{"rowid", "_rowid_", "oid"}, func(rowid string) bool {
			return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, rowid) })
		})
		if len(free) == 0 {
			return "", errors.New("its columns hide its rowid")
		}
		where = free[0] + " in (select value from json_each(?1))"
		// Without a primary key, or with a null in it, the rowid is the key.
		key = append(key, fmt.Sprintf("iif((%s) is null, %s, null)", cmp.Or(strings.Join(primary, " || "), "null"), free[0]))
	}
	return fmt.Sprintf(`select json_object('t', %s, 'k', json_array(%s), 'r', json_object(%s)) from %s.%s where %s limit %d`,
		textSQL(t.String()), strings.Join(key, ", "), strings.Join(columns, ", "), nameSQL(t.schema), nameSQL(t.name), where, d.limit+1), nil
}

// jsonSQL is a column's value as far as JSON has such values: blobs and infinite numbers become texts.
func jsonSQL(column string) string {
	return fmt.Sprintf(`case typeof(%[1]s) when 'blob' then '\x' || lower(hex(%[1]s))
	when 'real' then iif(abs(%[1]s) < 9e999, %[1]s, printf('%%+f', %[1]s)) else %[1]s end`, nameSQL(column))
}

func nameSQL(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }
func textSQL(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
