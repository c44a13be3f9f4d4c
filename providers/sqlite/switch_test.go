package sqlite_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func build(number int, state provider.GenerationState) provider.Generation {
	return provider.Generation{Build: provider.Build{Projector: "totals", Generation: number}, State: state}
}

// switching returns a unit of generation 2 of totals that stores set.
func switching(set ...provider.Generation) provider.Unit {
	return provider.Unit{Projector: "totals", Generation: 2, Once: true, Switch: &provider.Switch{Set: set}}
}

// doSwitch runs a unit with Switch, and query in its handler.
func doSwitch(t *testing.T, db *sqlite.DB, s provider.Switch, query string) error {
	t.Helper()
	u := switching()
	u.Switch = &s
	return db.Do(t.Context(), u, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
		_, err := tx.ExecContext(ctx, query)
		return provider.Closing{}, err
	})
}

func mustExec(t *testing.T, db *sqlite.DB, query string) {
	t.Helper()
	_, err := db.SQL().Exec(query)
	require.NoError(t, err)
}

// text returns the first column of a query's rows.
func text(t *testing.T, db *sqlite.DB, query string) (all []string) {
	t.Helper()
	rows, err := db.SQL().Query(query)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var v string
		require.NoError(t, rows.Scan(&v))
		all = append(all, v)
	}
	require.NoError(t, rows.Err())
	return all
}

// Tables are renamed, a view takes the name of one, and both are in one transaction with the
// handler. Other connections see it.
func TestAViewTakesTheNameOfATable(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	mustExec(t, db, `create table "the ratings" (k text primary key); insert into "the ratings" values ('old'); create view mine as select k from "the ratings"`)
	s := provider.Switch{
		Rename: []provider.TablePair{{Table: "the ratings", Other: "ratings_g1"}, {Table: "none", Other: "other"}},
		Show:   []provider.TablePair{{Table: "ratings_g2", Other: "the ratings"}},
	}
	create := `create table if not exists ratings_g2 (k text primary key); insert or ignore into ratings_g2 values ('new')`
	require.ErrorContains(t, doSwitch(t, db, provider.Switch{Show: s.Show}, create), "show ratings_g2: ")
	require.Empty(t, text(t, db, `select name from pragma_table_list where name = 'ratings_g2'`), "it was rolled back")
	for range 2 {
		require.NoError(t, doSwitch(t, db, s, create))
		require.Equal(t, []string{"new"}, text(t, db, `select k from "the ratings"`))
		require.Equal(t, []string{"old"}, text(t, db, `select k from mine`), "the view shows the table under its new name")
	}
	back := provider.Switch{Show: []provider.TablePair{{Table: "main.ratings_g1", Other: "main.the ratings"}}}
	require.NoError(t, doSwitch(t, db, back, ""))
	require.Equal(t, []string{"old"}, text(t, db, `select k from "the ratings"`))
	require.ErrorIs(t, doSwitch(t, db, provider.Switch{Rename: []provider.TablePair{{Table: "main.ratings_g1", Other: "temp.x"}}}, ""), provider.ErrInput)
}

// Reset empties tables that refer to each other, in any order.
func TestResetTablesWithForeignKeys(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	mustExec(t, db, `create table parents (id integer primary key); create table children (parent integer not null references parents);
		insert into parents values (1); insert into children values (1)`)
	require.NoError(t, doSwitch(t, db, provider.Switch{Reset: []string{"parents", "children"}}, `insert into children values (2); insert into parents values (2)`))
	require.Equal(t, []string{"2"}, text(t, db, `select parent from children`))
	require.Equal(t, provider.CodeReferenced, provider.CodeOf(doSwitch(t, db, provider.Switch{Reset: []string{"parents"}}, "")))
	require.ErrorContains(t, doSwitch(t, db, provider.Switch{Reset: []string{"none"}}, ""), "reset none: ")
}

// differences returns what a comparison finds, as "table key: want <- got".
func differences(t *testing.T, db *sqlite.DB, c provider.Comparison) (found []provider.Difference, all []string) {
	t.Helper()
	c.Found = func(differences []provider.Difference) { found = differences }
	require.NoError(t, doSwitch(t, db, provider.Switch{Compare: &c}, ""))
	for _, d := range found {
		all = append(all, d.Table+" "+string(d.Key)+": "+string(d.Want)+" <- "+string(d.Got))
	}
	return found, all
}

// requireRepaired requires that a repair leaves no differences.
func requireRepaired(t *testing.T, db *sqlite.DB, c provider.Comparison) {
	t.Helper()
	found, before := differences(t, db, c)
	require.NotEmpty(t, found)
	c.Repair, c.Only = true, append(found, found...)
	_, repaired := differences(t, db, c)
	require.Equal(t, before, repaired)
	_, repaired = differences(t, db, c)
	require.Empty(t, repaired)
	c.Repair, c.Only = false, nil
	_, left := differences(t, db, c)
	require.Empty(t, left)
}

func TestCompareAndRepairRows(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for _, table := range []string{"right_one", "wrong"} {
		mustExec(t, db, `create table `+table+` (
			a text, b blob, n any, "the ""n" real as (n * 2) stored, at integer, extra_`+table+` text default 'mine',
			primary key (b, a), unique (n)) strict`)
	}
	mustExec(t, db, `
insert into right_one (a, b, n, at) values ('same', x'00', 1, 1), ('x', x'01', 2.5, 2), ('y', x'01', null, 3), ('\x02', x'02', x'ff', 4), ('z', x'03', 7, 5);
insert into wrong (a, b, n, at) values ('same', x'00', 1, 9), ('x', x'01', '2.5', 2), ('\x02', x'02', x'fe', 4), ('extra', x'05', 7, 5);
insert into wrong (a, b, n, at, extra_wrong) values ('z', x'03', 8, 6, 'kept')`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "right_one", Other: "wrong"}}, Ignore: []string{"at"}, Limit: 10}
	want := []string{
		`wrong {"b":"\\x01","a":"x"}: {"a":"x","b":"\\x01","n":2.5,"the \"n":5.0,"at":2} <- {"a":"x","b":"\\x01","n":"2.5","the \"n":5.0,"at":2}`,
		`wrong {"b":"\\x01","a":"y"}: {"a":"y","b":"\\x01","n":null,"the \"n":null,"at":3} <- `,
		`wrong {"b":"\\x02","a":"\\x02"}: {"a":"\\x02","b":"\\x02","n":"\\xff","the \"n":0.0,"at":4} <- {"a":"\\x02","b":"\\x02","n":"\\xfe","the \"n":0.0,"at":4}`,
		`wrong {"b":"\\x03","a":"z"}: {"a":"z","b":"\\x03","n":7,"the \"n":14.0,"at":5} <- {"a":"z","b":"\\x03","n":8,"the \"n":16.0,"at":6}`,
		`wrong {"b":"\\x05","a":"extra"}:  <- {"a":"extra","b":"\\x05","n":7,"the \"n":14.0,"at":5}`,
	}
	_, found := differences(t, db, c)
	require.Equal(t, want, found)
	for limit := range 5 {
		few := c
		few.Limit = limit + 1
		_, found := differences(t, db, few)
		require.Equal(t, want[:limit+1], found)
	}
	requireRepaired(t, db, c)
	require.Equal(t, []string{"9", "2", "3", "4", "6"}, text(t, db, `select at from wrong order by b, a`), "an ignored column is only written with a new row")
	require.Equal(t, []string{"kept"}, text(t, db, `select extra_wrong from wrong where a = 'z'`))
	require.Equal(t, []string{"blob"}, text(t, db, `select typeof(n) from wrong where a = '\x02'`))
	mustExec(t, db, `create view seen as select * from wrong; update wrong set n = 77 where a = 'z'`)
	c.Pairs[0].Other = "seen"
	_, found = differences(t, db, c)
	require.Len(t, found, 1, "a view is compared by the key of the other table")
	c.Pairs[0] = provider.TablePair{Table: "seen", Other: "wrong"}
	mustExec(t, db, `update wrong set n = 78 where a = 'z'; drop view seen; create view seen as select a, b, n + 1 as n from wrong`)
	_, found = differences(t, db, c)
	require.Contains(t, found, `wrong {"b":"\\x03","a":"z"}: {"a":"z","b":"\\x03","n":79} <- {"a":"z","b":"\\x03","n":78}`)
}

// Rows of a table without a primary key may be there several times.
func TestCompareAndRepairRowsWithoutAKey(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	mustExec(t, db, `create table a (x, y, at); create table b (y, x, at, z);
insert into a (x, y) values (1, 1), (1, 1), (2, null), (3, 3);
insert into b (x, y) values (1, 1), (3, 3), (3, 3), (4, 4)`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "a", Other: "b"}}, Ignore: []string{"at"}, Limit: 10}
	_, found := differences(t, db, c)
	require.Equal(t, []string{
		`b {"x":1,"y":1}: {"x":1,"y":1} <- `, `b {"x":2,"y":null}: {"x":2,"y":null} <- `, `b {"x":3,"y":3}:  <- {"x":3,"y":3}`, `b {"x":4,"y":4}:  <- {"x":4,"y":4}`,
	}, found)
	requireRepaired(t, db, c)
	require.Equal(t, []string{"1", "1", "2", "3"}, text(t, db, `select x from b order by x`))
}

// Only the rows of Only are repaired, in the order of tables, and a repaired row may refer to one
// of a later table.
func TestRepairOnly(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	mustExec(t, db, `create table z_parents (id integer primary key); create table children (id integer primary key, parent integer references z_parents);
create table z_right (id integer primary key); create table right_children (id integer primary key, parent integer);
insert into z_right values (1), (2); insert into right_children values (1, 1), (2, 2)`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "z_right", Other: "z_parents"}, {Table: "right_children", Other: "children"}}, Limit: 10}
	_, all := differences(t, db, c)
	require.Len(t, all, 4)
	c.Repair, c.Only = true, []provider.Difference{
		{Table: "z_parents", Key: json.RawMessage(`{"id": 2}`)}, {Table: "children", Key: json.RawMessage(`{"id": 2}`)},
		{Table: "others", Key: json.RawMessage(`{"id": 1}`)}, {Table: "children", Key: json.RawMessage(`{"other": 1}`)}, {Table: "children", Key: json.RawMessage(`no`)},
	}
	_, repaired := differences(t, db, c)
	require.Equal(t, []string{`children {"id":2}: {"id":2,"parent":2} <- `, `z_parents {"id":2}: {"id":2} <- `}, repaired)
	_, left := differences(t, db, provider.Comparison{Pairs: c.Pairs, Limit: 10})
	require.Equal(t, []string{`children {"id":1}: {"id":1,"parent":1} <- `, `z_parents {"id":1}: {"id":1} <- `}, left)
}

// A comparison finds a row by its key, also with Only.
func TestComparePlans(t *testing.T) {
	t.Parallel()
	db, tr := traced(t, 1, nil)
	mustExec(t, db, `create table a (id text primary key, n int); create table b (id text primary key, n int); insert into a values ('x', 1)`)
	c := provider.Comparison{Pairs: []provider.TablePair{{Table: "a", Other: "b"}}, Limit: 10, Found: func([]provider.Difference) {}}
	compared := func() string {
		statements := tr.during(func() { require.NoError(t, doSwitch(t, db, provider.Switch{Compare: &c}, "")) })
		for _, query := range statements {
			if strings.HasPrefix(query, "with kinora_found") {
				return query
			}
		}
		require.Fail(t, "no comparison", "%q", statements)
		return ""
	}
	got := plan(t, db.SQL(), compared())
	require.Contains(t, got, "SEARCH o USING COVERING INDEX sqlite_autoindex_b_1 (id=?)", "%q", got)
	require.Contains(t, got, "SEARCH r USING COVERING INDEX sqlite_autoindex_a_1 (id=?)", "%q", got)
	c.Only = []provider.Difference{{Table: "b", Key: json.RawMessage(`{"id":"x"}`)}}
	for _, line := range plan(t, db.SQL(), compared()) {
		require.NotRegexp(t, `^SCAN (a|b|r|o)\b`, line)
	}
}

// A snapshot is rolled back, tables that it made included.
func TestASnapshotLeavesNothing(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	var found []provider.Difference
	s := provider.Switch{Snapshot: true, Set: []provider.Generation{build(2, provider.GenerationLive)}, Reset: []string{"totals"}, Compare: &provider.Comparison{
		Pairs: []provider.TablePair{{Table: "scratch", Other: "totals"}}, Limit: 1, Found: func(all []provider.Difference) { found = all },
	}}
	require.NoError(t, db.Do(t.Context(), delivery("m1"), adds("k")))
	require.NoError(t, doSwitch(t, db, s, `create table scratch (key text primary key, total); insert into scratch values ('k', 1)`))
	require.Len(t, found, 1)
	require.Equal(t, 1, total(t, db.SQL(), "k"))
	require.Equal(t, 0, count(t, db.SQL(), "kinora_generations"))
	require.Empty(t, text(t, db, `select name from pragma_table_list where name = 'scratch'`))
}

// A unit with Switch gives up after a second, also if another process writes.
func TestASwitchIsBusyAfterASecond(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db, other := openAt(t, path, nil), openAt(t, path, nil)
	for _, writer := range []*sqlite.DB{db, other} {
		require.NoError(t, writer.Do(t.Context(), delivery("m1"), func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			began := time.Now()
			err := db.Do(t.Context(), switching(), nil0)
			require.Equal(t, provider.ClassTransient, provider.ClassOf(err))
			require.Equal(t, provider.CodeBusy, provider.CodeOf(err))
			require.GreaterOrEqual(t, time.Since(began), time.Second)
			return provider.Closing{}, nil
		}))
	}
	require.NoError(t, db.Do(t.Context(), switching(), nil0))
}

// Last reads the log, markers and outcomes through the DB while its unit is open, also on a pool
// of one connection.
func TestLastReadsTheStore(t *testing.T) {
	t.Parallel()
	one, err := sql.Open("sqlite", migrated(t)+"?_txlock=immediate")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, one.Close()) })
	one.SetMaxOpenConns(1)
	ofOne, err := sqlite.New(one, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ofOne.Close()) })
	for name, db := range map[string]*sqlite.DB{"Open": open(t, nil), "New": ofOne} {
		t.Run(name, func(t *testing.T) {
			ctx := patience.Context(t)
			at, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(2))
			require.NoError(t, err)
			set, err := db.SetCheckpoint(ctx, totals, provider.Checkpoint{}, live(at.Position-1))
			require.NoError(t, err)
			require.True(t, set)
			u := switching(build(2, provider.GenerationLive))
			u.Switch.Last = func(ctx context.Context, is provider.Live) ([]provider.Message, error) {
				require.Equal(t, live(at.Position-1), is.Checkpoint)
				page, err := db.LogPage(ctx, provider.LogQuery{})
				require.NoError(t, err)
				messages := placed(page.Events[0].Position, page.Events[1].Position).Messages
				unapplied, err := is.Unapplied(ctx, messages)
				require.NoError(t, err)
				require.Equal(t, []bool{false, true}, unapplied)
				unapplied, err = db.Unapplied(ctx, provider.Build{Projector: "totals", Generation: 2}, messages)
				require.NoError(t, err)
				require.Equal(t, []bool{true, true}, unapplied)
				outcomes, err := db.Outcomes(ctx, []provider.Question{{Handler: handler, MessageID: messages[0].ID, Position: at.Position - 1}})
				require.NoError(t, err)
				require.Equal(t, []provider.Outcome{provider.OutcomeApplied}, outcomes)
				return messages[:1], nil
			}
			require.NoError(t, db.Do(ctx, u, adds("last")))
			require.Equal(t, 1, total(t, db.SQL(), "last"))
			require.Equal(t, 1, count(t, db.SQL(), "kinora_markers where generation = 2"))
		})
	}
}

// Generations change places in one unit, although one at most may be live or built at any time.
func TestGenerationsChangePlaces(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	states := func() (all []string) {
		listed, err := db.Generations(t.Context(), "totals")
		require.NoError(t, err)
		for _, g := range listed {
			require.JSONEq(t, `{}`, string(g.Data))
			all = append(all, string(g.State))
		}
		return all
	}
	require.NoError(t, db.Do(t.Context(), switching(build(1, provider.GenerationLive), build(2, provider.GenerationBuilding)), nil0))
	first, second := build(1, provider.GenerationBuilding), build(2, provider.GenerationLive)
	first.Revision, second.Revision = 1, 1
	require.NoError(t, db.Do(t.Context(), switching(first, second), nil0))
	require.Equal(t, []string{"building", "live"}, states())
	err := db.Do(t.Context(), switching(first, second), nil0)
	require.ErrorIs(t, err, provider.ErrFenced)
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err))
	require.Equal(t, provider.CodeFenced, provider.CodeOf(err))
}

// The tables of a retired generation, and views of these names, are dropped after its rows. Others stay.
func TestClearedTablesAreDropped(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	u := delivery("m1", "m2", "m3")
	u.Generation = 2
	require.NoError(t, db.Do(t.Context(), u, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Park: asides(u, provider.ClassUnknown, 0)[:2]}, nil
	}))
	mustExec(t, db, `create table totals_g2 (k); create view shown as select * from "main"."totals_g2"; create view kept as select 1 as k`)
	require.NoError(t, db.Do(t.Context(), switching(build(2, provider.GenerationRetired)), nil0), "the unit's own generation")
	clear := func() int {
		n, err := db.ClearGeneration(t.Context(), provider.Build{Projector: "totals", Generation: 2}, []string{handler}, []provider.TablePair{{Table: "totals_g2", Other: "shown"}, {Table: "none", Other: "kept"}}, 4)
		require.NoError(t, err)
		return n
	}
	require.Equal(t, []int{4, 1}, []int{clear(), clear()})
	const left = "pragma_table_list where name in ('totals_g2', 'shown', 'kept')"
	require.Equal(t, 3, count(t, db.SQL(), left), "not before the last row is deleted")
	require.Equal(t, 0, clear())
	require.Equal(t, 1, count(t, db.SQL(), left))
	require.Equal(t, 1, count(t, db.SQL(), "kept"))
}

// A unit with Switch cannot park messages, and the messages of Last are checked like others.
func TestASwitchRefusesMessages(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	u := switching(build(2, provider.GenerationLive))
	last := delivery("m1").Messages
	u.Switch.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return last, nil }
	err := db.Do(t.Context(), u, parks(delivery("m1"), provider.ClassUnknown, 0))
	require.ErrorIs(t, err, provider.ErrInput)
	require.Equal(t, provider.ClassPermanent, provider.ClassOf(err))
	last[0].ID = "\xff"
	require.ErrorIs(t, db.Do(t.Context(), u, adds("k")), eventstore.ErrInvalid)
	require.Equal(t, 0, count(t, db.SQL(), "kinora_generations"))
}

// Methods of generations use the indexes.
func TestGenerationPlans(t *testing.T) {
	t.Parallel()
	db, tr := traced(t, 1, nil)
	u := delivery("m1")
	require.NoError(t, db.Do(t.Context(), u, parks(u, provider.ClassUnknown, 0)))
	byKey := "SEARCH kinora_generations USING PRIMARY KEY (projector>? AND projector<?)"
	retire := func() {
		set, err := db.SetGeneration(t.Context(), build(1, provider.GenerationRetired))
		require.NoError(t, err)
		require.True(t, set)
	}
	clear := func() {
		n, err := db.ClearGeneration(t.Context(), totals, []string{handler}, []provider.TablePair{{Table: "none"}}, 10)
		require.NoError(t, err)
		require.Equal(t, 2, n)
	}
	requirePlans(t, db, "set", tr.during(retire), [][]string{nil, {byKey}, nil, nil, nil})
	requirePlans(t, db, "clear", tr.during(clear), [][]string{nil, {byKey},
		{"SEARCH kinora_markers USING PRIMARY KEY (handler=? AND generation=?)"},
		{"SEARCH kinora_parked USING COVERING INDEX kinora_parked_lane (projector=? AND generation=?)", "SEARCH kinora_parked USING INDEX kinora_parked_resolved (projector=?)"},
		nil,
	})
	read := tr.during(func() {
		_, err := db.Checkpoint(t.Context(), provider.Build{Projector: "totals"})
		require.NoError(t, err)
	})
	requirePlans(t, db, "live", read, [][]string{{"SEARCH kinora_generations USING COVERING INDEX kinora_generations_live (projector=?)"}, nil})
}
