package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// rehearsed is what a unit of these statements would change, as "table before after". It leaves nothing.
func rehearsed(t *testing.T, db *sqlite.DB, statements ...string) (got []string) {
	t.Helper()
	w := marks("rehearsed")
	w.Fresh = func(int) { t.Error("nothing is committed") }
	w.Rehearse = func(changes []projector.Change) {
		for _, c := range changes {
			got = append(got, fmt.Sprintf("%s %s %s", c.Table, c.Before, c.After))
		}
	}
	err := db.Do(context.Background(), w, func(ctx context.Context, tx *sql.Tx, fresh []int) ([]outbox.Message, error) {
		require.Equal(t, []int{0}, fresh)
		for _, s := range statements {
			if _, err := tx.ExecContext(ctx, s); err != nil {
				return nil, err
			}
		}
		return []outbox.Message{{Topic: "review"}}, nil
	})
	require.NoError(t, err)
	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))
	require.Equal(t, 0, count(t, db.SQL(), "kinora_outbox"))
	return got
}

func TestRehearsal(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for _, s := range []string{
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
	} {
		_, err := db.SQL().Exec(s)
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
		{"upsert of a new row and of an old", []string{
			`insert into totals values ('z', 1), ('b', 1) on conflict (key) do update set total = total + excluded.total`,
		}, []string{
			`log  {"line":"b"}`,
			`totals {"key":"b","total":2} {"key":"b","total":3}`, `totals  {"key":"z","total":1}`,
		}},
		{"inserted and deleted", []string{`insert into totals values ('z', 1)`, `delete from totals where key = 'z'`}, nil},
		{"deleted and put back", []string{`delete from totals`, `insert into totals values ('b', 2), ('a', 1)`}, nil},
		{"changed, and as it was", []string{`update parents set name = 'r' where id = 1`, `update parents set name = 'p' where id = 1`}, nil},
		{"all deleted at once", []string{`delete from totals`}, []string{`totals {"key":"a","total":1} `, `totals {"key":"b","total":2} `}},
		{"replaced", []string{`replace into parents values (3, 'q')`}, []string{
			`children {"id":12,"parent":2,"rowid":"z"} `,
			`parents {"id":2,"name":"q"} `, `parents  {"id":3,"name":"q"}`,
		}},
		{"cascade", []string{`delete from parents where id = 1`}, []string{
			`children {"id":10,"parent":1,"rowid":"x"} `, `children {"id":11,"parent":1,"rowid":"y"} `,
			`parents {"id":1,"name":"p"} `,
		}},
		{"another key", []string{`update totals set key = 'c' where key = 'a'`}, []string{
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
		{"a table of its own", []string{`create table made (x primary key) without rowid`, `insert into made values (1)`}, []string{`made  {"x":1}`}},
		{"a table that goes", []string{`delete from bare`, `drop table pairs`, `create temp table scratch (x)`, `insert into scratch values (1)`}, nil},
	} {
		require.Equal(t, c.want, rehearsed(t, db, c.run...), c.name)
	}
	require.NoError(t, db.Do(context.Background(), marks("m1"), adds("a")), "and all goes on")
	require.Equal(t, 2, total(t, db.SQL(), "a"))
}

// What fails is not told, and a handler cannot end a rehearsal's transaction either.
func TestRehearsalThatFails(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for name, run := range map[string]handlerFunc{
		"fails":           func(context.Context, *sql.Tx, []int) ([]message, error) { return nil, sql.ErrNoRows },
		"invalid message": func(context.Context, *sql.Tx, []int) ([]message, error) { return []message{{}}, nil },
		"commit":          func(_ context.Context, tx *sql.Tx, _ []int) ([]message, error) { _ = tx.Commit(); return nil, nil },
		"sql commit": func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			_, _ = tx.ExecContext(ctx, `commit`)
			return nil, nil
		},
		"sql rollback, and on": func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			_, _ = tx.ExecContext(ctx, `rollback`)
			return adds("p1")(ctx, tx, nil)
		},
	} {
		w := marks("m1")
		w.Rehearse = func([]projector.Change) { t.Error(name) }
		err := db.Do(context.Background(), w, func(ctx context.Context, tx *sql.Tx, fresh []int) ([]message, error) {
			_, err := adds("p1")(ctx, tx, fresh)
			require.NoError(t, err)
			return run(ctx, tx, fresh)
		})
		var e *projector.Error
		require.ErrorAs(t, err, &e, name)
		requireNothing(t, db)
	}
	require.Equal(t, []string{`totals  {"key":"p1","total":1}`}, rehearsed(t, db, `insert into totals values ('p1', 1)`))
}

func TestRehearsalOnAPoolOfTheCallers(t *testing.T) {
	t.Parallel()
	db, _ := traced(t, 1, nil)
	require.False(t, db.Records().Rehearse)
	w := marks("m1")
	w.Rehearse = func([]projector.Change) {}
	requireClass(t, db.Do(context.Background(), w, adds("p1")), "permanent", "")
	requireNothing(t, db)
}
