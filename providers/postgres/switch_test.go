package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// switches runs a unit of generation 2 with Switch, whose handlers do nothing.
func switched(ctx context.Context, db *postgres.DB, s provider.Switch) error {
	return do(ctx, db, in(2, provider.Unit{Projector: "p", Once: true, Switch: &s}), nil)
}

func execAll(t *testing.T, db *postgres.DB, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		_, err := db.Pool().Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
}

// A switch waits at most a second for an open unit of any generation. Then the units behind it go on.
func TestASwitchDoesNotWaitLong(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	end := paused(t, db, in(3, marked("open")), nothing)
	called := false
	s := switchTo(2, 1)
	s.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { called = true; return nil, nil }
	behind := make(chan error, 1)
	for seen := false; !seen; { // a busy machine may not see that it waits
		switching := make(chan error, 1)
		go func() { switching <- do(t.Context(), db, s, nil) }()
		patience.Until(t, func() bool {
			seen = count(t, db, waitingSQL) == 1
			return seen || len(switching) > 0
		}, "the switch to wait")
		if seen {
			go func() { behind <- do(t.Context(), db, marked("behind"), nil) }()
		}
		hasCode(t, provider.CodeBusy, patience.Receive(t, switching, "the switch, although the unit is open"))
	}
	require.NoError(t, <-behind)
	require.False(t, called)
	require.Zero(t, count(t, db, `select count(*) from kinora.generations`))
	s.Projector = "q"
	for i := range s.Switch.Set {
		s.Switch.Set[i].Projector = "q"
	}
	require.NoError(t, do(t.Context(), db, s, nil), "units of other projectors do not matter")
	require.NoError(t, end())
	require.NoError(t, do(t.Context(), db, switchTo(2, 1), nil))
}

// A snapshot sees the store as it was when Last was called, and neither waits for units nor keeps
// them waiting.
func TestASnapshotIsOfOneMoment(t *testing.T) {
	t.Parallel()
	for form, run := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			c := begins(t, db, 5, provider.ModeLive)
			_, err := db.Pool().Exec(t.Context(), `create table other as select 'x' as key, 1::bigint as n`)
			require.NoError(t, err)
			end := paused(t, db, marked("open"), nothing)
			var found []provider.Difference
			s := &provider.Switch{Snapshot: true, Compare: &provider.Comparison{
				Pairs: []provider.TablePair{{Table: "other", Other: "totals"}}, Limit: 10, Found: func(all []provider.Difference) { found = all },
			}}
			s.Last = func(ctx context.Context, live provider.Live) ([]provider.Message, error) {
				u := event(map[string]int64{"e": 6}, "e")
				require.Equal(t, []any{1, int64(5)}, []any{live.Checkpoint.Generation, live.Checkpoint.Place.Position})
				moved := u
				moved.Advance = advance(c, 6)
				require.NoError(t, run(t.Context(), db, moved, "late"))
				require.NoError(t, run(t.Context(), db, event(map[string]int64{"f": 7}, "f"), "late"))
				require.NoError(t, end())
				unapplied, err := live.Unapplied(ctx, event(map[string]int64{"d": 5, "e": 6, "f": 7}, "d", "e", "f").Messages)
				require.NoError(t, err)
				require.Equal(t, []bool{false, true, true}, unapplied)
				return u.Messages, nil
			}
			require.NoError(t, run(t.Context(), db, in(2, provider.Unit{Projector: "p", Once: true, Switch: s}), "own"))
			got := map[string]bool{}
			for _, d := range found {
				got[string(d.Key)+string(d.Got)] = true
			}
			require.Equal(t, map[string]bool{`{"key":"x"}`: true, `{"key":"own"}{"key":"own","n":1}`: true}, got)
			require.Equal(t, 2, count(t, db, `select n from totals where key = 'late'`))
			require.Equal(t, 1, count(t, db, `select count(*) from totals`), "nothing of the unit is left")
			require.Zero(t, count(t, db, `select count(*) from kinora.markers where generation = 2`))
		})
	}
}

// Last decides with what the transaction sees, after the open units have ended.
func TestASwitchAppliesTheLastEvents(t *testing.T) {
	t.Parallel()
	for form, run := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			begins(t, db, 5, provider.ModeLive)
			require.NoError(t, do(t.Context(), db, event(map[string]int64{"f": 7}, "f"), nil))
			all := event(map[string]int64{"d": 5, "e": 6, "f": 7}, "d", "e", "f").Messages
			second := provider.Build{Projector: "p", Generation: 2}
			c := provider.Checkpoint{Mode: provider.ModeCatchUp, Place: provider.LogPlace{Position: 4}}
			ok, err := db.SetCheckpoint(t.Context(), second, provider.Checkpoint{}, c)
			require.NoError(t, err)
			require.True(t, ok)
			u := switchTo(2, 1)
			u.Reader = &provider.Reader{Mode: provider.ModeCatchUp}
			u.Switch.Last = func(ctx context.Context, live provider.Live) (applied []provider.Message, err error) {
				unapplied, err := live.Unapplied(ctx, all)
				for i, m := range all {
					if !unapplied[i] {
						applied = append(applied, m)
					}
				}
				return applied, err
			}
			require.NoError(t, run(t.Context(), db, u, "k"))
			require.Equal(t, 1, count(t, db, `select n from totals where key = 'k'`))
			require.Equal(t, 2, count(t, db, `select count(*) from kinora.markers where generation = 2 and message_id in ('d', 'f')`))
			is, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p"})
			require.NoError(t, err)
			require.Equal(t, second.Generation, is.Generation)
			was, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p", Generation: 1})
			require.NoError(t, err)
			require.Equal(t, provider.ModeCatchUp, was.Mode)
			u = switchTo(1, 2)
			for i := range u.Switch.Set {
				u.Switch.Set[i].Revision = 1
			}
			parked := event(map[string]int64{"e": 6}, "e").Messages
			parked[0].Parked = &provider.Parked{Seq: 1}
			u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return parked, nil }
			require.ErrorIs(t, run(t.Context(), db, u, "k"), provider.ErrInput)
			u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return nil, errBroken }
			require.ErrorIs(t, run(t.Context(), db, u, "k"), errBroken)
			u.Switch.Last = nil
			require.ErrorContains(t, db.Do(t.Context(), u, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
				return provider.Closing{Park: []provider.Aside{{Parked: provider.Parked{MessageID: "m"}}}}, nil
			}), "parked")
			require.NoError(t, run(t.Context(), db, u, "k"))
		})
	}
}

func TestResetEmptiesTables(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create schema s`, `create table s."odd name" (id int primary key)`, `create table child (id int references s."odd name")`,
		`insert into s."odd name" values (1)`, `insert into child values (1)`)
	reset := provider.Switch{Reset: []string{"s.odd name", "child"}}
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
		require.NoError(t, tx.QueryRow(t.Context(), `select count(*) from child`).Scan(nil))
		hasCode(t, provider.CodeBusy, switched(t.Context(), db, reset), "a reader has the table")
		return nil
	}))
	require.Equal(t, 1, count(t, db, `select count(*) from child`))
	require.NoError(t, switched(t.Context(), db, reset))
	require.Zero(t, count(t, db, `select (select count(*) from child) + (select count(*) from s."odd name")`))
	var e *provider.Error
	require.ErrorAs(t, switched(t.Context(), db, provider.Switch{Reset: []string{"none"}}), &e)
	require.Equal(t, "42P01", e.Code)
	require.NotEqual(t, provider.ClassTransient, e.Class, "a retry cannot help")
}

// Those who could read a view or the table in its place still can, also if its columns change.
func TestReadersOfAViewKeepTheirRights(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create role ann`, `create role "b b"`, `create role own superuser`, `create role nobody`, `create schema s`,
		`grant usage on schema s to public`,
		`create table s."R" (id int primary key, n int, note text)`, `insert into s."R" values (1, 1, 'one')`,
		`grant select, insert on s."R" to ann`, `grant select (id, note) on s."R" to "b b" with grant option`,
		`create table s."R2" (id int primary key, n int, note text, more int)`, `insert into s."R2" values (2, 2, 'two', 2)`,
		`create table s."R3" (id bigint primary key, note text)`, `insert into s."R3" values (3, 'three')`)
	may := func(role, right, column string) (ok bool) {
		t.Helper()
		sql := `select has_table_privilege($1, 's."R"', $2)`
		args := []any{role, right}
		if column != "" {
			sql, args = `select has_column_privilege($1, 's."R"', $3, $2)`, append(args, column)
		}
		require.NoError(t, db.Pool().QueryRow(t.Context(), sql, args...).Scan(&ok))
		return ok
	}
	show := func(table string) {
		t.Helper()
		require.NoError(t, switched(t.Context(), db, provider.Switch{
			Rename: []provider.TablePair{{Table: "s.R", Other: "R1"}}, Show: []provider.TablePair{{Table: table, Other: "s.R"}},
		}))
		id := map[string]int{"s.R1": 1, "s.R2": 2, "s.R3": 3}[table]
		require.Equal(t, id, count(t, db, `select id::int from s."R"`))
		require.True(t, may("ann", "select", ""), table)
		require.True(t, may("b b", "select with grant option", "note"), table)
		require.False(t, may("b b", "select", ""), table)
		require.False(t, may("nobody", "select", "id"), table)
	}
	show("s.R2")
	require.False(t, may("ann", "insert", ""), "the view of a table is there to read")
	require.False(t, may("b b", "select", "n"))
	execAll(t, db, `alter view s."R" owner to own`, `alter view s."R" set (security_barrier)`, `grant insert on s."R" to ann`, `grant select (more) on s."R" to "b b"`)
	for i, table := range []string{"s.R3", "s.R2", "s.R1", "s.R2"} { // fewer columns, more columns, fewer, and more at the end
		show(table)
		require.True(t, may("ann", "insert", ""), table)
		require.Equal(t, 1, count(t, db, `select count(*) from pg_class where oid = 's."R"'::regclass and relowner = 'own'::regrole and 'security_barrier=true' = any(reloptions)`), i)
	}
	require.False(t, may("b b", "select", "more"), "the column was not there in between")
	execAll(t, db, `create view reports as select * from s."R"`)
	err := switched(t.Context(), db, provider.Switch{Show: []provider.TablePair{{Table: "s.R3", Other: "s.R"}}})
	var e *pgconn.PgError
	require.ErrorAs(t, err, &e)
	require.Equal(t, "2BP01", e.Code, "another view depends on it")
	require.Equal(t, 2, count(t, db, `select id::int from s."R"`))
	for _, pair := range []provider.TablePair{{Table: "s.R2", Other: "public.R4"}, {Table: "R2", Other: "s.R4"}} {
		require.ErrorIs(t, switched(t.Context(), db, provider.Switch{Rename: []provider.TablePair{pair}}), provider.ErrInput)
	}
}

// A role without rights on the tables gets an error that is not transient, and nothing changes.
func TestASwitchUsesTheRightsOfItsRole(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, script(t, postgres.RolesSQL, "kinora"), script(t, postgres.GrantsSQL, "kinora"), `create table t2 (key text)`, `grant insert on totals to kinora_projector`)
	mine := as(t, db, "kinora_projector")
	for what, s := range map[string]provider.Switch{
		"reset": {Reset: []string{"totals"}}, "rename": {Rename: []provider.TablePair{{Table: "totals", Other: "x"}}},
		"show": {Show: []provider.TablePair{{Table: "t2", Other: "v"}}}, "compare": {Compare: &provider.Comparison{
			Pairs: []provider.TablePair{{Table: "t2", Other: "totals"}}, Limit: 1, Found: func([]provider.Difference) {}}},
	} {
		var e *provider.Error
		require.ErrorAs(t, switched(t.Context(), mine, s), &e, what)
		require.Equal(t, "42501", e.Code, what)
		require.Equal(t, provider.ClassUnknown, e.Class, what)
	}
	require.NoError(t, do(t.Context(), mine, switchTo(2, 1), nil))
}

// The end of the context ends a comparison, and releases its locks.
func TestTheEndOfTheContextEndsASwitch(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create view slow as select key, n, pg_sleep(3600)::text from totals`, `insert into totals values ('k', 1)`)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		asleep(t, db, 1)
	}()
	err := switched(ctx, db, provider.Switch{Compare: &provider.Comparison{
		Pairs: []provider.TablePair{{Table: "totals", Other: "slow"}}, Limit: 1, Found: func([]provider.Difference) {}}})
	require.Equal(t, provider.ClassShutdown, provider.ClassOf(err))
	require.NoError(t, do(t.Context(), db, marked("m"), nil))
}

// A switch that a statement of its handlers breaks changes no table.
func TestAFailedSwitchChangesNothing(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	execAll(t, db, `create table r (id int)`, `insert into r values (1)`, `create table r2 (id int)`)
	u := switchTo(2, 1)
	u.Switch.Reset, u.Switch.Rename = []string{"r"}, []provider.TablePair{{Table: "r", Other: "r1"}}
	u.Switch.Show = []provider.TablePair{{Table: "r2", Other: "r"}}
	require.ErrorIs(t, db.Do(t.Context(), u, func(ctx context.Context, tx pgx.Tx, _ provider.Found) (provider.Closing, error) {
		return provider.Closing{}, errors.Join(add(ctx, tx, "k", 1), errBroken)
	}), errBroken)
	require.Error(t, db.Batched().Do(t.Context(), u, func(_ context.Context, b *pgx.Batch, _ provider.Found) (provider.Closing, error) {
		b.Queue(addSQL, "k", 1)
		b.Queue(`select 1 / 0`)
		return provider.Closing{}, nil
	}))
	u.Switch.Show = append(u.Switch.Show, provider.TablePair{Table: "none", Other: strings.Repeat("x", 60)})
	require.Error(t, do(t.Context(), db, u, nil))
	require.Equal(t, 1, count(t, db, `select id from r`))
	require.Zero(t, count(t, db, fmt.Sprintf(`select (select count(*) from totals) + (select count(*) from kinora.generations) + (select count(*) from pg_class where relname in ('r1', '%s'))`, strings.Repeat("x", 60))))
}

// A handler that names the view instead of the table of its generation would write the live rows.
func TestTheViewOfAReadModelCannotBeWritten(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, `create table a_g1 (n int); create table a_g2 (n int, m int); insert into a_g1 values (1); insert into a_g2 values (2, 3)`)
	for _, table := range []string{"a_g1", "a_g1", "a_g2"} {
		show := provider.Unit{Projector: "p", Once: true, Switch: &provider.Switch{Show: []provider.TablePair{{Table: table, Other: "a"}}}}
		require.NoError(t, db.Do(t.Context(), show, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{}, nil
		}))
		for _, sql := range []string{`insert into a values (7)`, `update a set n = 7`, `delete from a`} {
			_, err := db.Pool().Exec(t.Context(), sql)
			require.ErrorContains(t, err, "projector.Table", sql)
		}
	}
}
