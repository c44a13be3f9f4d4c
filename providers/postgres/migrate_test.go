package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// A later version applies only its own migrations, each of them once, also to a schema that MigrationSQL made.
func TestMigrateAppliesOnlyWhatIsMissing(t *testing.T) {
	t.Parallel()
	db, err := postgres.Open(t.Context(), postgrestest.DSN(t, &postgres.Config{Schema: "unused"}), &postgres.Config{Schema: "shop"})
	require.NoError(t, err)
	defer db.Close()
	script, err := postgres.MigrationSQL("shop")
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), script)
	require.NoError(t, err)
	later := append(postgres.Migrations()[:len(postgres.Migrations()):len(postgres.Migrations())],
		`create table kinora.second (id int)`, `insert into kinora.second values (3)`)
	for range 2 {
		require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.Up(t.Context(), tx, later) }))
	}
	require.Equal(t, 1, count(t, db, `select count(*) from shop.second`))
	require.Equal(t, len(later), count(t, db, `select count(*) from shop.migrations`))
	require.Equal(t, len(later), count(t, db, `select max(version_id) from shop.migrations where is_applied`))
}

// A migration that fails says which it is.
func TestMigrateNamesTheVersionThatFails(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	later := append(postgres.Migrations()[:len(postgres.Migrations()):len(postgres.Migrations())], `create table kinora.events (id int)`)
	err := pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.Up(t.Context(), tx, later) })
	require.ErrorContains(t, err, fmt.Sprintf("version %d: ERROR: relation \"events\" already exists", len(later)))
	require.NoError(t, db.Ready(t.Context()))
	require.Equal(t, len(later)-1, count(t, db, `select count(*) from kinora.migrations`))
}

// A migrator that waits for another one says for whom, and waits no longer than its context. It is not parallel: it
// replaces the default logger.
func TestMigrateSaysWhoHasTheLock(t *testing.T) {
	db := postgrestest.OpenBusy(t, nil)
	hung, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, hung.Rollback(context.WithoutCancel(t.Context()))) }()
	_, err = hung.Exec(t.Context(), `lock table kinora.migrations`) // as a migrator that hangs
	require.NoError(t, err)
	text, writer := make(chan string, 10), slog.Default()
	defer slog.SetDefault(writer)
	slog.SetDefault(slog.New(slog.NewTextHandler(lines(text), nil)))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- db.Migrate(ctx) }()
	line := patience.Receive(t, text, "a line of the log")
	stop()
	require.ErrorIs(t, patience.Receive(t, ended, "the migrator to end"), context.Canceled)
	require.Contains(t, line, fmt.Sprintf("pid=%d ", hung.Conn().PgConn().PID()))
}

// While a migration waits for a transaction that has read a table, others still use the table: it gives its place in the queue
// for the lock up after a second, and tries again.
func TestAMigrationThatWaitsLetsOthersPass(t *testing.T) {
	t.Parallel()
	all := postgres.Migrations()
	db, err := postgres.Open(t.Context(), postgrestest.DSN(t, &postgres.Config{Schema: "unused"}), nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.Up(t.Context(), tx, all[:len(all)-1]) }))
	dump, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer dump.Rollback(context.WithoutCancel(t.Context()))
	_, err = dump.Exec(t.Context(), `lock table kinora.parked in access share mode`)
	require.NoError(t, err)
	migrated := make(chan error, 1)
	go func() { migrated <- db.Migrate(context.WithoutCancel(t.Context())) }()
	for range 2 { // tries
		patience.Until(t, func() bool {
			return count(t, db, `select count(*) from pg_locks where relation = 'kinora.parked'::regclass and not granted`) > 0
		}, "the migration waits")
		read := make(chan error, 1)
		go func() {
			_, err := db.Pool().Exec(t.Context(), `select from kinora.parked`)
			read <- err
		}()
		require.NoError(t, patience.Receive(t, read, "the turn of a reader"))
		patience.Until(t, func() bool {
			return count(t, db, `select count(*) from pg_locks where relation = 'kinora.parked'::regclass and not granted`) == 0
		}, "the migration gives up for a moment")
	}
	require.Empty(t, migrated)
	require.NoError(t, dump.Rollback(t.Context()))
	require.NoError(t, patience.Receive(t, migrated, "the end of the migration"))
}

// lines is a writer that sends the lines of a log.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}
