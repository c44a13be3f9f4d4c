package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// callers is a transaction of a caller, in which the events and the outbox have a view.
type callers struct {
	view             *postgres.Tx
	tasks            provider.TaskTx
	exec             func(ctx context.Context, statement string) error
	commit, rollback func() error
}

// sqlDB returns a database for the caller's own transactions, by pgx's driver.
func sqlDB(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	require.NoError(t, err)
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	return db
}

// inEach runs a test in transactions of pgx and of database/sql: what holds for one holds for the other.
func inEach(t *testing.T, test func(t *testing.T, db *postgres.DB, begin func(serializable bool) callers)) {
	t.Parallel()
	t.Run("pgx", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, totals)
		test(t, db, func(serializable bool) callers {
			options := pgx.TxOptions{}
			if serializable {
				options.IsoLevel = pgx.Serializable
			}
			tx, err := db.Pool().BeginTx(t.Context(), options)
			require.NoError(t, err)
			t.Cleanup(func() { tx.Rollback(context.Background()) }) // also if the test fails
			return callers{db.InTx(tx), db.TasksIn(tx),
				func(ctx context.Context, statement string) error { _, err := tx.Exec(ctx, statement); return err },
				func() error { return tx.Commit(t.Context()) }, func() error { return tx.Rollback(t.Context()) }}
		})
	})
	t.Run("sql", func(t *testing.T) {
		t.Parallel()
		db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, totals)
		pool := sqlDB(t, db.Pool().Config().ConnString())
		test(t, db, func(serializable bool) callers {
			options := &sql.TxOptions{}
			if serializable {
				options.Isolation = sql.LevelSerializable
			}
			tx, err := pool.BeginTx(t.Context(), options)
			require.NoError(t, err)
			t.Cleanup(func() { tx.Rollback() })
			return callers{db.InSQLTx(tx), db.SQL().TasksIn(tx),
				func(ctx context.Context, statement string) error {
					_, err := tx.ExecContext(ctx, statement)
					return err
				},
				tx.Commit, tx.Rollback}
		})
	})
}

const addOneSQL = `insert into totals (key, n) values ('k', 1)`

// A write of the caller, events, entries, messages and tasks commit together or not at all.
// Promise: G1.4
func TestACallersTransactionIsOneWhole(t *testing.T) {
	inEach(t, func(t *testing.T, db *postgres.DB, begin func(bool) callers) {
		everything := func() (tx callers) {
			tx = begin(false)
			require.NoError(t, tx.exec(t.Context(), addOneSQL))
			at, err := tx.view.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			require.Equal(t, int64(1), at.Version)
			at, err = tx.view.Append(t.Context(), "a-1", 1, drafts(t, 2, 3))
			require.NoError(t, err)
			require.Equal(t, int64(3), at.Version)
			require.NoError(t, tx.view.Enqueue(t.Context(), outbox.Message{Topic: "x"}, outbox.Message{Topic: "y", Key: "k", OrderedKey: true}))
			require.NoError(t, tx.tasks.Enqueue(t.Context(), draft("one")))
			require.NoError(t, tx.tasks.Enqueue(t.Context(), draft("two"), draft("three")))
			var versions []int64
			for e, err := range tx.view.ReadStream(t.Context(), "a-1", 0) {
				require.NoError(t, err)
				require.NoError(t, tx.exec(t.Context(), `select 1`)) // between two events
				versions = append(versions, e.Version)
			}
			require.Equal(t, []int64{1, 2, 3}, versions)
			return tx
		}
		stored := func() (n []int) {
			for _, from := range []string{"totals", "kinora.events", "kinora.outbox", "kinora.tasks"} {
				n = append(n, count(t, db, `select count(*) from `+from))
			}
			return n
		}
		require.NoError(t, everything().rollback())
		require.Equal(t, []int{0, 0, 0, 0}, stored())
		tx := everything()
		require.Equal(t, []int{0, 0, 0, 0}, stored())
		require.NoError(t, tx.commit())
		require.Equal(t, []int{1, 3, 5, 3}, stored())
	})
}

// Promise: G1.4
func TestErrorsInACallersTransaction(t *testing.T) {
	inEach(t, func(t *testing.T, db *postgres.DB, begin func(bool) callers) {
		appends := func(tx callers, at eventstore.Expected) error {
			_, err := tx.view.Append(t.Context(), "a-1", at, drafts(t, 1))
			return err
		}
		hasState := func(state string, err error) {
			t.Helper()
			e, ok := errors.AsType[*pgconn.PgError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, state, e.Code)
		}
		// a conflict and invalid input leave the transaction usable
		tx := begin(false)
		require.ErrorIs(t, appends(tx, 5), eventstore.ErrConflict)
		require.ErrorIs(t, tx.view.Enqueue(t.Context(), outbox.Message{}), eventstore.ErrInvalid)
		require.NoError(t, appends(tx, eventstore.NoStream))
		require.NoError(t, tx.commit())
		// an id that is used
		tx = begin(false)
		require.NoError(t, tx.tasks.Enqueue(t.Context(), draft("one")))
		other := draft("one")
		other.Kind = "t/b"
		require.ErrorIs(t, tx.tasks.Enqueue(t.Context(), other), provider.ErrTaskIDReused)
		require.NoError(t, tx.rollback())
		// a transaction that failed
		tx = begin(false)
		hasState("22012", tx.exec(t.Context(), `select 1 / 0`))
		hasState("25P02", appends(tx, 1))
		hasState("25P02", tx.view.Enqueue(t.Context(), outbox.Message{Topic: "x"}))
		hasState("25P02", tx.tasks.Enqueue(t.Context(), draft("two")))
		require.NoError(t, tx.rollback())
		// a transaction above READ COMMITTED
		tx = begin(true)
		require.NoError(t, tx.exec(t.Context(), `select count(*) from totals`))
		_, err := db.Append(t.Context(), "a-1", 1, drafts(t, 2))
		require.NoError(t, err)
		hasState("40001", appends(tx, 1))
		hasState("25P02", appends(tx, 2))
		require.NoError(t, tx.rollback())
		// a transaction that ended
		for _, err := range []error{appends(tx, 2), tx.view.Enqueue(t.Context(), outbox.Message{Topic: "x"}), tx.tasks.Enqueue(t.Context(), draft("two"))} {
			require.True(t, errors.Is(err, pgx.ErrTxClosed) || errors.Is(err, sql.ErrTxDone), "%v", err)
			require.NotErrorIs(t, err, eventstore.ErrInvalid)
		}
		require.Equal(t, 2, count(t, db, `select count(*) from kinora.events`))
		require.Equal(t, 0, count(t, db, `select count(*) from kinora.tasks`))
	})
}

// The connection is in use: the error is that of pgx.
// Promise: G1.4
func TestASQLTransactionWithOpenRows(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	tx, err := sqlDB(t, db.Pool().Config().ConnString()).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	rows, err := tx.QueryContext(t.Context(), `select generate_series(1, 100000)`)
	require.NoError(t, err)
	require.True(t, rows.Next())
	_, err = db.InSQLTx(tx).Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.ErrorContains(t, err, "conn busy")
	require.NoError(t, rows.Close())
	_, err = db.InSQLTx(tx).Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
}

// The context ends while an append waits for another one.
// Promise: G1.4
func TestAContextEndsInACallersTransaction(t *testing.T) {
	inEach(t, func(t *testing.T, db *postgres.DB, begin func(bool) callers) {
		first, second := begin(false), begin(false)
		_, err := first.view.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
		require.NoError(t, err)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = second.view.Append(ended, "a-2", eventstore.NoStream, drafts(t, 2))
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, second.exec(t.Context(), addOneSQL), "nothing was sent")
		ctx, end := patience.Deadline(t)
		go func() {
			defer end()
			waiting(t, db, 1)
		}()
		_, err = second.view.Append(ctx, "a-1", eventstore.NoStream, drafts(t, 2))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Error(t, second.exec(t.Context(), addOneSQL))
		require.Error(t, second.commit())
		require.NoError(t, first.commit())
		require.Equal(t, 1, count(t, db, `select count(*) from kinora.events`))
		require.Equal(t, 0, count(t, db, `select count(*) from totals`))
	})
}

// The statements of one method run under database/sql's lock: other statements, and the rollback at
// the end of the transaction's context, do not use the connection meanwhile.
// Promise: G1.4
func TestASQLTransactionIsUsedConcurrently(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, totals)
	pool := sqlDB(t, db.Pool().Config().ConnString())
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		tx, err := pool.BeginTx(ctx, nil)
		require.NoError(t, err)
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				for n := 0; ; n++ {
					var err error
					switch i {
					case 0:
						_, err = db.InSQLTx(tx).Append(t.Context(), "a-1", eventstore.Any, drafts(t, n))
					case 1:
						err = db.InSQLTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "x"})
					case 2:
						_, err = tx.ExecContext(t.Context(), addSQL, "k", 1)
					case 3:
						for _, e := range db.InSQLTx(tx).ReadStream(t.Context(), "a-1", 0) {
							err = e
						}
					}
					if err != nil {
						if !errors.Is(err, sql.ErrTxDone) {
							t.Error(err)
						}
						return
					}
					if n == 5 && i == 0 {
						cancel()
					}
				}
			})
		}
		all.Wait()
		cancel()
	}
	require.Equal(t, 0, count(t, db, `select count(*) from kinora.events`))
	require.Equal(t, 0, count(t, db, `select count(*) from totals`))
}

// A transaction of another driver is refused before a statement is sent.
// Promise: G1.4
func TestASQLTransactionOfAnotherDriverIsRefused(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
	other, err := sql.Open("sqlite", ":memory:")
	require.NoError(t, err)
	defer other.Close()
	begun, err := other.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer begun.Rollback()
	for _, tx := range []*sql.Tx{nil, begun} {
		view := db.InSQLTx(tx)
		_, err := view.Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
		invalid, ok := errors.AsType[*eventstore.InvalidError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, "tx", invalid.Field)
		require.ErrorIs(t, view.Enqueue(t.Context(), outbox.Message{Topic: "x"}), eventstore.ErrInvalid)
		require.ErrorIs(t, db.SQL().TasksIn(tx).Enqueue(t.Context(), draft("a")), eventstore.ErrInvalid)
		for _, err := range view.ReadStream(t.Context(), "a-1", 0) {
			require.ErrorIs(t, err, eventstore.ErrInvalid)
		}
	}
	require.NoError(t, begun.Rollback())
	_, err = db.InSQLTx(begun).Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
	require.ErrorIs(t, err, sql.ErrTxDone)
}

// statements records the statements that a tracer gets.
type statements struct {
	mu   sync.Mutex
	sent []string
	errs []error
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, q.SQL)
	return ctx
}

func (s *statements) TraceQueryEnd(_ context.Context, _ *pgx.Conn, q pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.Err != nil {
		s.errs = append(s.errs, q.Err)
	}
}

// A tracer sees the statements, and an error only if there is one.
func TestATracerOfASQLTransactionGetsNoError(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
	config, err := pgx.ParseConfig(db.Pool().Config().ConnString())
	require.NoError(t, err)
	traced := &statements{}
	config.Tracer = traced
	pool := stdlib.OpenDB(*config)
	defer pool.Close()
	tx, err := pool.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = db.InSQLTx(tx).Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	require.Empty(t, traced.errs)
	require.Contains(t, strings.Join(traced.sent, ";"), "insert into kinora.events")
	require.NoError(t, tx.Commit())
	require.Empty(t, traced.errs)
}

// The connections of the caller may have another mode than those of the DB.
// Promise: G1.4
func TestASQLTransactionInEachMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
			dsn := db.Pool().Config().ConnString()
			separator := "?"
			if strings.Contains(dsn, "?") {
				separator = "&"
			}
			tx, err := sqlDB(t, dsn+separator+"default_query_exec_mode="+mode).BeginTx(t.Context(), nil)
			require.NoError(t, err)
			view, tasks := db.InSQLTx(tx), db.SQL().TasksIn(tx)
			_, err = view.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			_, err = view.Append(t.Context(), "a-1", 1, drafts(t, 2, 3))
			require.NoError(t, err)
			_, err = view.Append(t.Context(), "a-1", 1, drafts(t, 2, 3))
			require.ErrorIs(t, err, eventstore.ErrConflict)
			require.NoError(t, view.Enqueue(t.Context(), outbox.Message{Topic: "x"}, outbox.Message{Topic: "x", Key: "k", OrderedKey: true}))
			require.NoError(t, tasks.Enqueue(t.Context(), draft("one")))
			require.NoError(t, tasks.Enqueue(t.Context(), draft("two"), draft("three")))
			_, err = tasks.Cancel(t.Context(), "two")
			require.NoError(t, err)
			_, err = tasks.Postpone(t.Context(), "three", time.Now().Add(time.Hour))
			require.NoError(t, err)
			n := 0
			for _, err := range view.ReadStream(t.Context(), "a-1", 0) {
				require.NoError(t, err)
				n++
			}
			require.Equal(t, 3, n)
			require.NoError(t, tx.Commit())
			require.Equal(t, 5, count(t, db, `select count(*) from kinora.outbox`))
		})
	}
}
