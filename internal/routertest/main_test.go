// Package routertest tests Kinora in a Watermill router, on PostgreSQL and SQLite.
package routertest_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

const childEnv = "KINORA_ROUTERTEST_CHILD"

func TestMain(m *testing.M) {
	if database := os.Getenv(childEnv); database != "" {
		if err := child(database, os.Args[1]); err != nil {
			fmt.Println("child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

const (
	totals = `create table totals (key text primary key, n bigint not null)`
	addSQL = `insert into totals as t (key, n) values ($1, 1) on conflict (key) do update set n = t.n + 1`
	sumSQL = `select coalesce((select n from totals where key = $1), 0)`
)

// database is a database with a table of totals.
type database[Tx any] struct {
	provider.Provider[Tx]
	name, at string // for a child
	entries  func(context.Context, outbox.Filter) ([]outbox.Entry, error)
	enqueuer func(Tx) outbox.Enqueuer
	transact func(context.Context, func(context.Context, Tx) error) error
	add      func(context.Context, Tx, string) error
	total    func(ctx context.Context, key string) (int, error)
	exec     func(ctx context.Context, sql string) error
}

func onSQLite(db *sqlite.DB, path string) *database[*sql.Tx] {
	return &database[*sql.Tx]{
		Provider: db, name: "sqlite", at: path, entries: db.Entries, transact: db.Transact,
		enqueuer: func(tx *sql.Tx) outbox.Enqueuer { return db.InTx(tx) },
		add: func(ctx context.Context, tx *sql.Tx, key string) error {
			_, err := tx.ExecContext(ctx, addSQL, key)
			return err
		},
		total: func(ctx context.Context, key string) (n int, err error) {
			return n, db.SQL().QueryRowContext(ctx, sumSQL, key).Scan(&n)
		},
		exec: func(ctx context.Context, sql string) error {
			_, err := db.SQL().ExecContext(ctx, sql)
			return err
		},
	}
}

func onPostgres(db *postgres.DB, dsn string) *database[pgx.Tx] {
	return &database[pgx.Tx]{
		Provider: db, name: "postgres", at: dsn, entries: db.Entries, transact: db.Transact,
		enqueuer: func(tx pgx.Tx) outbox.Enqueuer { return db.InTx(tx) },
		add: func(ctx context.Context, tx pgx.Tx, key string) error {
			_, err := tx.Exec(ctx, addSQL, key)
			return err
		},
		total: func(ctx context.Context, key string) (n int, err error) {
			return n, db.Pool().QueryRow(ctx, sumSQL, key).Scan(&n)
		},
		exec: func(ctx context.Context, sql string) error {
			_, err := db.Pool().Exec(ctx, sql)
			return err
		},
	}
}

func newSQLite(t *testing.T) *database[*sql.Tx] {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.db")
	db, err := sqlite.Open(t.Context(), path, &sqlite.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	d := onSQLite(db, path)
	require.NoError(t, d.exec(t.Context(), totals))
	return d
}

func newPostgres(t *testing.T) *database[pgx.Tx] {
	t.Helper()
	cfg := &postgres.Config{Route: outbox.ByCategory}
	dsn := postgrestest.DSN(t, cfg, totals)
	db, err := postgres.Open(t.Context(), dsn, cfg)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return onPostgres(db, dsn)
}

// requireTotal requires that a message of key took effect n times.
func (d *database[Tx]) requireTotal(t *testing.T, n int, key string) {
	t.Helper()
	got, err := d.total(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, n, got, key)
}

// once returns the middleware "count".
func (d *database[Tx]) once(t *testing.T) message.HandlerMiddleware {
	t.Helper()
	once, err := projector.Middleware(d.Provider, "count", marker.Retention{})
	require.NoError(t, err)
	return once
}

// count adds one to the payload's total.
func (d *database[Tx]) count(m *message.Message) error {
	tx, ok := projector.TxFrom[Tx](m.Context())
	if !ok {
		return fmt.Errorf("no transaction")
	}
	return d.add(m.Context(), tx, string(m.Payload))
}

// startRouter runs the router until the test ends.
func startRouter(t *testing.T, router *message.Router) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- router.Run(context.Background()) }()
	select {
	case <-router.Running():
	case err := <-done:
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-done)
	})
}

func newRouter(t *testing.T) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience.Limit()}, watermill.NopLogger{})
	require.NoError(t, err)
	return router
}

// child counts the message "m-1" with a handler that never returns.
func child(database, at string) error {
	ctx := context.Background()
	if database == "sqlite" {
		db, err := sqlite.Open(ctx, at, nil)
		if err != nil {
			return err
		}
		return stall(onSQLite(db, at))
	}
	db, err := postgres.Open(ctx, at, nil)
	if err != nil {
		return err
	}
	return stall(onPostgres(db, at))
}

func stall[Tx any](d *database[Tx]) error {
	once, err := projector.Middleware(d.Provider, "count", marker.Retention{})
	if err != nil {
		return err
	}
	_, err = once(func(m *message.Message) ([]*message.Message, error) {
		if err := d.count(m); err != nil {
			return nil, err
		}
		fmt.Println("counted")
		select {}
	})(message.NewMessage("m-1", []byte("a")))
	return err
}

// startChild returns once a child process has counted, and holds the transaction open.
func startChild(t *testing.T, database, at string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], at)
	cmd.Env = append(os.Environ(), childEnv+"="+database)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "counted", strings.TrimSpace(line))
	return cmd
}
