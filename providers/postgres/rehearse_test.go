package postgres_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// rehearsed is what a rehearsal of these statements tells, as "table before after".
func rehearsed(t *testing.T, db *postgres.DB, statements ...string) []string {
	t.Helper()
	told, err := tryRehearsal(t, db, statements...)
	require.NoError(t, err)
	return told
}

func tryRehearsal(t *testing.T, db *postgres.DB, statements ...string) (told []string, err error) {
	t.Helper()
	w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "rehearsed"}},
		Fresh: func(int) { t.Error("Fresh was told") },
		Rehearse: func(changes []projector.Change) {
			for _, c := range changes {
				told = append(told, said(c))
			}
		}}
	err = db.Do(t.Context(), w, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return nil, fmt.Errorf("%s: %w", sql, err)
			}
		}
		return []outbox.Message{{Topic: "t"}}, nil
	})
	require.Zero(t, count(t, db, `select count(*) from kinora.markers where message_id = 'rehearsed'`))
	require.Zero(t, count(t, db, `select count(*) from kinora.outbox`))
	return told, err
}

// said is a change with its values only.
func said(c projector.Change) string {
	values := func(row json.RawMessage) string {
		if row == nil {
			return "-"
		}
		var columns map[string]any
		if err := json.Unmarshal(row, &columns); err != nil {
			return err.Error()
		}
		return fmt.Sprint(columns)[len("map"):]
	}
	return c.Table + " " + values(c.Before) + " " + values(c.After)
}

const rehearsalTables = `
create table nums (id int primary key, n int, twice int generated always as (n * 2) stored);
insert into nums select g, g from generate_series(1, 12) g;
create table bare (x text);
create table parents (id int primary key, n int);
create table heirs () inherits (parents);
insert into parents values (1, 1);
insert into heirs values (1, 2), (2, 2), (3, 2);
create table times (id int primary key, at timestamptz, n int);
insert into times values (1, '2000-01-01 00:00Z', 1);
insert into bare values ('a'), ('a'), ('b');
create schema other;
create table other.pairs (a text, b int, n int, primary key (b, a));
insert into other.pairs values ('x', 1, 1), ('y', 1, 2), ('x', 2, 3);
create table children (id int primary key, parent int references nums on delete cascade);
insert into children values (1, 12);
create table log (id bigint generated always as identity primary key, what text);
create function logged() returns trigger language plpgsql as $$
begin insert into log (what) values (tg_op); return null; end $$;
create constraint trigger logged after insert or update or delete on other.pairs deferrable initially deferred
	for each row execute function logged()`

func TestARehearsalTellsExactlyTheRowsThatChange(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, rehearsalTables)
	for name, c := range map[string]struct{ do, want []string }{
		"nothing": {},
		"inserted, changed, deleted": {
			[]string{`insert into nums values (20, 0), (13, 1)`, `update nums set n = 0 where id in (10, 9)`, `delete from nums where id = 3`},
			[]string{
				"nums [id:3 n:3 twice:6] -", "nums [id:9 n:9 twice:18] [id:9 n:0 twice:0]", "nums [id:10 n:10 twice:20] [id:10 n:0 twice:0]",
				"nums - [id:13 n:1 twice:2]", "nums - [id:20 n:0 twice:0]"}},
		"changed twice, and to what it was": {
			[]string{`update nums set n = 7 where id = 1`, `update nums set n = 8 where id = 1`, `update nums set n = 0 where id = 2`, `update nums set n = 2 where id = 2`, `update nums set n = n where id = 5`},
			[]string{"nums [id:1 n:1 twice:2] [id:1 n:8 twice:16]"}},
		"inserted and deleted; deleted and inserted": {
			[]string{`insert into nums values (30, 0)`, `delete from nums where id in (30, 4, 5)`, `insert into nums values (4, 4), (5, 6)`},
			[]string{"nums [id:5 n:5 twice:10] [id:5 n:6 twice:12]"}},
		"upserts": {
			[]string{`insert into nums values (1, 100), (40, 1) on conflict (id) do update set n = excluded.n`},
			[]string{"nums [id:1 n:1 twice:2] [id:1 n:100 twice:200]", "nums - [id:40 n:1 twice:2]"}},
		"other keys": {
			[]string{`update nums set id = 50 where id = 1`, `delete from nums where id = 2`},
			[]string{"nums [id:1 n:1 twice:2] -", "nums [id:2 n:2 twice:4] -", "nums - [id:50 n:1 twice:2]"}},
		"locked only": {do: []string{`select from nums for update`, `select from bare for update`}},
		"savepoints": {
			[]string{`savepoint a`, `update nums set n = 0 where id = 1`, `delete from nums where id = 2`, `release savepoint a`,
				`savepoint b`, `update nums set n = 0 where id = 3`, `delete from nums where id = 4`, `insert into nums values (60, 0)`, `rollback to savepoint b`,
				`savepoint c`, `update nums set n = 0 where id = 5`, `savepoint d`, `delete from nums where id = 6`},
			[]string{"nums [id:1 n:1 twice:2] [id:1 n:0 twice:0]", "nums [id:2 n:2 twice:4] -", "nums [id:5 n:5 twice:10] [id:5 n:0 twice:0]", "nums [id:6 n:6 twice:12] -"}},
		"a table without a key": {
			[]string{`insert into bare values ('c'), ('d'), ('b')`, `delete from bare where x = 'd'`, `update bare set x = 'z' where ctid = '(0,1)'`},
			[]string{"bare [x:a] -", "bare - [x:b]", "bare - [x:c]", "bare - [x:z]"}},
		"no key, deleted and inserted": {do: []string{`delete from bare`, `insert into bare values ('a'), ('b'), ('a')`}},
		"triggers, cascades, other schemas": {
			[]string{`delete from nums where id = 12`, `update other.pairs set n = 0 where b = 1`},
			[]string{"children [id:1 parent:12] -", "log - [id:1 what:UPDATE]", "log - [id:2 what:UPDATE]", "nums [id:12 n:12 twice:24] -",
				"other.pairs [a:x b:1 n:1] [a:x b:1 n:0]", "other.pairs [a:y b:1 n:2] [a:y b:1 n:0]"}},
		"heirs are told as such": {
			[]string{`delete from only parents`, `update heirs set n = 3 where id = 1`},
			[]string{"heirs [id:1 n:2] -", "heirs - [id:1 n:3]", "parents [id:1 n:1] -"}},
		"heirs, through what they inherit": {
			[]string{`update parents set n = n + 1 where id = 1`},
			[]string{"heirs [id:1 n:2] -", "heirs - [id:1 n:3]", "parents [id:1 n:1] [id:1 n:2]"}},
		"times are as the handler has them": {
			[]string{`set local timezone = 'Asia/Tokyo'`, `update times set at = at`, `insert into times values (2, '2000-01-01 00:00Z', 2)`},
			[]string{"times - [at:2000-01-01T09:00:00+09:00 id:2 n:2]"}},
		"a table of its own": {
			[]string{`create table made (x int)`, `insert into made values (1), (2)`, `delete from made where x = 1`, `create temp table short (x int) on commit drop`, `insert into short values (1)`},
			[]string{"made - [x:2]"}},
	} {
		t.Run(name, func(t *testing.T) {
			// Identities are not undone, so that these follow one another.
			_, err := db.Pool().Exec(t.Context(), `alter sequence log_id_seq restart`)
			require.NoError(t, err)
			require.Equal(t, c.want, rehearsed(t, db, c.do...))
			require.Equal(t, 12, count(t, db, `select count(*) from nums`))
			require.Equal(t, 78, count(t, db, `select sum(n) from nums`))
		})
	}
}

// A row's deleter does not stand in it where others have it locked as well.
func TestARehearsalBesideLockers(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, rehearsalTables)
	for _, sql := range []string{`select from nums where id in (7, 8) for key share`, `select from bare for key share`} {
		tx, err := db.Pool().Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	require.Equal(t, []string{
		"bare [x:a] -", "bare [x:a] -", "bare [x:b] -", "bare - [x:y]", "bare - [x:y]", "bare - [x:y]",
		"nums [id:7 n:7 twice:14] [id:7 n:0 twice:0]",
	}, rehearsed(t, db, `update nums set n = 0 where id = 7`, `update bare set x = 'y'`))
	// What holds the lock is itself in a multixact once it is gone.
	parent, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	_, err = parent.Exec(t.Context(), `select from nums where id = 9 for key share`)
	require.NoError(t, err)
	w := projector.Work{Projector: "p", Rehearse: func(changes []projector.Change) {
		require.Len(t, changes, 1)
		require.Equal(t, "nums [id:9 n:9 twice:18] -", said(changes[0]))
	}}
	require.NoError(t, db.Do(t.Context(), w, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
		if _, err := tx.Exec(ctx, `select from nums where id = 9 for key share`); err != nil {
			return nil, err
		}
		if err := parent.Rollback(ctx); err != nil {
			return nil, err
		}
		_, err := tx.Exec(ctx, `delete from nums where id = 9`)
		return nil, err
	}))
}

func TestARehearsalOfWhatCannotBeSeenIsRefused(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, rehearsalTables)
	_, err := tryRehearsal(t, db, `truncate children`)
	var e *projector.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []any{projector.PermanentClass, "locked"}, []any{e.Class, e.Code}, "%v", err)
	_, err = tryRehearsal(t, db, `select 1/0`)
	require.Equal(t, projector.PermanentClass, projector.ClassOf(err))
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&track_counts=off")
	require.NoError(t, err)
	defer pool.Close()
	off, err := postgres.New(pool, nil)
	require.NoError(t, err)
	_, err = tryRehearsal(t, off)
	require.ErrorContains(t, err, "track_counts")
	require.Equal(t, projector.PermanentClass, projector.ClassOf(err))
}

func TestARehearsalRefusesRowsThatItMayNotSee(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, rehearsalTables, postgres.RolesSQL("kinora"), `
alter table parents enable row level security; create policy most on parents using (id > 1);
grant all on all tables in schema public to kinora_projector`, postgres.GrantsSQL("kinora"))
	_, err := tryRehearsal(t, db, `delete from only parents`)
	require.NoError(t, err, "nothing is hidden from a superuser")
	_, err = tryRehearsal(t, db, `set local role kinora_projector`, `insert into parents values (9, 9)`)
	var e *projector.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []any{projector.PermanentClass, "row_security"}, []any{e.Class, e.Code}, "%v", err)
}

// Somebody who waits for the handler's lock is before the look from outside.
func TestARehearsalDoesNotWaitForWhatWaitsForIt(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, rehearsalTables)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	altered := make(chan error, 1)
	w := projector.Work{Projector: "p", Rehearse: func([]projector.Change) {}}
	err := db.Do(ctx, w, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
		_, err := tx.Exec(ctx, `update nums set n = 0`)
		go func() {
			_, err := db.Pool().Exec(t.Context(), `alter table nums add column more int`)
			altered <- err
		}()
		blocked(t, db)
		return nil, err
	})
	require.Equal(t, projector.Transient, projector.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "55P03")
	require.NoError(t, <-altered)
}

// The look from outside has a connection of its own.
func TestARehearsalWithAPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, rehearsalTables)
	pool, err := pgxpool.New(t.Context(), dsn+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for range 2 {
		require.Equal(t, []string{"bare [x:b] -"}, rehearsed(t, db, `delete from bare where x = 'b'`))
	}
	var told []projector.Change
	require.NoError(t, db.Batched().Do(t.Context(), projector.Work{Projector: "p", Rehearse: func(c []projector.Change) { told = c }},
		func(_ context.Context, b *pgx.Batch, _ []int) ([]outbox.Message, error) {
			b.Queue(`delete from bare where x = 'b'`)
			return nil, nil
		}))
	require.Len(t, told, 1)
	require.Equal(t, 3, count(t, db, `select count(*) from bare`))
}
