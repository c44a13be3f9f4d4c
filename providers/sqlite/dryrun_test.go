package sqlite_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// dryRun runs statements in a transaction, rolls it back, and returns the changes as "table
// before after".
func dryRun(ctx context.Context, db *sql.DB, statements ...string) (got []string, err error) {
	return limitedDryRun(ctx, db, 100_000, statements...)
}

func limitedDryRun(ctx context.Context, db *sql.DB, limit int, statements ...string) (got []string, err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback() }()
	d, err := sqlite.StartDryRun(ctx, conn, tx)
	if err != nil {
		return nil, err
	}
	defer d.Stop()
	d.Limit(limit)
	for _, s := range statements {
		if _, err := tx.ExecContext(ctx, s); err != nil {
			return nil, fmt.Errorf("%s: %w", s, err)
		}
	}
	changes, err := d.Changes(ctx)
	for _, c := range changes {
		if c.Before != nil && !json.Valid(c.Before) || c.After != nil && !json.Valid(c.After) {
			err = errors.Join(err, fmt.Errorf("not JSON: %s %s", c.Before, c.After))
		}
		got = append(got, fmt.Sprintf("%s %s %s", c.Table, c.Before, c.After))
	}
	return got, err
}

// dryRunTables are the tables of TestDryRun.
var dryRunTables = []string{
	`create table other.far (x)`,
	`create table parents (id integer primary key, name text unique)`,
	`create table children (id integer primary key, parent integer references parents on delete cascade, rowid text)`,
	`create table pairs (v text, b int, a text collate nocase, primary key (a, b)) without rowid`,
	`create table bare (x)`,
	`create table log (line text)`,
	`create table "odd ""one" ("a ""b" blob, twice generated always as (length("a ""b") * 2), "at" datetime)`,
	`create trigger logs after update on totals begin insert into log values (new.key); end`,
	`insert into totals values ('a', 1), ('b', 2)`,
	`insert into parents values (1, 'p'), (2, 'q')`,
	`insert into children values (10, 1, 'x'), (11, 1, 'y'), (12, 2, 'z')`,
	`insert into pairs values ('v', 1, 'k'), ('w', 2, 'k')`,
	`create table numbers (n integer primary key, x text)`,
	`create table loose (k text primary key, x text)`, `insert into loose values (null, 'a'), (null, 'b'), (null, 'c')`,
	`create view seen as select x from bare`,
	`create trigger sees instead of insert on seen begin insert into bare values (new.x); end`,
	`create table selfs (id integer primary key, x int, n int)`, `insert into selfs values (1, 0, 0)`,
	`create trigger again after update on selfs begin update selfs set n = n + 1 where id = new.id; end`,
	`create trigger gone after delete on selfs begin insert into log values ('gone'); end`,
	`create table made_of (both text generated always as (a || b), b text, again text generated always as (a || b) stored, a text, primary key (a, b)) without rowid`,
}

func TestDryRun(t *testing.T) {
	t.Parallel()
	ctx, db := context.Background(), open(t, nil).SQL()
	db.SetMaxOpenConns(1)
	for _, s := range append([]string{`attach '` + filepath.Join(t.TempDir(), "other.db") + `' as other`}, dryRunTables...) {
		_, err := db.Exec(s)
		require.NoError(t, err, s)
	}
	for _, c := range []struct {
		name string
		run  []string
		want []string
	}{
		{"nothing", nil, nil},
		{"changed twice, and a trigger", []string{`update totals set total = 5 where key = 'a'`, `update totals set total = 7 where key = 'a'`}, []string{
			`log  {"line":"a"}`, `log  {"line":"a"}`,
			`totals {"key":"a","total":1} {"key":"a","total":7}`,
		}},
		{"upsert of a new and an existing row", []string{
			`insert into totals values ('z', 1), ('b', 1) on conflict (key) do update set total = total + excluded.total`,
		}, []string{
			`log  {"line":"b"}`,
			`totals {"key":"b","total":2} {"key":"b","total":3}`, `totals  {"key":"z","total":1}`,
		}},
		{"inserted and deleted", []string{`insert into totals values ('z', 1)`, `delete from totals where key = 'z'`}, nil},
		{"deleted and inserted again", []string{`delete from totals`, `insert into totals values ('b', 2), ('a', 1)`}, nil},
		{"changed and changed back", []string{`update parents set name = 'r' where id = 1`, `update parents set name = 'p' where id = 1`}, nil},
		{"all deleted at once", []string{`delete from totals`}, []string{`totals {"key":"a","total":1} `, `totals {"key":"b","total":2} `}},
		{"replaced", []string{`replace into parents values (3, 'q')`}, []string{
			`children {"id":12,"parent":2,"rowid":"z"} `,
			`parents {"id":2,"name":"q"} `, `parents  {"id":3,"name":"q"}`,
		}},
		{"cascade", []string{`delete from parents where id = 1`}, []string{
			`children {"id":10,"parent":1,"rowid":"x"} `, `children {"id":11,"parent":1,"rowid":"y"} `,
			`parents {"id":1,"name":"p"} `,
		}},
		{"key changed", []string{`update totals set key = 'c' where key = 'a'`}, []string{
			`log  {"line":"c"}`,
			`totals {"key":"a","total":1} `, `totals  {"key":"c","total":1}`,
		}},
		{"without rowid", []string{
			`update pairs set v = 'x' where b = 2`, `delete from pairs where b = 1`, `insert into pairs values (null, 10, 'k'), ('n', 9, 'K')`,
			`insert into pairs values ('n', 3, 'b')`, `update pairs set b = 4 where b = 3`,
		}, []string{
			`pairs  {"v":"n","b":9,"a":"K"}`,
			`pairs  {"v":"n","b":4,"a":"b"}`,
			`pairs {"v":"v","b":1,"a":"k"} `, `pairs {"v":"w","b":2,"a":"k"} {"v":"x","b":2,"a":"k"}`,
			`pairs  {"v":null,"b":10,"a":"k"}`,
		}},
		{"without a key", []string{`insert into bare values (1), (1), (2.5), (9e999), (x'00ff'), ('a' || char(0) || 'b')`}, []string{
			`bare  {"x":1}`, `bare  {"x":1}`, `bare  {"x":2.5}`, `bare  {"x":"+Inf"}`, `bare  {"x":"\\x00ff"}`, `bare  {"x":"a\u0000b"}`,
		}},
		{"names, generated columns and times", []string{`insert into "odd ""one" values (x'01', '2026-01-02')`}, []string{
			`odd "one  {"a \"b":"\\x01","twice":2,"at":"2026-01-02"}`,
		}},
		{"created table", []string{`create table made (x primary key) without rowid`, `insert into made values (1)`}, []string{`made  {"x":1}`}},
		{"dropped table", []string{`delete from bare`, `drop table pairs`, `create temp table scratch (x)`, `insert into scratch values (1)`}, nil},
		{"large integers and exact numbers", []string{
			`insert into bare values (9007199254740993), (-9223372036854775808), (0.1), (1e300), (null)`, `insert into numbers values (9007199254740993, 'b'), (9007199254740992, 'a')`,
		}, []string{
			`bare  {"x":9007199254740993}`, `bare  {"x":-9223372036854775808}`, `bare  {"x":0.1}`, `bare  {"x":1.0e+300}`, `bare  {"x":null}`,
			`numbers  {"n":9007199254740992,"x":"a"}`, `numbers  {"n":9007199254740993,"x":"b"}`,
		}},
		{"nulls in a primary key", []string{`update loose set x = 'z' where k is null and x = 'b'`}, []string{`loose {"k":null,"x":"b"} {"k":null,"x":"z"}`}},
		{"rowids of zero and below", []string{`insert into numbers values (0, 'zero'), (-1, 'less')`}, []string{`numbers  {"n":-1,"x":"less"}`, `numbers  {"n":0,"x":"zero"}`}},
		{"another file", []string{`insert into other.far values (1)`}, []string{`other.far  {"x":1}`}},
		{"through a view", []string{`insert into seen values ('v')`}, []string{`bare  {"x":"v"}`}},
		{"a trigger that updates its own table", []string{`update selfs set x = 1 where id = 1`}, []string{`selfs {"id":1,"x":0,"n":0} {"id":1,"x":1,"n":1}`}},
		{"replaced, with a trigger on delete", []string{`replace into selfs values (1, 5, 5)`}, []string{`selfs {"id":1,"x":0,"n":0} {"id":1,"x":5,"n":5}`}},
		{"added column", []string{`update pairs set v = 'x' where b = 2`, `alter table pairs add column n int default 7`, `alter table selfs add column n2 int`, `update selfs set n2 = 1`}, []string{
			`pairs {"v":"v","b":1,"a":"k"} {"v":"v","b":1,"a":"k","n":7}`, `pairs {"v":"w","b":2,"a":"k"} {"v":"x","b":2,"a":"k","n":7}`, `selfs {"id":1,"x":0,"n":0} {"id":1,"x":0,"n":1,"n2":1}`,
		}},
		{"table replaced by another one", []string{`delete from pairs`, `drop table pairs`, `create table pairs (b int primary key) without rowid`, `insert into pairs values (5)`}, []string{
			`pairs  {"b":5}`, `pairs {"v":"v","b":1,"a":"k"} `, `pairs {"v":"w","b":2,"a":"k"} `,
		}},
		{"a key with a NUL", []string{`insert into pairs values ('v', 1, 'k' || char(0) || 'l')`}, []string{`pairs  {"v":"v","b":1,"a":"k\u0000l"}`}},
		{"generated columns without rowid", []string{`insert into made_of (b, a) values ('y', 'x')`}, []string{`made_of  {"both":"xy","b":"y","again":"xy","a":"x"}`}},
	} {
		before := dumpAll(t, db)
		got, err := dryRun(ctx, db, c.run...)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, got, c.name)
		require.Equal(t, before, dumpAll(t, db), c.name)
	}
	_, err := db.Exec(`insert into totals values ('c', 1)`)
	require.NoError(t, err, "the connection is no longer watched")
	got, err := dryRun(ctx, db)
	require.NoError(t, err)
	require.Empty(t, got)
}

// dumpAll returns the schema and the number of rows of each table.
func dumpAll(t *testing.T, db *sql.DB) (all []string) {
	t.Helper()
	rows, err := db.Query(`select name, coalesce(sql, '') from sqlite_schema order by name`)
	require.NoError(t, err)
	defer func() { require.NoError(t, rows.Close()) }()
	for rows.Next() {
		var name, create string
		require.NoError(t, rows.Scan(&name, &create))
		all = append(all, name+create)
	}
	require.NoError(t, rows.Err())
	for _, table := range []string{"totals", "parents", "children", "pairs", "bare", "log", "selfs", "numbers"} {
		all = append(all, fmt.Sprint(table, count(t, db, table)))
	}
	return all
}

func TestDryRunOfTooManyRows(t *testing.T) {
	t.Parallel()
	ctx, db := context.Background(), open(t, nil).SQL()
	const fill = `with recursive n(i) as (select 1 union all select i + 1 from n where i < %d) insert into totals select 'k' || i, i from n`
	got, err := limitedDryRun(ctx, db, 100, fmt.Sprintf(fill, 100))
	require.NoError(t, err)
	require.Len(t, got, 100)
	_, err = limitedDryRun(ctx, db, 100, fmt.Sprintf(fill, 101))
	var e *provider.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []any{provider.ClassPermanent, "too_many_rows"}, []any{e.Class, e.Code})
	require.Equal(t, 0, count(t, db, "totals"))
	_, err = limitedDryRun(ctx, db, 100, fmt.Sprintf(fill, 101), `delete from totals`)
	require.ErrorAs(t, err, &e)
	// A table without rowids is read completely.
	for _, s := range []string{
		`create table whole (k text primary key, n int) without rowid`,
		`with recursive n(i) as (select 1 union all select i + 1 from n where i < 100) insert into whole select 'k' || i, i from n`,
	} {
		_, err := db.Exec(s)
		require.NoError(t, err)
	}
	got, err = limitedDryRun(ctx, db, 100, `update whole set n = 0 where k = 'k7'`)
	require.NoError(t, err)
	require.Equal(t, []string{`whole {"k":"k7","n":7} {"k":"k7","n":0}`}, got)
	_, err = limitedDryRun(ctx, db, 100, `insert into whole values ('a', 1)`)
	require.ErrorAs(t, err, &e)
	require.Equal(t, "too_many_rows", e.Code)
}

func TestDryRunErrors(t *testing.T) {
	t.Parallel()
	ctx, db := context.Background(), open(t, nil).SQL()
	_, err := dryRun(ctx, db, `create table hides (rowid text, oid text, _rowid_ text)`, `insert into hides values ('a', 'b', 'c')`)
	require.ErrorContains(t, err, "columns hide its rowid")
	conn, err := db.Conn(ctx)
	require.NoError(t, err)
	tx, err := conn.BeginTx(ctx, nil)
	require.NoError(t, err)
	stopped, err := sqlite.StartDryRun(ctx, conn, tx)
	require.NoError(t, err)
	stopped.Stop()
	_, err = tx.Exec(`insert into totals values ('a', 1)`)
	require.NoError(t, err)
	changes, err := stopped.Changes(ctx)
	require.NoError(t, err)
	require.Empty(t, changes)
	require.NoError(t, errors.Join(tx.Rollback(), conn.Close()))
	watched, _ := traced(t, 1, nil)
	_, err = dryRun(ctx, watched.SQL(), `insert into totals values ('a', 1)`)
	require.ErrorContains(t, err, "do not report changes")
	_, err = dryRun(ctx, db, `rollback`)
	require.ErrorContains(t, err, "no such savepoint")
	_, err = dryRun(ctx, db, `insert into totals values ('a', 1)`, `rollback to kinora_dry_run`, `release kinora_dry_run`)
	require.ErrorContains(t, err, "no such savepoint")
	require.Equal(t, 0, count(t, db, "totals"))
}
