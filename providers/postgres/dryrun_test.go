package postgres_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// dryRun runs statements in a transaction, rolls it back, and returns the changes as "table
// before after".
func dryRun(ctx context.Context, db *postgres.DB, statements ...string) ([]string, error) {
	return dryRunOf(ctx, db, func(tx pgx.Tx) error {
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
		return nil
	})
}

func dryRunOf(ctx context.Context, db *postgres.DB, do func(pgx.Tx) error) ([]string, error) {
	d, err := db.BeginDryRun(ctx)
	if err != nil {
		return nil, err
	}
	defer d.End(ctx)
	tx, err := db.Pool().Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if err := do(tx); err != nil {
		return nil, err
	}
	changes, err := d.Changes(ctx, tx)
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, c := range changes {
		lines = append(lines, c.Table+" "+columns(c.Before)+" "+columns(c.After))
	}
	return lines, nil
}

// columns formats a row in the order of its column names.
func columns(row json.RawMessage) string {
	if row == nil {
		return "-"
	}
	var columns map[string]any
	d := json.NewDecoder(bytes.NewReader(row))
	d.UseNumber()
	if err := d.Decode(&columns); err != nil {
		return err.Error()
	}
	return fmt.Sprint(columns)[len("map"):]
}

const dryRunTables = `
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
	for each row execute function logged();
create table parts (id int primary key, n int) partition by range (id);
create table parts_a partition of parts for values from (0) to (10);
create table parts_b partition of parts for values from (10) to (20);
insert into parts values (2, 2);
create table amounts (id int primary key, n numeric);
insert into amounts values (1, 1.0)`

func TestDryRun(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables)
	for name, c := range map[string]struct{ do, want []string }{
		"nothing": {},
		"inserted, changed, deleted": {
			[]string{`insert into nums values (20, 0), (13, 1)`, `update nums set n = 0 where id in (10, 9)`, `delete from nums where id = 3`},
			[]string{
				"nums [id:3 n:3 twice:6] -", "nums [id:9 n:9 twice:18] [id:9 n:0 twice:0]", "nums [id:10 n:10 twice:20] [id:10 n:0 twice:0]",
				"nums - [id:13 n:1 twice:2]", "nums - [id:20 n:0 twice:0]"}},
		"changed twice, and changed back": {
			[]string{`update nums set n = 7 where id = 1`, `update nums set n = 8 where id = 1`, `update nums set n = 0 where id = 2`, `update nums set n = 2 where id = 2`, `update nums set n = n where id = 5`},
			[]string{"nums [id:1 n:1 twice:2] [id:1 n:8 twice:16]"}},
		"inserted and deleted; deleted and inserted": {
			[]string{`insert into nums values (30, 0)`, `delete from nums where id in (30, 4, 5)`, `insert into nums values (4, 4), (5, 6)`},
			[]string{"nums [id:5 n:5 twice:10] [id:5 n:6 twice:12]"}},
		"upserts": {
			[]string{`insert into nums values (1, 100), (40, 1) on conflict (id) do update set n = excluded.n`},
			[]string{"nums [id:1 n:1 twice:2] [id:1 n:100 twice:200]", "nums - [id:40 n:1 twice:2]"}},
		"changed keys": {
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
		"tables that inherit": {
			[]string{`delete from only parents`, `update heirs set n = 3 where id = 1`},
			[]string{"heirs [id:1 n:2] -", "heirs - [id:1 n:3]", "parents [id:1 n:1] -"}},
		"tables that inherit, changed through their parent": {
			[]string{`update parents set n = n + 1 where id = 1`},
			[]string{"heirs [id:1 n:2] -", "heirs - [id:1 n:3]", "parents [id:1 n:1] [id:1 n:2]"}},
		"times are in UTC": {
			[]string{`set local timezone = 'Asia/Tokyo'`, `update times set at = at`, `insert into times values (2, '2000-01-01 00:00Z', 2)`},
			[]string{"times - [at:2000-01-01T00:00:00+00:00 id:2 n:2]"}},
		"tables of the transaction": {
			[]string{`create table made (x int)`, `insert into made values (1), (2)`, `delete from made where x = 1`, `create temp table short (x int) on commit drop`, `insert into short values (1)`},
			[]string{"made - [x:2]"}},
		"locked, then changed in a savepoint": {
			[]string{`select from nums where id in (1, 2) for update`, `savepoint a`, `delete from nums where id = 1`, `update nums set id = 51 where id = 2`},
			[]string{"nums [id:1 n:1 twice:2] -", "nums [id:2 n:2 twice:4] -", "nums - [id:51 n:2 twice:4]"}},
		"partitions": {
			[]string{`insert into parts values (1, 1), (11, 1)`, `update parts set id = 12 where id = 2`},
			[]string{"parts_a - [id:1 n:1]", "parts_a [id:2 n:2] -", "parts_b - [id:11 n:1]", "parts_b - [id:12 n:2]"}},
		"scale of a number": {[]string{`update amounts set n = 1.00`}, []string{"amounts [id:1 n:1.0] [id:1 n:1.00]"}},
	} {
		t.Run(name, func(t *testing.T) {
			// A sequence does not roll back.
			_, err := db.Pool().Exec(t.Context(), `alter sequence log_id_seq restart`)
			require.NoError(t, err)
			got, err := dryRun(t.Context(), db, c.do...)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
			require.Equal(t, 12, count(t, db, `select count(*) from nums`))
			require.Equal(t, 78, count(t, db, `select sum(n) from nums`))
		})
	}
}

// If others have locked a row too, its version does not name the transaction that changed it.
func TestDryRunOfRowsThatOthersLock(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables)
	for _, sql := range []string{`select from nums where id in (7, 8) for key share`, `select from bare for key share`} {
		tx, err := db.Pool().Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	got, err := dryRun(t.Context(), db, `update nums set n = 0 where id = 7`, `update bare set x = 'y'`)
	require.NoError(t, err)
	require.Equal(t, []string{
		"bare [x:a] -", "bare [x:a] -", "bare [x:b] -", "bare - [x:y]", "bare - [x:y]", "bare - [x:y]",
		"nums [id:7 n:7 twice:14] [id:7 n:0 twice:0]",
	}, got)
	// The other lock may be released before the row is deleted.
	parent, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	_, err = parent.Exec(t.Context(), `select from nums where id = 9 for key share`)
	require.NoError(t, err)
	got, err = dryRunOf(t.Context(), db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `select from nums where id = 9 for key share`); err != nil {
			return err
		}
		if err := parent.Rollback(t.Context()); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), `delete from nums where id = 9`)
		return err
	})
	require.NoError(t, err)
	require.Equal(t, []string{"nums [id:9 n:9 twice:18] -"}, got)
}

// Commits of others during the transaction are not part of its changes.
func TestDryRunDoesNotShowChangesOfOthers(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables)
	others := func() error {
		_, err := db.Pool().Exec(t.Context(), `delete from nums where id = 1; update nums set n = -n where id > 5; update bare set x = x || 'x'`)
		return err
	}
	got, err := dryRunOf(t.Context(), db, func(tx pgx.Tx) error {
		if err := others(); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), `update nums set n = 0 where id in (2, 6); insert into nums values (1, 0); insert into bare values ('c')`)
		return err
	})
	require.NoError(t, err)
	require.Equal(t, []string{
		"bare - [x:c]", "nums - [id:1 n:0 twice:0]", "nums [id:2 n:2 twice:4] [id:2 n:0 twice:0]", "nums [id:6 n:-6 twice:-12] [id:6 n:0 twice:0]",
	}, got)
	var writers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		writers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_ = others() // they may conflict with each other
				}
			}
		})
	}
	for range 20 {
		if got, err = dryRun(t.Context(), db, `insert into nums values (70, 0)`, `insert into bare values ('c')`); err != nil {
			break
		}
		require.Equal(t, []string{"bare - [x:c]", "nums - [id:70 n:0 twice:0]"}, got)
	}
	close(stop)
	writers.Wait()
	require.NoError(t, err)
}

func requireRefused(t *testing.T, err error, code string) {
	t.Helper()
	var e *provider.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []any{provider.ClassPermanent, code}, []any{e.Class, e.Code}, "%v", err)
}

func TestDryRunRefusesWhatItCannotSee(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables)
	for _, sql := range []string{`truncate children`, `drop table children`, `alter table bare add y int`, `lock table parts`} {
		_, err := dryRun(t.Context(), db, sql)
		requireRefused(t, err, "locked")
	}
	_, err := dryRun(t.Context(), db, `insert into bare select g::text from generate_series(1, 100001) g`)
	requireRefused(t, err, "too_many_rows")
	got, err := dryRun(t.Context(), db, `insert into bare select g::text from generate_series(1, 100000) g`)
	require.NoError(t, err)
	require.Len(t, got, 100_000)
}

func TestDryRunRefusesRowSecurity(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables, script(t, postgres.RolesSQL, "kinora"), `
alter table parents enable row level security; create policy most on parents using (id > 1);
grant all on all tables in schema public to kinora_projector`, script(t, postgres.GrantsSQL, "kinora"))
	got, err := dryRun(t.Context(), db, `delete from only parents`)
	require.NoError(t, err)
	require.Equal(t, []string{"parents [id:1 n:1] -"}, got, "a superuser sees all rows")
	_, err = dryRun(t.Context(), db, `set local role kinora_projector`, `insert into parents values (9, 9)`)
	requireRefused(t, err, "row_security")
}

// A statement that waits for the transaction's lock is ahead of the dry run's own statements.
func TestDryRunDoesNotWaitForALock(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, dryRunTables)
	ctx := patience.Context(t)
	altered := make(chan error, 1)
	_, err := dryRunOf(ctx, db, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `update nums set n = 0`)
		go func() {
			_, err := db.Pool().Exec(t.Context(), `alter table nums add column more int`)
			altered <- err
		}()
		waiting(t, db, 1)
		return err
	})
	require.ErrorContains(t, err, "55P03")
	require.NoError(t, <-altered)
}

// A dry run has a separate connection, and tables of the service may have any name.
func TestDryRunWithAPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, dryRunTables, `create schema "odd ""one"; create table "odd ""one"."t%s" ("a ""b" text primary key, "%d" bytea)`)
	pool, err := pgxpool.New(t.Context(), dsn+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for range 2 {
		got, err := dryRun(t.Context(), db, `delete from bare where x = 'b'`, `insert into "odd ""one"."t%s" values ('it''s', '\x00ff')`,
			`insert into kinora.low_water_marks (handler, pruned_before) values ('p/a', now())`)
		require.NoError(t, err)
		require.Equal(t, []string{"bare [x:b] -", `odd "one.t%s - [%d:\x00ff a "b:it's]`}, got)
	}
}
