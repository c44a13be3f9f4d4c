package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// table is one of the file's, or of a file that is attached.
type table struct{ schema, name string }

// String is the table's name as a Change has it.
func (t table) String() string {
	if t.schema == "main" {
		return t.name
	}
	return t.schema + "." + t.name
}

func (t table) quoted() string { return quoted(t.schema) + "." + quoted(t.name) }

func quoted(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// touched is which rows a transaction touches, as SQLite tells before each change: also of a trigger's, of a cascade's,
// and where a row replaces another. What they were and are is read later, so that it does not matter how often
// each was changed.
type touched struct {
	mu     sync.Mutex
	rowids map[table]map[int64]bool
	rows   map[table][][]any // whole ones, where they have no rowid, or may have none. The driver cuts texts at a NUL here
	known  map[table]bool    // they have rowids
	failed error
}

// rehearsing makes the next transaction one that is watched.
func rehearsing(ctx context.Context) (context.Context, *touched) {
	t := &touched{rowids: map[table]map[int64]bool{}, rows: map[table][][]any{}, known: map[table]bool{}}
	return context.WithValue(ctx, mannerKey{}, manner{watch: t.note}), t
}

// note leaves out what is Kinora's, and tables that only this connection sees.
func (t *touched) note(d sqlite.SQLitePreUpdateData) {
	at := table{d.DatabaseName, d.TableName}
	if at.schema == "temp" || at.schema == "main" && strings.HasPrefix(strings.ToLower(at.name), "kinora_") {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rowids[at] == nil {
		t.rowids[at] = map[int64]bool{}
	}
	if d.Op != sqlite3.SQLITE_INSERT {
		t.rowids[at][d.OldRowID] = true
	}
	if d.Op != sqlite3.SQLITE_DELETE {
		t.rowids[at][d.NewRowID] = true
	}
	if t.known[at] {
		return
	}
	for _, read := range []struct {
		has bool
		row func(...any) error
	}{{d.Op != sqlite3.SQLITE_INSERT, d.Old}, {d.Op != sqlite3.SQLITE_DELETE, d.New}} {
		if !read.has {
			continue
		}
		row := make([]any, d.Count())
		if err := read.row(row...); err != nil {
			t.failed = err
			return
		}
		t.rows[at] = append(t.rows[at], row)
	}
}

const (
	rowidTables = `select schema, name from pragma_table_list where type = 'table' and not wr`

	rehearsal = `savepoint kinora_rehearsal`
	asItWas   = `rollback to kinora_rehearsal`
)

// rehearse is Do of a rehearsal.
func (d *DB) rehearse(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx *sql.Tx, fresh []int) ([]outbox.Message, error)) error {
	watched, seen := rehearsing(ctx)
	u, err := d.begin(watched)
	if err != nil {
		return unitError(ctx, err, false)
	}
	defer u.end()
	stay := context.AfterFunc(ctx, u.leave)
	defer stay()
	changes, err := u.rehearse(ctx, seen, func() error {
		_, err := u.work(ctx, w, apply)
		return err
	})
	if err != nil {
		return err
	}
	if !stay() {
		return ctx.Err()
	}
	u.end()
	w.Rehearse(changes)
	return nil
}

// rehearse runs work, and returns what it changed. The rows are read as they are after it, and, once all is undone, as they
// were before it; meanwhile nobody else writes. Constraints that are deferred to the commit are not checked.
func (u *unit) rehearse(ctx context.Context, seen *touched, work func() error) ([]projector.Change, error) {
	err := each(ctx, u, func(rows *sql.Rows) error {
		var t table
		err := rows.Scan(&t.schema, &t.name)
		seen.known[t] = true
		return err
	}, rowidTables)
	if err != nil {
		return nil, err
	}
	if _, err := u.exec(ctx, rehearsal); err != nil {
		return nil, err
	}
	if err := work(); err != nil {
		return nil, err
	}
	if u.undone.Load() {
		return nil, sql.ErrTxDone
	}
	after, err := u.rowsOf(ctx, seen)
	if err != nil {
		return nil, err
	}
	if _, err := u.exec(ctx, asItWas); err != nil {
		return nil, err
	}
	before, err := u.rowsOf(ctx, seen)
	if err != nil {
		return nil, err
	}
	return changesOf(before, after), nil
}

// place identifies a row: by its primary key, or by its rowid where it has none.
type place struct {
	table table
	key   string
}

type row struct {
	key     []any
	columns []string
	values  []any
}

// rowsOf reads the rows that were touched, as they are now.
func (u *unit) rowsOf(ctx context.Context, seen *touched) (map[place]row, error) {
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if seen.failed != nil {
		return nil, seen.failed
	}
	found := map[place]row{}
	for at, rowids := range seen.rowids {
		form, err := u.form(ctx, at)
		if err != nil {
			return nil, err
		}
		keys := seen.rows[at]
		if !form.keyed {
			keys = nil
			for id := range rowids {
				keys = append(keys, []any{id})
			}
		}
		for _, key := range keys {
			if err := u.readRow(ctx, form, key, found); err != nil {
				return nil, fmt.Errorf("read a row of %s: %w", at, err)
			}
		}
	}
	return found, nil
}

// readRow adds the row of that rowid, or that has the key of that whole row, where there is one.
func (u *unit) readRow(ctx context.Context, f form, at []any, found map[place]row) error {
	if f.query == "" {
		return nil
	}
	args := at
	if f.keyed {
		args = f.keyOf(at)
	}
	return each(ctx, u, func(rows *sql.Rows) error {
		values := make([]any, len(f.columns))
		into := make([]any, len(values))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			return err
		}
		r := row{key: f.keyOf(values), columns: f.columns, values: values}
		if !f.keyed && (len(r.key) == 0 || slices.Contains(r.key, nil)) { // null is no key, as many rows may have it
			r.key = append(r.key, at[0])
		}
		found[place{f.table, fmt.Sprintf("%#v", r.key)}] = r
		return nil
	}, f.query, args...)
}

// changesOf is in order of tables and of keys.
func changesOf(before, after map[place]row) []projector.Change {
	type change struct {
		place
		key []any
		projector.Change
	}
	var all []change
	for at, is := range after {
		was, there := before[at]
		if there && reflect.DeepEqual(was, is) {
			continue
		}
		c := change{place: at, key: is.key, Change: projector.Change{Table: at.table.String(), After: is.json()}}
		if there {
			c.Before = was.json()
		}
		all = append(all, c)
	}
	for at, was := range before {
		if _, there := after[at]; !there {
			all = append(all, change{place: at, key: was.key, Change: projector.Change{Table: at.table.String(), Before: was.json()}})
		}
	}
	slices.SortFunc(all, func(a, b change) int {
		return cmp.Or(cmp.Compare(a.Table, b.Table), slices.CompareFunc(a.key, b.key, compareValues), cmp.Compare(a.place.key, b.place.key))
	})
	var changes []projector.Change
	for _, c := range all {
		changes = append(changes, c.Change)
	}
	return slices.Clip(changes)
}
