package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// A caller's transaction is usable after a conflict, a repeat and a reused id, and has nothing of
// them.
// Promise: G1.2
func TestAStaleVersionIsAConflict(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, totals)
	first := drafts(t, 1, 2)
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, first)
	require.NoError(t, err)
	err = pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
		view := db.InTx(tx)
		_, err := view.Append(t.Context(), "a-1", 1, drafts(t, 3))
		var conflict *eventstore.ConflictError
		require.ErrorAs(t, err, &conflict)
		require.Equal(t, eventstore.ConflictError{Stream: "a-1", Expected: 1, Actual: 2}, *conflict)
		at, err := view.Append(t.Context(), "a-1", eventstore.NoStream, first)
		require.NoError(t, err)
		require.True(t, at.Replayed)
		_, err = view.Append(t.Context(), "a-2", eventstore.Any, first)
		require.ErrorIs(t, err, eventstore.ErrEventIDReused)
		_, err = view.Append(t.Context(), "a-2", 1, drafts(t, 3))
		require.ErrorIs(t, err, eventstore.ErrConflict, "a version above 0 of a stream that does not exist")
		return add(t.Context(), tx, "mine", 7)
	})
	require.NoError(t, err)
	require.Equal(t, 7, count(t, db, `select n from totals where key = 'mine'`))
	require.Equal(t, 2, count(t, db, `select count(*) from kinora.events`))
	require.Equal(t, 2, count(t, db, `select count(*) from kinora.outbox`))
	require.Equal(t, 1, count(t, db, `select count(*) from kinora.streams`))
}

// If a handler continues after an SQL error, the server replies ROLLBACK to COMMIT, without an
// error.
// Promise: G4.4
func TestASwallowedSQLErrorIsAnError(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	err := do(t.Context(), db, marked("m"),
		func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
			require.NoError(t, add(ctx, tx, "k", 1))
			_, _ = tx.Exec(ctx, "select 1/0")
			return nil, nil
		})
	var e *provider.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []any{provider.ClassUnknown, "25P02"}, []any{e.Class, e.Code})
	require.Zero(t, count(t, db, `select count(*) from kinora.markers`))
}

// Promise: G4.4
func TestAHandlersCommitAndRollbackAreRefused(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	err := do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		require.ErrorIs(t, tx.Commit(ctx), postgres.ErrHeld)
		require.ErrorIs(t, tx.Rollback(ctx), postgres.ErrHeld)
		for _, sql := range []string{"commit", " ROLLBACK and chain", "end", "abort", "prepare transaction 'x'"} {
			_, err := tx.Exec(ctx, sql)
			require.ErrorIs(t, err, postgres.ErrHeld, sql)
		}
		for _, sql := range []string{"savepoint s", "rollback to savepoint s", "select 'commit'"} {
			_, err := tx.Exec(ctx, sql)
			require.NoError(t, err, sql)
		}
		inner, err := tx.Begin(ctx)
		require.NoError(t, err, "handlers can use savepoints")
		require.NoError(t, add(ctx, inner, "undone", 1))
		require.NoError(t, inner.Rollback(ctx))
		return nil, add(ctx, tx, "k", 1)
	})
	require.NoError(t, err)
	require.Equal(t, 1, count(t, db, `select count(*) from totals`))
}

func TestUnitsRunAtReadCommittedWhateverTheDefault(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil, totals)+"&default_transaction_isolation=serializable")
	require.ErrorIs(t, db.Ready(t.Context()), postgres.ErrIsolation, "statements outside a unit cannot set it")
	require.NoError(t, do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		var level string
		err := tx.QueryRow(ctx, "show transaction_isolation").Scan(&level)
		require.Equal(t, "read committed", level)
		return nil, err
	}))
}

// One connection is enough: no call waits for a second one while it holds the first.
func TestPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	cfg := &postgres.Config{Route: outbox.ByCategory}
	db := borrowed(t, cfg, postgrestest.DSN(t, cfg, totals)+"&pool_max_conns=1")
	require.NoError(t, db.Migrate(t.Context()))
	_, err := db.Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
	require.NoError(t, err)
	for range db.ReadStream(t.Context(), "a-1", 0) {
		_, err = db.Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
		require.NoError(t, err)
	}
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			work := marked(fmt.Sprint(i % 5))
			if err := do(t.Context(), db, work, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return []outbox.Message{{Topic: "t"}}, add(ctx, tx, "k", 1)
			}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Equal(t, 5, count(t, db, `select n from totals`))
	entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, terms(t))
	require.NoError(t, err)
	require.Len(t, entries, 7)
	marks := make([]outbox.Mark, len(entries))
	for i, e := range entries {
		marks[i] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
	}
	_, err = db.MarkEntries(t.Context(), marks)
	require.NoError(t, err)
}

func TestMigratorsAtOnceInTwoSchemas(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, &postgres.Config{Schema: "unused"})
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			db, err := postgres.Open(t.Context(), dsn, &postgres.Config{Schema: []string{"kinora", "shop"}[i%2]})
			if err != nil {
				t.Error(err)
				return
			}
			defer db.Close()
			if err := errors.Join(db.Migrate(t.Context()), db.Migrate(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	shop, err := postgres.Open(t.Context(), dsn, &postgres.Config{Schema: "shop", Route: outbox.ByCategory})
	require.NoError(t, err)
	defer shop.Close()
	_, err = shop.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	require.Equal(t, 1, count(t, shop, `select count(*) from shop.events`))
	require.Equal(t, 1, count(t, shop, `select count(*) from shop.outbox`))
	require.Zero(t, count(t, shop, `select count(*) from kinora.events`))
}

// MigrationSQL does the same as Migrate, and Migrate adds nothing to it.
func TestMigrationSQLByHand(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, &postgres.Config{Schema: "unused"})
	db, err := postgres.Open(t.Context(), dsn, &postgres.Config{Schema: "shop"})
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.ErrorIs(t, err, postgres.ErrNotMigrated)
	require.ErrorIs(t, do(t.Context(), db, marked("1"), nil), postgres.ErrNotMigrated)
	_, err = db.StatusCounts(t.Context())
	require.ErrorIs(t, err, postgres.ErrNotMigrated)
	require.ErrorIs(t, db.Ready(t.Context()), postgres.ErrNotMigrated)
	_, err = db.Pool().Exec(t.Context(), script(t, postgres.MigrationSQL, "shop"))
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context()))
	require.NoError(t, db.Ready(t.Context()))
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
}

// An append is durable when it returns, whatever the session's synchronous_commit.
// Promise: G1.14
func TestAppendForcesDurability(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, "wal_writer_delay=10s", "autovacuum=off")
	db, err := postgres.Open(t.Context(), server.DSN+"&synchronous_commit=off&pool_max_conns=1", nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))
	behind := func(statement func()) bool {
		var at string
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select pg_current_wal_insert_lsn()::text`).Scan(&at))
		statement()
		var flushed bool
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select pg_current_wal_flush_lsn() > $1::pg_lsn`, at).Scan(&flushed))
		return !flushed
	}
	require.True(t, behind(func() {
		_, err := db.Pool().Exec(t.Context(), `insert into kinora.generations values ('x', 1, 1, 'live', '{}', now(), now())`)
		require.NoError(t, err)
	}), "as a control: another statement's commit does not wait")
	require.False(t, behind(func() {
		_, err := db.Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
		require.NoError(t, err)
	}))
	var setting string
	require.NoError(t, db.Pool().QueryRow(t.Context(), `show synchronous_commit`).Scan(&setting))
	require.Equal(t, "off", setting, "it is forced only for the append")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := postgres.New(nil, nil)
	require.Error(t, err)
	pool, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil))
	require.NoError(t, err)
	defer pool.Close()
	for _, schema := range []string{`a"b`, "a;--", "A", "é", "a b", "pg-x", fmt.Sprintf("%064d", 1)} {
		_, err = postgres.New(pool, &postgres.Config{Schema: schema})
		require.ErrorIs(t, err, eventstore.ErrInvalid, schema)
	}
	_, err = postgres.New(pool, &postgres.Config{RequeueWindow: -1})
	require.ErrorContains(t, err, "RequeueWindow")
	_, err = postgres.New(pool, &postgres.Config{MaxPayload: -1})
	require.Error(t, err)
	_, err = postgres.Open(t.Context(), "postgres://ann:hunter2@127.0.0.1:1/x?connect_timeout=1", nil)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
}

func TestHandlersKeepTheOperatorsLockTimeout(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil)+"&lock_timeout=3s") // nothing waits for a lock
	work := marked("1")
	require.NoError(t, do(t.Context(), db, work, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		var limit string
		err := tx.QueryRow(ctx, "show lock_timeout").Scan(&limit)
		require.Equal(t, "3s", limit)
		return nil, err
	}))
}

// Marks of the same entries in crossing order wait for each other and do not deadlock.
func TestCrossingMarksDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	fill(t, db, 400, 400)
	at := terms(t)
	at.Limit = 400
	entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, at)
	require.NoError(t, err)
	forth := make([]outbox.Mark, len(entries))
	for i, e := range entries {
		forth[i] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Claimed, After: 1}
	}
	back := slices.Clone(forth)
	slices.Reverse(back)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for range 10 {
				if _, err := db.MarkEntries(t.Context(), [][]outbox.Mark{forth, back}[i%2]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}
