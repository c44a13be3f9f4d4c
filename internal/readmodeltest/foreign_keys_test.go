package readmodeltest_test

import (
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// related is a model with children of parents, nodes that refer to nodes, and a cycle of two tables.
func related(isPostgres bool, action string) model {
	self := action
	if strings.Contains(action, "restrict") {
		self = "" // SQLite could not empty the table
	}
	return model{
		tables: []string{"parents", "children", "nodes", "ring_a", "ring_b"},
		create: func(name func(string) string) []string {
			ring := " references " + name("ring_b") + " " + self
			if isPostgres {
				ring = ""
			}
			all := []string{
				`create table ` + name("parents") + ` (id int primary key, code int unique not null)`,
				`create table ` + name("children") + ` (id int primary key, parent int not null references ` + name("parents") + ` ` + action + `, code int references ` + name("parents") + ` (code))`,
				`create table ` + name("nodes") + ` (id int primary key, boss int references ` + name("nodes") + ` ` + self + `)`,
				`create table ` + name("ring_a") + ` (id int primary key, b int` + ring + `)`,
				`create table ` + name("ring_b") + ` (id int primary key, a int not null references ` + name("ring_a") + ` ` + self + `)`,
			}
			if isPostgres {
				all = append(all, `alter table `+name("ring_a")+` add foreign key (b) references `+name("ring_b")+` `+self)
			}
			return all
		},
		plant: func(name func(string) string) []string {
			n := name("n")
			return []string{
				`insert into ` + name("parents") + ` values (` + n + `, 10 + ` + n + `)`,
				`insert into ` + name("children") + ` values (` + n + `, ` + n + `, 10 + ` + n + `)`,
				`insert into ` + name("nodes") + ` values (` + n + `, nullif(` + n + ` - 1, 0))`,
				`insert into ` + name("ring_a") + ` values (` + n + `, null)`,
				`insert into ` + name("ring_b") + ` values (` + n + `, ` + n + `)`,
				`update ` + name("ring_a") + ` set b = ` + n + ` where id = ` + n,
			}
		},
	}
}

// content returns the rows that readers see.
func content(t testing.TB, db *database) []string {
	t.Helper()
	return db.rows(t, `select 'p' || id || ' ' || code from parents union all select 'c' || id || ' ' || parent || ' ' || code from children
union all select 'n' || id || ' ' || coalesce(boss, 0) from nodes
union all select 'a' || id || ' ' || coalesce(b, 0) from ring_a union all select 'b' || id || ' ' || a from ring_b`)
}

func want(n int) (all []string) {
	for i := 1; i <= n; i++ {
		all = append(all, fmt.Sprintf("p%d %d", i, 10+i), fmt.Sprintf("c%d %d %d", i, i, 10+i), fmt.Sprintf("n%d %d", i, i-1), fmt.Sprintf("a%d %d", i, i), fmt.Sprintf("b%d %d", i, i))
	}
	slices.Sort(all)
	return all
}

// damages are statements that make tables of a generation wrong, in an order that the database allows.
var damages = map[string][]string{
	"missing rows": {
		`delete from children# where id = 2`, `delete from parents# where id = 2`,
		`update nodes# set boss = null where id = 3`, `delete from nodes# where id = 2`,
		`update ring_a# set b = null where id = 2`, `delete from ring_b# where id = 2`, `delete from ring_a# where id = 2`,
	},
	"extra rows": {
		`insert into parents# values (99, 99)`, `insert into children# values (99, 99, 99), (98, 99, 11)`,
		`insert into nodes# values (98, 1)`, `insert into nodes# values (99, 98)`,
		`insert into ring_a# values (99, null)`, `insert into ring_b# values (99, 99)`, `update ring_a# set b = 99 where id = 99`,
	},
	"rows that refer to others": {
		`insert into parents# values (99, 99)`, `update children# set parent = 99, code = 99 where id = 2`, `update children# set parent = 1 where id = 3`,
		`insert into nodes# values (99, 1)`, `update nodes# set boss = 99 where id = 4`,
		`insert into ring_a# values (99, null)`, `insert into ring_b# values (99, 99)`, `update ring_a# set b = 99 where id = 3`,
		`update ring_b# set a = 99 where id = 1`,
	},
	"values of a key that is not the primary one": {
		`update children# set code = null`, `update parents# set code = code + 100`, `update children# set code = 111 where id = 2`,
	},
	"all": {
		`update ring_a# set b = null`, `delete from ring_b#`, `delete from ring_a#`, `update nodes# set boss = null`, `delete from nodes#`, `delete from children#`, `delete from parents#`,
	},
}

// Verify repairs tables that refer to each other, in any order, and leaves none of its own; they can be rebuilt, and are
// dropped.
// Promise: R7.1
func TestTablesThatReferToEachOther(t *testing.T) {
	t.Parallel()
	for what, action := range map[string]string{
		"checked at once": "", "deferred": "deferrable initially deferred", "deferrable": "deferrable", "cascade": "on delete cascade", "restrict": "on delete restrict",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for name, reverse := range map[string]func([]string){"in order": func([]string) {}, "reversed": slices.Reverse[[]string]} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					onBoth(t, func(t *testing.T, db *database) {
						m := related(db.isPostgres, action)
						reverse(m.tables)
						checkRelated(t, db, m.define(projector.Options{}))
					})
				})
			}
		})
	}
}

func checkRelated(t *testing.T, db *database, p *projector.Projector[*sql.Tx]) {
	t.Helper()
	require.NoError(t, p.Create(t.Context(), db.Provider, &quiet))
	db.plant(t, 1, 2, 3, 4)
	_, stop := start(t, db, p)
	patience.Until(t, func() bool { return slices.Equal(content(t, db), want(4)) }, "the events to be applied")
	require.NoError(t, stop())
	for what, statements := range damages {
		for _, s := range statements {
			db.exec(t, strings.ReplaceAll(s, "#", "_g1"))
		}
		result, err := p.Verify(t.Context(), db.Provider, projector.Verification{Repair: ann}, &quiet)
		require.NoError(t, err, what)
		require.NotEmpty(t, result.Differences, what)
		require.Equal(t, result.Differences, result.Repaired, what)
		require.Equal(t, want(4), content(t, db), what)
		require.Len(t, db.generated(t), 5, what)
	}
	for _, how := range []projector.RebuildHow{projector.BlueGreen, projector.InPlace} {
		runner, stop := start(t, db, p)
		require.NoError(t, runner.Rebuild(t.Context(), "plants", projector.Rebuild{How: how, Decision: ann}))
		require.Equal(t, want(4), content(t, db), how)
		require.NoError(t, stop())
	}
	require.NoError(t, projector.Control(t.Context(), db.Provider, "plants", 1, projector.Drop, ann))
	_, stop = start(t, db, p) // it drops tables when it starts
	patience.Until(t, func() bool { return len(db.generated(t)) == 5 }, "the tables of the first generation to be dropped")
	require.NoError(t, stop())
	require.Equal(t, want(4), content(t, db))
}

// start starts a runner.
func start(t *testing.T, db *database, p *projector.Projector[*sql.Tx]) (*projector.Runner, func() error) {
	t.Helper()
	cfg := projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(db.warnings, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	r, err := projector.NewRunner(db.Provider, projector.FromLog(db.log), cfg, p)
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), r)
	require.NoError(t, err)
	return r, group.Stop
}

// families is a model of two tables. The children refer to the table that of returns.
func families(of func(name func(string) string) string, more string) model {
	return model{
		tables: []string{"children", "parents"},
		create: func(name func(string) string) []string {
			return []string{
				`create table ` + name("parents") + ` (id int primary key, code int unique not null)`,
				`create table ` + name("children") + ` (id int primary key, parent int references ` + of(name) + ` ` + more + `)`,
			}
		},
		plant: func(name func(string) string) []string {
			return []string{
				`insert into ` + name("parents") + ` values (` + name("n") + `, 10)`, `insert into ` + name("children") + ` values (` + name("n") + `, ` + name("n") + `)`,
			}
		},
	}
}

func own(name func(string) string) string { return name("parents") }

// A generation whose tables refer to those of another one is refused before anything is stored: it would follow the rows of the
// other one, and end with it.
// Promise: R2.1
func TestTablesThatReferToAnotherGeneration(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		db.plant(t, 1)
		p := families(own, "").define(projector.Options{})
		require.NoError(t, p.Create(t.Context(), db.Provider, &quiet))
		_, stop := start(t, db, p)
		patience.Until(t, func() bool { return len(db.rows(t, `select id from children`)) == 1 }, "the event to be applied")
		require.NoError(t, stop())
		first := func(func(string) string) string { return "parents_g1" }
		bad := families(first, "on delete cascade").define(projector.Options{})
		_, err := bad.Verify(t.Context(), db.Provider, projector.Verification{}, &quiet)
		require.Equal(t, provider.CodeReferenced, provider.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "projector.Table")
		r, stop := start(t, db, bad)
		err = r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.BlueGreen, Decision: ann})
		require.ErrorIs(t, err, projector.ErrNoRebuild)
		require.ErrorContains(t, err, provider.CodeReferenced)
		require.NoError(t, stop())
		require.Equal(t, []string{"children_g1", "parents_g1"}, db.generated(t))
	})
}

// A table that OnCreate makes and Options.Tables lacks would keep the others for ever, if it refers to them.
func TestATableThatIsNotListedRefersToAReadModel(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		m := families(own, "")
		m.tables = []string{"parents"}
		err := m.define(projector.Options{}).Create(t.Context(), db.Provider, &quiet)
		require.Equal(t, provider.CodeReferenced, provider.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "Options.Tables")
		require.Empty(t, db.generated(t))
	})
}

// A table of the application that refers to one of a generation keeps it: it is neither emptied nor dropped, no row of the
// application is lost, and the log says so.
// Promise: R6.1
func TestATableOfTheApplicationRefersToAReadModel(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		db.plant(t, 1)
		p := families(own, "").define(projector.Options{})
		require.NoError(t, p.Create(t.Context(), db.Provider, &quiet))
		r, stop := start(t, db, p)
		patience.Until(t, func() bool { return len(db.rows(t, `select id from children`)) == 1 }, "the event to be applied")
		db.exec(t, `create table orders (id int primary key, parent int references parents_g1 on delete cascade)`, `insert into orders values (1, 1)`)
		err := r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.InPlace, Decision: ann})
		require.ErrorIs(t, err, projector.ErrNoRebuild)
		require.ErrorContains(t, err, provider.CodeReferenced)
		require.NoError(t, r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.BlueGreen, Decision: ann}))
		require.NoError(t, projector.Control(t.Context(), db.Provider, "plants", 1, projector.Drop, ann))
		require.NoError(t, stop())
		drop := func() error {
			_, err := db.ClearGeneration(t.Context(), provider.Build{Projector: "plants", Generation: 1}, []string{"plants/plant"}, []provider.TablePair{{Table: "parents_g1"}, {Table: "children_g1"}}, 100)
			return err
		}
		err = drop()
		require.Equal(t, provider.CodeReferenced, provider.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, "orders")
		require.Equal(t, []string{"1"}, db.rows(t, `select id from orders`))
		require.Contains(t, db.generated(t), "parents_g1")
		_, stop = start(t, db, p)
		line := ""
		for !strings.Contains(line, "rows and tables (children_g1, parents_g1) of generation 1 not deleted") {
			line = patience.Receive(t, db.warnings, "a warning")
		}
		require.Contains(t, line, "code=referenced")
		require.NoError(t, stop())
		db.exec(t, `drop table orders`)
		require.NoError(t, drop())
		require.NotContains(t, db.generated(t), "parents_g1")
	})
}

// A table that is to become a view keeps its name if a table of the application refers to it: after the switch, that one would
// refer to rows that no program writes.
// Promise: R2.1
func TestATableOfTheApplicationRefersToATableThatBecomesAView(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		db.exec(t, `create table parents (id int primary key, code int unique not null)`, `create table children (id int primary key, parent int references parents)`,
			`create table orders (id int primary key, parent int references parents)`)
		db.plant(t, 1)
		m := families(own, "")
		old := m
		old.create = nil
		_, stop := start(t, db, old.define(projector.Options{}))
		patience.Until(t, func() bool { return len(db.rows(t, `select id from children`)) == 1 }, "the event to be applied")
		require.NoError(t, stop())
		r, stop := start(t, db, m.define(projector.Options{}))
		err := r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.BlueGreen, Decision: ann})
		require.ErrorIs(t, err, projector.ErrNoRebuild)
		require.ErrorContains(t, err, provider.CodeReferenced)
		require.Empty(t, db.generated(t))
		db.exec(t, `drop table orders`)
		require.NoError(t, r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.BlueGreen, Decision: ann}))
		require.NoError(t, stop())
		require.Equal(t, []string{"1"}, db.rows(t, `select parent from children`))
	})
}

// SQLite cannot delete rows that refer to each other with RESTRICT, so tables with such rows are refused when they are created.
// A table that refers to one that is not there yet is refused too.
func TestTablesThatSQLiteCouldNotEmpty(t *testing.T) {
	t.Parallel()
	for what, m := range map[string]model{
		"itself":     families(func(name func(string) string) string { return name("children") }, "on delete restrict"),
		"the view":   families(func(func(string) string) string { return "parents" }, ""),
		"a restrict": families(own, "on delete restrict"),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := newSQLite(t)
			err := m.define(projector.Options{}).Create(t.Context(), db.Provider, &quiet)
			if what == "a restrict" {
				require.NoError(t, err, "the control")
				return
			}
			require.Equal(t, provider.CodeReferenced, provider.CodeOf(err), "%v", err)
			require.ErrorIs(t, err, projector.ErrInput)
			require.Empty(t, db.generated(t))
		})
	}
}
