package sqlkits_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
	"github.com/kinora-go/kinora/tests/sqlkits"
)

func TestMain(m *testing.M) {
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"),
		// GORM's cache of prepared statements never ends
		goleak.IgnoreAnyFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

type posted struct {
	Product string
	Stars   int
}

var types = eventstore.NewTypes(eventstore.Type[posted]("review.posted"))

// kit is a way to use a database.
type kit interface {
	Transact(ctx context.Context, pool *sql.DB, fn func(tx *sql.Tx) error) error
	Add(ctx context.Context, tx *sql.Tx, product string, stars int) error
	Get(ctx context.Context, tx *sql.Tx, product string) (sqlkits.Rating, error)
}

func each(t *testing.T, test func(t *testing.T, db *postgres.DB, pool *sql.DB, k kit)) {
	t.Parallel()
	for name, k := range map[string]kit{
		"sqlx": sqlkits.NewSQLX(), "gorm": sqlkits.GORM{}, "gorm with prepared statements": sqlkits.GORM{Prepared: true}, "sqlc": sqlkits.SQLC{},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, sqlkits.Schema)
			pool := stdlib.OpenDBFromPool(db.Pool()) // the service's *sql.DB
			t.Cleanup(func() { pool.Close() })
			test(t, db, pool, k)
		})
	}
}

func count(t *testing.T, db *postgres.DB, query string) (n int) {
	t.Helper()
	require.NoError(t, db.Pool().QueryRow(t.Context(), query).Scan(&n))
	return n
}

func rating(t *testing.T, pool *sql.DB, k kit, product string) (r sqlkits.Rating) {
	t.Helper()
	require.NoError(t, k.Transact(t.Context(), pool, func(tx *sql.Tx) (err error) {
		r, err = k.Get(t.Context(), tx, product)
		return err
	}))
	return r
}

// A write of the kit, an event with its entry, a message and a task commit together or not at all.
// Promise: G1.1, G1.4
func TestAWriteAnEventAMessageAndATaskAreOneTransaction(t *testing.T) {
	each(t, func(t *testing.T, db *postgres.DB, pool *sql.DB, k kit) {
		definition := task.DefineTx("reviews/count", func(ctx context.Context, tx *sql.Tx, product string) (int, []outbox.Message, error) {
			err := k.Add(ctx, tx, product, 0)
			return 1, nil, err
		})
		refused := errors.New("refused")
		post := func(end error) error {
			return k.Transact(t.Context(), pool, func(tx *sql.Tx) error {
				if err := k.Add(t.Context(), tx, "lamp", 5); err != nil {
					return err
				}
				drafts, err := types.Encode(t.Context(), posted{"lamp", 5})
				if err != nil {
					return err
				}
				if _, err := db.InSQLTx(tx).Append(t.Context(), "review-lamp", eventstore.NoStream, drafts); err != nil {
					return err
				}
				if err := db.InSQLTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "mail", Payload: []byte("thanks")}); err != nil {
					return err
				}
				if err := db.SQL().TasksIn(tx).Enqueue(t.Context(), definition.New("count-lamp", "chair")); err != nil {
					return err
				}
				return end
			})
		}
		const stored = `select (select count(*) from ratings) * 1000 + (select count(*) from kinora.events) * 100
			+ (select count(*) from kinora.outbox) * 10 + (select count(*) from kinora.tasks)`
		require.ErrorIs(t, post(refused), refused)
		require.Equal(t, 0, count(t, db, stored))
		require.NoError(t, post(nil))
		require.Equal(t, 1121, count(t, db, stored))
		require.ErrorIs(t, post(nil), eventstore.ErrConflict)
		require.Equal(t, 1121, count(t, db, stored))
		require.Equal(t, sqlkits.Rating{Product: "lamp", Reviews: 1, Stars: 5}, rating(t, pool, k, "lamp"))

		// the task is a transaction of the kit too
		db.Wake()
		worker, err := task.NewWorker(db.SQL(), task.WorkerConfig{Logger: slog.New(slog.DiscardHandler)}, definition)
		require.NoError(t, err)
		group, err := kinora.Start(t.Context(), worker)
		require.NoError(t, err)
		patience.Until(t, func() bool { return count(t, db, `select count(*) from ratings where product = 'chair'`) == 1 }, "the task")
		require.NoError(t, group.Stop())
		require.Equal(t, 1, rating(t, pool, k, "chair").Reviews)
	})
}

// A projector whose handler uses the kit. Each event takes effect once, although the handler fails
// after some of its writes. The handler appends an event of its own.
// Promise: G4.5
func TestAProjectorOfEachKit(t *testing.T) {
	each(t, func(t *testing.T, db *postgres.DB, pool *sql.DB, k kit) {
		var runs atomic.Int64
		ratings := projector.Define("ratings", types, projector.Options{},
			projector.On("posted", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[posted]) error {
				if err := k.Add(ctx, tx, e.Data.Product, e.Data.Stars); err != nil {
					return err
				}
				if _, err := k.Get(ctx, tx, e.Data.Product); err != nil {
					return err
				}
				if err := db.InSQLTx(tx).Enqueue(ctx, outbox.Message{Topic: "rated", Key: e.Data.Product}); err != nil {
					return err
				}
				if runs.Add(1)%4 == 2 {
					return errors.New("this handler fails sometimes, after its writes")
				}
				return nil
			}))
		runner, err := projector.NewRunner(db.SQL(), projector.FromLog(db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, ratings)
		require.NoError(t, err)
		group, err := kinora.Start(t.Context(), runner)
		require.NoError(t, err)
		var last eventstore.Appended
		for range 6 {
			drafts, err := types.Encode(t.Context(), posted{"lamp", 4})
			require.NoError(t, err)
			require.NoError(t, k.Transact(t.Context(), pool, func(tx *sql.Tx) (err error) {
				last, err = db.InSQLTx(tx).Append(t.Context(), "review-lamp", eventstore.Any, drafts)
				return err
			}))
			db.Wake()
		}
		require.NoError(t, ratings.Wait(t.Context(), db, last))
		require.NoError(t, group.Stop())
		require.Greater(t, runs.Load(), int64(6))
		require.Equal(t, sqlkits.Rating{Product: "lamp", Reviews: 6, Stars: 24}, rating(t, pool, k, "lamp"))
		require.Equal(t, 6, count(t, db, `select count(*) from kinora.outbox where topic = 'rated'`))
	})
}

// lib/pq is another driver: its transaction is refused before a statement is sent, and stays usable.
// Promise: G1.4
func TestATransactionOfAnotherDriverIsRefused(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, sqlkits.Schema)
	pool, err := sql.Open("postgres", db.Pool().Config().ConnString())
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, sqlkits.SQLC{}.Transact(t.Context(), pool, func(tx *sql.Tx) error {
		drafts, err := types.Encode(t.Context(), posted{"lamp", 5})
		require.NoError(t, err)
		_, err = db.InSQLTx(tx).Append(t.Context(), "review-lamp", eventstore.Any, drafts)
		require.ErrorIs(t, err, eventstore.ErrInvalid)
		require.ErrorContains(t, err, "pgx/v5/stdlib")
		require.ErrorIs(t, db.InSQLTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "x"}), eventstore.ErrInvalid)
		return sqlkits.SQLC{}.Add(t.Context(), tx, "lamp", 5)
	}))
	require.Equal(t, 1, count(t, db, `select count(*) from ratings`))
	require.Equal(t, 0, count(t, db, `select count(*) from kinora.events`))
}
