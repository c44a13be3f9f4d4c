package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// An error's class is read from its SQLSTATE: what the world did is transient, what the data is is permanent,
// and a breach of a constraint may be either.
func TestErrorsAreClassedBySQLSTATE(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for state, want := range map[string]projector.Class{
		"40001": projector.Transient, "40P01": projector.Transient, "55P03": projector.Transient, "53300": projector.Transient,
		"08006": projector.Transient, "57014": projector.Transient, "57P03": projector.Transient,
		"22012": projector.PermanentClass, "22P02": projector.PermanentClass, "22021": projector.PermanentClass,
		"23503": projector.UnknownClass, "23505": projector.UnknownClass, "42601": projector.UnknownClass, "P0001": projector.UnknownClass,
	} {
		raise := `do $$ begin raise exception 'no' using errcode = '` + state + `'; end $$`
		for name, err := range map[string]error{
			"tx": db.Do(t.Context(), projector.Work{Projector: "p"}, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
				_, err := tx.Exec(ctx, raise)
				return nil, err
			}),
			"batch": db.Batched().Do(t.Context(), projector.Work{Projector: "p"}, func(_ context.Context, b *pgx.Batch, _ []int) ([]outbox.Message, error) {
				b.Queue(raise)
				return nil, nil
			}),
		} {
			var e *projector.Error
			require.ErrorAs(t, err, &e, "%s %s", name, state)
			require.Equal(t, []any{want, state}, []any{e.Class, e.Code}, name)
		}
	}
}

func TestALostServerIsTransient(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	db, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))
	err = db.Do(t.Context(), projector.Work{Projector: "p"}, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
		_, err := tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		return nil, err
	})
	require.Equal(t, projector.Transient, projector.ClassOf(err), "a terminated backend: %v", err)
	server.Stop()
	for range 20 { // first the pool's connections that broke, then none to be had
		err = db.Do(t.Context(), projector.Work{Projector: "p"}, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
			_, err := tx.Exec(ctx, `select 1`)
			return nil, err
		})
		require.Equal(t, projector.Transient, projector.ClassOf(err), "a stopped server: %v", err)
	}
	require.NoError(t, db.Ready(t.Context()), "away is not unmigrated")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = db.Append(ctx, "a-1", eventstore.Any, drafts(t, 1))
	require.Error(t, err)
}

// Connecting has a deadline of its own, which is not the caller's.
func TestAServerThatDoesNotAnswerIsTransient(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = silent.Close() }()
	db := borrowed(t, nil, "postgres://x@"+silent.Addr().String()+"/x?sslmode=disable&connect_timeout=1")
	err = db.Do(t.Context(), projector.Work{Projector: "p"}, nil)
	require.Equal(t, projector.Transient, projector.ClassOf(err), "%v", err)
}

// The caller's own deadline may come when the statement is under way: nobody knows what became of it.
func TestAppendsCutOffAreAmbiguous(t *testing.T) {
	t.Parallel()
	db, _ := private(t)
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from kinora.streams for update`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = db.Append(ctx, "a-1", 1, drafts(t, 2))
	require.ErrorIs(t, err, eventstore.ErrAmbiguous)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = db.Append(ctx, "a-1", 1, drafts(t, 2))
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous, "nothing was sent")
}

// A server that stops answering must not keep a runner from stopping: the rollback has a deadline of its own.
func TestARollbackThatNobodyAnswersGivesUp(t *testing.T) {
	t.Parallel()
	db, _ := private(t)
	ctx, cancel := context.WithCancel(t.Context())
	begin := time.Now()
	var frozen int
	defer func() {
		if frozen > 0 {
			_ = syscall.Kill(frozen, syscall.SIGCONT)
		}
	}()
	err := db.Do(ctx, projector.Work{Projector: "p"}, func(_ context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
		if err := tx.QueryRow(t.Context(), `select pg_backend_pid()`).Scan(&frozen); err != nil {
			return nil, err
		}
		if err := syscall.Kill(frozen, syscall.SIGSTOP); err != nil { // a process of this test's own server
			return nil, err
		}
		cancel()
		return nil, ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, time.Since(begin), 15*time.Second)
}

// What a handler does wrong is the same each time: it must not be taken for a network or a reply that was lost, and be tried for ever.
func TestAHandlersOwnFaultIsCounted(t *testing.T) {
	t.Parallel()
	db := borrowed(t, nil, postgrestest.DSN(t, nil, totals)+"&idle_in_transaction_session_timeout=300")
	do := func(handler func(ctx context.Context, tx pgx.Tx) error) error {
		return db.Do(t.Context(), projector.Work{Projector: "p"}, func(ctx context.Context, tx pgx.Tx, _ []int) ([]outbox.Message, error) {
			return nil, handler(ctx, tx)
		})
	}
	tooLarge := func() error {
		w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "m"}}}
		return db.Batched().Do(t.Context(), w, func(_ context.Context, b *pgx.Batch, _ []int) ([]outbox.Message, error) {
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
			require.Eventually(t, func() bool { return count(t, db, gone) == 0 }, 10*time.Second, 10*time.Millisecond)
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
		"what cannot be encoded":                         tooLarge(),
		"what cannot be encoded, once more, so prepared": tooLarge(),
	} {
		require.Equal(t, projector.UnknownClass, projector.ClassOf(err), "%s: %v", what, err)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
}

// Where there is no connection to be had, whatever the reason, no message is to blame, and nothing was sent.
func TestNoConnectionIsNobodysFault(t *testing.T) {
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
	w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "m"}}}
	err = db.Do(t.Context(), w, nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, projector.Transient, projector.ClassOf(err), "%v", err)
	err = db.Batched().Do(t.Context(), w, nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, projector.Transient, projector.ClassOf(err), "%v", err)
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.ErrorIs(t, err, refused)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
	conn.Release()
}

// What the server refuses of Kinora's own statements, it refuses whatever the message.
func TestKinorasOwnTroubleIsNobodysFault(t *testing.T) {
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
				w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "m"}}}
				all := map[string]error{"tx": db.Do(t.Context(), w, nil)}
				if c.state != "42704" { // which a batch meets at a duplicate alone
					all["batch"] = db.Batched().Do(t.Context(), w, func(_ context.Context, b *pgx.Batch, _ []int) ([]outbox.Message, error) {
						b.Queue(addSQL, "k", 1)
						return nil, nil
					})
				}
				for name, err := range all {
					var e *projector.Error
					require.ErrorAs(t, err, &e)
					require.Equal(t, []any{projector.Transient, c.state}, []any{e.Class, e.Code}, "%s%s: %v", name, mode, err)
				}
			}
		})
	}
}

// What the server refuses of a handler's statements in a batch is its own, at whichever place.
func TestABatchsTroubleIsItsHandlers(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, totals)
	for _, mode := range []string{"", "&default_query_exec_mode=exec", "&default_query_exec_mode=simple_protocol"} {
		db := borrowed(t, nil, dsn+mode)
		for statement, state := range map[string]string{
			"insert into nowhere values (1)":         "42P01",
			"insrt":                                  "42601",
			"insert into totals (key) values (null)": "23502",
		} {
			w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "m"}}}
			err := db.Batched().Do(t.Context(), w, func(_ context.Context, b *pgx.Batch, _ []int) ([]outbox.Message, error) {
				b.Queue(addSQL, "k", 1)
				b.Queue(statement)
				return nil, nil
			})
			var e *projector.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, []any{projector.UnknownClass, state}, []any{e.Class, e.Code}, "%s%s: %v", statement, mode, err)
		}
	}
}

// A session that the server ended for its transaction's length has committed nothing, where the reply of a commit that was lost says nothing.
func TestWhatIsInDoubt(t *testing.T) {
	t.Parallel()
	for state, want := range map[string]bool{"25P03": false, "25P04": false, "57P01": true, "08006": true} {
		require.Equal(t, want, postgres.InDoubt(fmt.Errorf("send: %w", &pgconn.PgError{Severity: "FATAL", Code: state})), state)
	}
}

// A mark that is there already wants a second look, for which there may be no connection.
func TestNoConnectionForTheSecondLookIsNobodysFault(t *testing.T) {
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
	w := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", MessageID: "m"}}}
	require.NoError(t, borrowed(t, nil, dsn).Batched().Do(t.Context(), w, nil))
	err := db.Batched().Do(t.Context(), w, nil)
	require.ErrorContains(t, err, "read outcomes")
	require.ErrorIs(t, err, refused)
	require.Equal(t, projector.Transient, projector.ClassOf(err), "%v", err)
}

// What a handler has queued has the handler's time, and counts where it takes longer. What takes long of others is nobody's fault.
func TestABatchThatTakesTooLongIsParked(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, noteTables)
	_, err := db.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n) values (1, 'm', 'k', 7), (1, 'next', 'l', 1)`)
	require.NoError(t, err)
	p := projector.Define("noted", notes, projector.Options{Markers: true},
		projector.On("noted", func(_ context.Context, b *pgx.Batch, e eventstore.Event[noted]) error {
			b.Queue(`insert into sums values ($1, $2)`, e.Data.Key, e.Data.N)
			if e.Data.N == 7 {
				b.Queue(`select pg_sleep(30)`)
			}
			return nil
		}))
	cfg := &projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler), Timeout: 200 * time.Millisecond}
	cfg.Retry.Base, cfg.Retry.Max, cfg.Retry.Attempts = time.Millisecond, 5*time.Millisecond, 3
	var last atomic.Pointer[error]
	cfg.Observer.Handled = func(_ string, _ bool, _, _ time.Duration, err error) { last.Store(&err) }
	runner, err := projector.NewRunner(db.Batched(), projector.Subscribe(&tableBroker{db.Pool(), 1, true}, "notes"), cfg, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- runner.Run(ctx) }()
	require.Eventually(t, func() bool { return count(t, db, `select count(*) from broker where not acked`) == 0 }, 20*time.Second, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	parked, err := db.ParkedMessages(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, parked, 1)
	require.Equal(t, []any{"m", projector.UnknownClass, projector.DeadlineCode, 3},
		[]any{parked[0].MessageID, parked[0].Class, parked[0].Code, parked[0].Attempts})
	require.Equal(t, 1, count(t, db, `select count(*) from kinora.markers`))
	require.Equal(t, 1, count(t, db, `select sum(n) from sums`))
	replayed, err := runner.Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: projector.Decision{By: "test", Reason: "again"}})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Failed: 1}, replayed)
	e, ok := errors.AsType[*projector.Error](*last.Load())
	require.True(t, ok, "brought back, it is sent inside a transaction: %v", *last.Load())
	require.Equal(t, []any{projector.UnknownClass, projector.DeadlineCode}, []any{e.Class, e.Code}, "%v", e)
}

// An append that got no connection is not in doubt.
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
	begin := time.Now()
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
	require.Less(t, time.Since(begin), time.Second)
}

// A pool may learn its password, or its host, as it connects.
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

// What a pool does with new connections, such as to take a role, is done with those of Migrate, which else made the tables somebody else's.
func TestMigrateSettlesConnectionsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	settled := 0
	db := borrowed(t, nil, server.DSN, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			settled++
			_, err := conn.Exec(ctx, `set role keeper`)
			return err
		}
	})
	plain := borrowed(t, nil, server.DSN)
	_, err := plain.Pool().Exec(t.Context(), `create role keeper; do $$ begin execute format('grant create on database %I to keeper', current_database()); end $$`)
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context()))
	require.GreaterOrEqual(t, settled, 2, "that of the lock, and that of the tables")
	require.Zero(t, count(t, plain, `select count(*) from pg_tables where schemaname = 'kinora' and tableowner <> 'keeper'`))
	require.Positive(t, count(t, plain, `select count(*) from pg_tables where schemaname = 'kinora'`))
}

// Connecting has a limit also where nobody has set one, as the pool's own connections have.
func TestConnectionsBesideThePoolHaveALimit(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]time.Duration{"postgres://x/x": 2 * time.Minute, "postgres://x/x?connect_timeout=7": 7 * time.Second} {
		config, err := pgxpool.ParseConfig(dsn)
		require.NoError(t, err)
		c, err := postgres.ConnConfig(t.Context(), config)
		require.NoError(t, err)
		require.Equal(t, want, c.ConnectTimeout, dsn)
	}
}
