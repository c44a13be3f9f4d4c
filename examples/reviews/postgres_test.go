package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// postgresDSN returns a new database that already has Kinora's schema.
func postgresDSN(t *testing.T) string {
	t.Helper()
	return postgrestest.DSN(t, &postgres.Config{Route: outbox.ByCategory})
}

// Promise: G4.1
func TestDemoPostgres(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	o, result := demoJSON(t, "--db", dsn, "--commands", "400", "--products", "8", "--kills", "2", "--duplicates", "0.9")
	require.Zero(t, o.code, "%s\n%s", o.stdout, o.stderr)
	require.Equal(t, 2, intAt(t, result, "kills"))
	require.Zero(t, intAt(t, result, "exactly_once.wrong_products"))
	require.Positive(t, intAt(t, result, "control.wrong_products"))
	require.Positive(t, intAt(t, result, "concurrent_duplicates"))
	require.Equal(t, intAt(t, result, "events"), postgresEvents(t, dsn), "the demo used this database")

	o = reviews(t, "demo", "--db", dsn)
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "has been used")
}

// TestImportPostgres: the first and the second import of a file give the expected report.
func TestImportPostgres(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 3000)
	dsn := postgresDSN(t)
	before := 0
	for range 2 {
		o := reviews(t, "import", "--db", dsn, path)
		require.Zero(t, o.code, o.stderr)
		o = reviews(t, "report", "--db", dsn, "--json")
		require.Zero(t, o.code, o.stderr)
		var rows []reportRow
		require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
		require.Equal(t, expectedReport(t, path, bad), rows)
		if before > 0 {
			require.Equal(t, before, postgresEvents(t, dsn), "the second import appends nothing")
		}
		before = postgresEvents(t, dsn)
	}
}

// TestReportPostgresRefuses: report refuses a database without a read model, and no command shows a
// password.
func TestReportPostgresRefuses(t *testing.T) {
	t.Parallel()
	o := reviews(t, "report", "--db", postgresDSN(t))
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "import a file first")
	for _, dsn := range []string{"postgres://ann:hunter2@127.0.0.1:1/none?connect_timeout=2", "postgres://ann@127.0.0.1:1/none?connect_timeout=2&password=hunter2"} {
		for _, args := range [][]string{{"report", "--db", dsn}, {"serve", "--db", dsn}, {"relay", "--db", dsn}, {"demo", "--db", dsn}} {
			o = reviews(t, args...)
			require.Equal(t, 1, o.code)
			require.False(t, strings.Contains(o.stderr+o.stdout, "hunter2"), "no password is shown")
			var d database
			require.NoError(t, d.UnmarshalText([]byte(dsn)))
			require.Equal(t, "postgres://127.0.0.1:1/none", d.String())
		}
	}
}

func postgresEvents(t *testing.T, dsn string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from kinora.events`).Scan(&n))
	return n
}
