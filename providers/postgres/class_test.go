package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// An error's class depends on its SQLSTATE: errors of the environment are transient, errors of
// the data are permanent, and a violated constraint may be either.
// Promise: G6.1
func TestErrorsAreClassedBySQLSTATE(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for state, want := range map[string]provider.Class{
		"40001": provider.ClassTransient, "40P01": provider.ClassTransient, "55P03": provider.ClassTransient, "53300": provider.ClassTransient,
		"08006": provider.ClassTransient, "57014": provider.ClassTransient, "57P03": provider.ClassTransient,
		"22012": provider.ClassPermanent, "22P02": provider.ClassPermanent, "22021": provider.ClassPermanent,
		"23503": provider.ClassUnknown, "23505": provider.ClassUnknown, "42601": provider.ClassUnknown, "P0001": provider.ClassUnknown,
	} {
		raise := `do $$ begin raise exception 'no' using errcode = '` + state + `'; end $$`
		for name, err := range map[string]error{
			"tx": do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				_, err := tx.Exec(ctx, raise)
				return nil, err
			}),
			"batch": queue(t.Context(), db, provider.Unit{Projector: "p"}, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
				b.Queue(raise)
				return nil, nil
			}),
		} {
			var e *provider.Error
			require.ErrorAs(t, err, &e, "%s %s", name, state)
			code := state
			if state == "40P01" {
				code = provider.CodeDeadlock
			}
			require.Equal(t, []any{want, code}, []any{e.Class, e.Code}, name)
		}
	}
}

// Promise: G6.1
func TestALostServerIsTransient(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	db, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))
	err = do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		_, err := tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		return nil, err
	})
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "a terminated backend: %v", err)
	server.Stop()
	// first the pool's broken connections, then none
	for range 20 {
		err = do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
			_, err := tx.Exec(ctx, `select 1`)
			return nil, err
		})
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "a stopped server: %v", err)
	}
	require.NoError(t, db.Ready(t.Context()), "an unreachable server is not unmigrated")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // wherever it ends
	defer cancel()
	_, err = db.Append(ctx, "a-1", eventstore.Any, drafts(t, 1))
	require.Error(t, err)
}

// Connecting has a separate deadline, which is not the caller's.
// Promise: G6.1
func TestAServerThatDoesNotReplyIsTransient(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = silent.Close() }()
	db := borrowed(t, nil, "postgres://x@"+silent.Addr().String()+"/x?sslmode=disable&connect_timeout=1")
	err = do(t.Context(), db, provider.Unit{Projector: "p"}, nil)
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%v", err)
}

// The caller's deadline may end while the statement runs. Then the result is unknown.
func TestAppendsWhoseContextEndsAreAmbiguous(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from kinora.streams for update`)
	require.NoError(t, err)
	ctx, end := patience.Deadline(t)
	go func() {
		defer end()
		waiting(t, db, 1)
	}()
	_, err = db.Append(ctx, "a-1", 1, drafts(t, 2))
	require.ErrorIs(t, err, eventstore.ErrAmbiguous)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = db.Append(ctx, "a-1", 1, drafts(t, 2))
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous, "no statement was sent")
}

// A server that stops replying must not keep a runner from stopping: the rollback has a separate
// deadline.
func TestARollbackWithoutAReplyGivesUp(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t) // no database of a server is dropped while a process of it is stopped
	db, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	require.NoError(t, db.Migrate(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	var frozen int
	defer func() {
		if frozen > 0 {
			_ = syscall.Kill(frozen, syscall.SIGCONT)
		}
	}()
	err = do(ctx, db, provider.Unit{Projector: "p"}, func(_ context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		if err := tx.QueryRow(t.Context(), `select pg_backend_pid()`).Scan(&frozen); err != nil {
			return nil, err
		}
		// a process of this test's server
		if err := syscall.Kill(frozen, syscall.SIGSTOP); err != nil {
			return nil, err
		}
		cancel()
		return nil, ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled, "although the backend does not go on")
}

// A handler's fault is the same on each try: it must not be mistaken for a network error or a
// lost reply, and tried forever.
// Promise: G6.2
func TestAHandlersOwnFaultIsCounted(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil, totals)+"&idle_in_transaction_session_timeout=300")
	do := func(handler func(ctx context.Context, tx pgx.Tx) error) error {
		return do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
			return nil, handler(ctx, tx)
		})
	}
	tooLarge := func() error {
		w := marked("m")
		return queue(t.Context(), db, w, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
			b.Queue(`insert into totals values ('k', $1::int4)`, int64(1)<<40)
			return nil, nil
		})
	}
	for what, err := range map[string]error{
		"rows that stay open": do(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, `select generate_series(1, 10)`)
			return err
		}),
		"idle for too long": do(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `insert into totals values ('k', 1)`)
			gone := fmt.Sprintf(`select count(*) from pg_stat_activity where pid = %d`, tx.Conn().PgConn().PID())
			patience.Until(t, func() bool { return count(t, db, gone) == 0 }, "the end of the session")
			return err
		}),
		"rows to copy that cannot be encoded": do(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"totals"}, []string{"key", "n"}, pgx.CopyFromRows([][]any{{"k", "no number"}}))
			return err
		}),
		"rows to copy that cannot be read": do(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"totals"}, []string{"key", "n"},
				pgx.CopyFromFunc(func() ([]any, error) { return nil, errors.New("the file is broken") }))
			return err
		}),
		"an argument that cannot be encoded":           tooLarge(),
		"an argument that cannot be encoded, prepared": tooLarge(),
	} {
		require.Equal(t, provider.ClassUnknown, provider.ClassOf(err), "%s: %v", what, err)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
}

// If no connection can be opened, no message is to blame, and no statement was sent.
// Promise: G6.1
func TestNoConnectionIsNotTheMessagesFault(t *testing.T) {
	t.Parallel()
	refused := errors.New("the token service is away")
	made := 0
	db := borrowed(t, nil, postgrestest.DSN(t, nil, totals)+"&pool_max_conns=2", func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if made++; made > 1 {
				return refused
			}
			return nil
		}
	})
	conn, err := db.Pool().Acquire(t.Context())
	require.NoError(t, err)
	w := marked("m")
	err = do(t.Context(), db, w, nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%v", err)
	err = queue(t.Context(), db, w, nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%v", err)
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.ErrorIs(t, err, refused)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
	conn.Release()
}

// If the server refuses one of Kinora's statements, no message is to blame.
func TestErrorsOfKinorasStatementsAreTransient(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ trouble, state string }{
		"no table":      {`alter table kinora.markers rename to elsewhere`, "42P01"},
		"no constraint": {`alter table kinora.markers rename constraint markers_pkey to elsewhere`, "42704"},
		"a broken index": {`
			create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no' using errcode = 'XX002'; end $$;
			create trigger refuse before insert on kinora.markers for each row execute function refuse()`, "XX002"},
		"no right": {`set role pg_monitor`, "42501"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := postgrestest.DSN(t, nil, totals)
			for _, mode := range []string{"", "&default_query_exec_mode=exec", "&default_query_exec_mode=simple_protocol"} {
				db := borrowed(t, nil, dsn+"&pool_max_conns=1"+mode)
				if mode == "" || c.state == "42501" {
					_, err := db.Pool().Exec(t.Context(), c.trouble)
					require.NoError(t, err)
				}
				w := marked("m")
				all := map[string]error{"tx": do(t.Context(), db, w, nil)}
				// a batch fails only at a duplicate
				if c.state != "42704" {
					all["batch"] = queue(t.Context(), db, w, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
						b.Queue(addSQL, "k", 1)
						return nil, nil
					})
				}
				for name, err := range all {
					var e *provider.Error
					require.ErrorAs(t, err, &e)
					require.Equal(t, []any{provider.ClassTransient, c.state}, []any{e.Class, e.Code}, "%s%s: %v", name, mode, err)
				}
			}
		})
	}
}

// If the server refuses a handler's statement in a batch, the handler is to blame, at any
// position.
func TestErrorsOfQueuedStatementsAreTheHandlers(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, totals)
	for _, mode := range []string{"", "&default_query_exec_mode=exec", "&default_query_exec_mode=simple_protocol"} {
		db := borrowed(t, nil, dsn+mode)
		for statement, state := range map[string]string{
			"insert into nowhere values (1)":         "42P01",
			"insrt":                                  "42601",
			"insert into totals (key) values (null)": "23502",
		} {
			w := marked("m")
			err := queue(t.Context(), db, w, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
				b.Queue(addSQL, "k", 1)
				b.Queue(statement)
				return nil, nil
			})
			var e *provider.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, []any{provider.ClassUnknown, state}, []any{e.Class, e.Code}, "%s%s: %v", statement, mode, err)
		}
	}
}

// If the server ended a session because of its transaction's length, nothing was committed. A
// lost reply to a commit leaves that open.
func TestWhichLostCommitsAreAmbiguous(t *testing.T) {
	t.Parallel()
	for state, want := range map[string]bool{"25P03": false, "25P04": false, "57P01": true, "08006": true} {
		require.Equal(t, want, postgres.IsAmbiguous(fmt.Errorf("send: %w", &pgconn.PgError{Severity: "FATAL", Code: state})), state)
	}
}

// A unit whose marker exists needs a second round trip, for which there may be no connection.
func TestNoConnectionForTheSecondTripIsNotTheMessagesFault(t *testing.T) {
	t.Parallel()
	refused := errors.New("the token service is away")
	dsn := postgrestest.DSN(t, nil) + "&pool_max_conns=1"
	var made atomic.Int32
	db := borrowed(t, nil, dsn, func(c *pgxpool.Config) {
		c.AfterRelease = func(*pgx.Conn) bool { return false }
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if made.Add(1) > 1 {
				return refused
			}
			return nil
		}
	})
	require.NoError(t, queue(t.Context(), borrowed(t, nil, dsn), marked("m"), nil))
	err := queue(t.Context(), db, marked("m"), nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%v", err)
}

// The time of queued statements counts as the handlers' time: a unit that takes too long counts,
// and the error names the message. This holds in one round trip and in two.
func TestABatchThatTakesTooLongCounts(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for name, once := range map[string]bool{"one trip": false, "two trips": true} {
		u := marked(name+" before", name)
		u.Once = once
		ctx, end := patience.Deadline(t)
		begin := time.Now()
		go func() {
			defer end()
			asleep(t, db, 1)
			time.Sleep(time.Since(begin)) // so that the statement takes longer than the wait for its connection
		}()
		err := db.Batched().Do(ctx, u, func(_ context.Context, b *pgx.Batch, found provider.Found) (provider.Closing, error) {
			found.Begin(0)
			b.Queue(addSQL, "k", 1)
			found.Begin(1)
			b.Queue(sleepSQL)
			return provider.Closing{}, nil
		})
		require.Equal(t, []any{provider.ClassUnknown, provider.CodeDeadline}, []any{provider.ClassOf(err), provider.CodeOf(err)}, "%s: %v", name, err)
		var of *provider.MessageError
		require.ErrorAs(t, err, &of, name)
		require.Equal(t, 1, of.Message, name)
		asleep(t, db, 0)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
	require.Zero(t, count(t, db, `select count(*) from kinora.markers`))
}

// An append that got no connection is not ambiguous.
func TestAnAppendThatIsNotSentIsNotAmbiguous(t *testing.T) {
	t.Parallel()
	db, err := postgres.Open(t.Context(), postgrestest.DSN(t, nil)+"&pool_max_conns=1", nil)
	require.NoError(t, err)
	conn, err := db.Pool().Acquire(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = db.Append(ctx, "a-1", eventstore.NoStream, drafts(t, 1))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
	conn.Release()
	db.Close()
	_, err = db.Append(patience.Context(t), "a-1", eventstore.NoStream, drafts(t, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
}

// A pool may get its password or host when it connects.
func TestMigrateConnectsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil), func(c *pgxpool.Config) {
		right := c.ConnConfig.Database
		c.ConnConfig.Database = "nowhere"
		c.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
			c.Database = right
			return nil
		}
	})
	require.NoError(t, db.Migrate(t.Context()))
}

// The pool's preparation of new connections, such as setting a role, applies to those of Migrate
// too. Otherwise the tables would have another owner.
func TestMigratePreparesConnectionsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	prepared := 0
	db := borrowed(t, nil, server.DSN, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			prepared++
			_, err := conn.Exec(ctx, `set role keeper`)
			return err
		}
	})
	plain := borrowed(t, nil, server.DSN)
	_, err := plain.Pool().Exec(t.Context(), `create role keeper; do $$ begin execute format('grant create on database %I to keeper', current_database()); end $$`)
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context()))
	require.Positive(t, prepared, "the connection of Migrate")
	require.Zero(t, count(t, plain, `select count(*) from pg_tables where schemaname = 'kinora' and tableowner <> 'keeper'`))
	require.Positive(t, count(t, plain, `select count(*) from pg_tables where schemaname = 'kinora'`))
}

// Connecting has a limit even if the configuration has none, as for the pool's connections.
func TestConnectionsOutsideThePoolHaveALimit(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]time.Duration{"postgres://x/x": 2 * time.Minute, "postgres://x/x?connect_timeout=7": 7 * time.Second} {
		config, err := pgxpool.ParseConfig(dsn)
		require.NoError(t, err)
		c, err := postgres.ConnConfig(t.Context(), config)
		require.NoError(t, err)
		require.Equal(t, want, c.ConnectTimeout, dsn)
	}
}
