package postgres_test

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// The transaction of a handler that does not return is rolled back, even during a statement: its
// marker and the pool's only connection become free.
// Promise: G4.4, G6.4
func TestAStuckHandlersTransactionIsRolledBack(t *testing.T) {
	t.Parallel()
	for name, stuck := range map[string]func(tx pgx.Tx, release chan struct{}){
		"waiting":        func(_ pgx.Tx, release chan struct{}) { <-release },
		"in a statement": func(tx pgx.Tx, _ chan struct{}) { _, _ = tx.Exec(context.Background(), sleepSQL) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil, totals)+"&pool_max_conns=1")
			require.NoError(t, err)
			defer pool.Close()
			db, err := postgres.New(pool, nil)
			require.NoError(t, err)
			w := marked("m")
			ctx, end := patience.Deadline(t)
			began, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				done <- do(ctx, db, w, func(_ context.Context, tx pgx.Tx) ([]outbox.Message, error) {
					if err := add(context.Background(), tx, "k", 100); err != nil {
						return nil, err
					}
					close(began)
					stuck(tx, release)
					if err := add(context.Background(), tx, "k", 100); err == nil {
						t.Error("the handler can still write")
					}
					return nil, nil
				})
			}()
			<-began
			end()
			require.NoError(t, do(patience.Context(t), db, w, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return nil, add(ctx, tx, "k", 1)
			}))
			close(release)
			err = <-done
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotEqual(t, provider.ClassPermanent, provider.ClassOf(err))
			require.Equal(t, 1, count(t, db, `select n from totals where key = 'k'`))
		})
	}
}

// A handler that panics, or returns in time, keeps no connection of the pool.
func TestALateHandlerThatReturnsKeepsNoConnection(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil, totals)+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for _, end := range []func(){func() {}, func() { panic("late") }} {
		ctx, cancel := context.WithCancel(t.Context())
		func() {
			defer func() { _ = recover() }()
			err = do(ctx, db, provider.Unit{Projector: "p"}, func(context.Context, pgx.Tx) ([]outbox.Message, error) {
				cancel()
				end()
				return nil, nil
			})
		}()
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		return nil, add(ctx, tx, "k", 1)
	}))
}

// A handler that waits for a lock ends before its time is over, and its message is not to blame. An operator's lock_timeout
// stays (TestHandlersKeepTheOperatorsLockTimeout).
func TestAHandlerThatWaitsForALockIsNotToBlame(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	_, err := db.Pool().Exec(t.Context(), addSQL, "k", 1)
	require.NoError(t, err)
	other, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Rollback(context.WithoutCancel(t.Context()))) }()
	_, err = other.Exec(t.Context(), addSQL, "k", 1)
	require.NoError(t, err)
	limits := map[time.Duration]string{0: "0", time.Minute: "30s", math.MaxInt64: "2147483647ms"}
	for timeout, want := range limits {
		work := marked("m")
		work.Timeout = timeout
		require.NoError(t, do(t.Context(), db, work, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
			var is string
			err := tx.QueryRow(ctx, `show lock_timeout`).Scan(&is)
			require.Equal(t, want, is)
			return nil, err
		}))
		_, err = db.Pool().Exec(t.Context(), `delete from kinora.markers`)
		require.NoError(t, err)
	}
	work := marked("m")
	work.Timeout = 2 * time.Millisecond // the unit itself has no limit here
	for form, run := range forms {
		err = run(t.Context(), db, work, "k")
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%s: %v", form, err)
		require.Equal(t, "55P03", provider.CodeOf(err), form)
	}
	require.Zero(t, count(t, db, `select count(*) where current_setting('lock_timeout') <> '0'`))
}
