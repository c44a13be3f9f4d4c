// Package readmodeltest tests read models of several tables, on PostgreSQL and SQLite.
package readmodeltest_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

// database is a migrated database of a test.
type database struct {
	provider.Provider[*sql.Tx]
	eventstore.Store
	log        provider.Log
	sql        *sql.DB
	tablesSQL  string // lists the tables
	isPostgres bool
	warnings   lines // of runners
}

// lines are the lines of a log that were not received, at most 100.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	select {
	case l <- string(line):
	default:
	}
	return len(line), nil
}

func newSQLite(t *testing.T) *database {
	t.Helper()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "test.db"), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	return &database{db, db, db, db.SQL(), `select name from pragma_table_list where type = 'table'`, false, make(lines, 100)}
}

func newPostgres(t *testing.T) *database {
	t.Helper()
	db := postgrestest.Open(t, nil)
	pool := stdlib.OpenDBFromPool(db.Pool())
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return &database{db.SQL(), db, db, pool, `select relname from pg_class where relkind in ('r', 'p')`, true, make(lines, 100)}
}

// onBoth runs a test with a database of each kind.
func onBoth(t *testing.T, test func(t *testing.T, db *database)) {
	t.Helper()
	for name, open := range map[string]func(*testing.T) *database{"sqlite": newSQLite, "postgres": newPostgres} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func (db *database) exec(t *testing.T, statements ...string) {
	t.Helper()
	for _, s := range statements {
		_, err := db.sql.ExecContext(t.Context(), s)
		require.NoError(t, err, s)
	}
}

// rows returns the first column of a query, sorted.
func (db *database) rows(t testing.TB, query string) (all []string) {
	t.Helper()
	rows, err := db.sql.QueryContext(t.Context(), query)
	require.NoError(t, err, query)
	defer rows.Close()
	for rows.Next() {
		var s string
		require.NoError(t, rows.Scan(&s))
		all = append(all, s)
	}
	require.NoError(t, rows.Err())
	slices.Sort(all)
	return all
}

// generated returns the tables of generations.
func (db *database) generated(t testing.TB) []string {
	t.Helper()
	return slices.DeleteFunc(db.rows(t, db.tablesSQL), func(name string) bool { return !suffix.MatchString(name) })
}

var suffix = regexp.MustCompile(`_g[0-9]+$`)

type planted struct{ N int }

var types = eventstore.NewTypes(eventstore.Type[planted]("planted"))

// plant appends events.
func (db *database) plant(t *testing.T, numbers ...int) {
	t.Helper()
	for _, n := range numbers {
		drafts, err := types.Encode(t.Context(), planted{n})
		require.NoError(t, err)
		_, err = db.Append(t.Context(), "plants-1", eventstore.Any, drafts)
		require.NoError(t, err)
	}
}

var (
	quiet = projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}
	ann   = projector.Decision{By: "ann", Reason: "a test"}
)

// model is a projector whose OnCreate and handler run statements. name returns the name of a table, and the number of the
// event for "n".
type model struct {
	tables        []string
	create, plant func(name func(string) string) []string
}

func (m model) define(opts projector.Options) *projector.Projector[*sql.Tx] {
	run := func(ctx context.Context, tx *sql.Tx, statements func(func(string) string) []string) error {
		for _, s := range statements(func(table string) string { return projector.Table(ctx, table) }) {
			if _, err := tx.ExecContext(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s, err)
			}
		}
		return nil
	}
	opts.Tables = m.tables
	handlers := []projector.Handler[*sql.Tx]{
		projector.On("plant", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[planted]) error {
			return run(ctx, tx, func(name func(string) string) []string {
				return m.plant(func(table string) string {
					if table == "n" {
						return fmt.Sprint(e.Data.N)
					}
					return name(table)
				})
			})
		}),
	}
	if m.create != nil {
		handlers = append(handlers, projector.OnCreate(func(ctx context.Context, tx *sql.Tx) error { return run(ctx, tx, m.create) }))
	}
	return projector.Define("plants", types, opts, handlers...)
}
