package docs_test

import (
	"context"
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// The SQL of operations.md gives a copy a new lineage. Its projectors continue, and a token of the
// original is refused.
func TestACopyGetsANewLineage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("operations.md")
	require.NoError(t, err)
	var statements []string
	for _, m := range fenceForm.FindAllStringSubmatch(string(page), -1) {
		if m[1] == "sql" {
			statements = append(statements, m[2])
		}
	}
	require.Len(t, statements, 2)
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		dsn := postgrestest.DSN(t, nil)
		before := appendAndApply[pgx.Tx](t, openPostgres(t, dsn))
		_, err := openPostgres(t, dsn).Pool().Exec(t.Context(), statements[0])
		require.NoError(t, err)
		requireNewLineage[pgx.Tx](t, openPostgres(t, dsn), before)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "copy.db")
		before := appendAndApply[*sql.Tx](t, openSQLite(t, path))
		_, err := openSQLite(t, path).SQL().ExecContext(t.Context(), statements[1])
		require.NoError(t, err)
		requireNewLineage[*sql.Tx](t, openSQLite(t, path), before)
	})
}

func openPostgres(t *testing.T, dsn string) *postgres.DB {
	t.Helper()
	db, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func openSQLite(t *testing.T, path string) *sqlite.DB {
	t.Helper()
	db, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	return db
}

type logStore[Tx any] interface {
	provider.Provider[Tx]
	eventstore.Store
	provider.Log
}

type counted struct{}

var countedTypes = eventstore.NewTypes(eventstore.Type[counted]("counted"))

func counts[Tx any]() *projector.Projector[Tx] {
	return projector.Define("counts", countedTypes, projector.Options{},
		projector.On("counted", func(context.Context, Tx, eventstore.Event[counted]) error { return nil }))
}

// appendAndApply appends an event, and runs a projector until it has applied it.
func appendAndApply[Tx any](t *testing.T, db logStore[Tx]) eventstore.Appended {
	t.Helper()
	p := counts[Tx]()
	drafts, err := countedTypes.Encode(t.Context(), counted{})
	require.NoError(t, err)
	at, err := db.Append(t.Context(), "count-1", eventstore.Any, drafts)
	require.NoError(t, err)
	r, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), r)
	require.NoError(t, err)
	require.NoError(t, p.Wait(t.Context(), db, at))
	require.NoError(t, group.Stop())
	return at
}

func requireNewLineage[Tx any](t *testing.T, db logStore[Tx], before eventstore.Appended) {
	t.Helper()
	appendAndApply(t, db)
	require.ErrorIs(t, counts[Tx]().Wait(t.Context(), db, before), projector.ErrOtherLog)
}
