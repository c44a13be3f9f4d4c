package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// balance is an account: the sum of its events.
type balance struct{ sum int }

func (b *balance) Apply(event any) { b.sum += event.(counted).N }

var errPoor = errors.New("the account has too little")

func accounts(t testing.TB, db *postgres.DB) *eventstore.Repository[*balance] {
	t.Helper()
	r, err := eventstore.NewRepository(db, table, "a", func(string) *balance { return &balance{} }, nil)
	require.NoError(t, err)
	return r
}

func change(n int) func(*balance) ([]any, error) {
	return func(b *balance) ([]any, error) {
		if b.sum+n < 0 {
			return nil, errPoor
		}
		return []any{counted{n}}, nil
	}
}

// Each transfer changes two streams. Half of the transfers change them in the other order, so
// transactions deadlock and conflict.
// Promise: G1.6
func TestTransfersInBothDirectionsSucceedOrAreRefused(t *testing.T) {
	t.Parallel()
	const transfers, amount, initial = 40, 10, 100
	dsn := postgrestest.DSN(t, nil)
	db := borrowed(t, &postgres.Config{Route: outbox.ByCategory}, dsn, func(c *pgxpool.Config) { c.MaxConns = transfers })
	repo := accounts(t, db)
	for _, id := range []string{"1", "2"} {
		_, err := repo.Update(t.Context(), id, change(initial))
		require.NoError(t, err)
	}
	var moved [2]atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, transfers)
	for i := range transfers {
		from, to := "1", "2"
		if i%2 == 1 {
			from, to = to, from
		}
		all.Go(func() {
			errs[i] = db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if _, err := repo.UpdateTx(ctx, db.InTx(tx), from, change(-amount)); err != nil {
					return err
				}
				_, err := repo.UpdateTx(ctx, db.InTx(tx), to, change(amount))
				return err
			})
			if errs[i] == nil {
				moved[i%2].Add(1)
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		require.True(t, err == nil || errors.Is(err, errPoor), "%v", err)
	}
	one, _, err := repo.Load(t.Context(), "1")
	require.NoError(t, err)
	two, _, err := repo.Load(t.Context(), "2")
	require.NoError(t, err)
	require.GreaterOrEqual(t, moved[0].Load(), int64(initial/amount))
	require.Equal(t, 2*initial, one.sum+two.sum)
	require.Equal(t, initial-amount*int(moved[0].Load()-moved[1].Load()), one.sum)
	require.Equal(t, 2+2*int(moved[0].Load()+moved[1].Load()), count(t, db, `select count(*) from kinora.outbox`))
}

// raise fails a transaction with a SQLSTATE.
func raise(state string) string {
	return fmt.Sprintf(`do $$ begin raise exception 'not now' using errcode = '%s'; end $$`, state)
}

// The server rolled the transaction back and would accept it now, whatever fn returns.
// Promise: G1.6
func TestTransactRunsAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	hidden := errors.New("hidden")
	fails := map[string]func(ctx context.Context, tx pgx.Tx, sql string) error{
		"returned": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, sql)
			return err
		},
		"wrapped": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, sql)
			return fmt.Errorf("transfer: %w", err)
		},
		"hidden": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, _ = tx.Exec(ctx, sql)
			return hidden
		},
		"swallowed": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, _ = tx.Exec(ctx, sql)
			return nil
		},
		"hidden by a later statement": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, _ = tx.Exec(ctx, sql)
			return add(ctx, tx, "k", 1)
		},
		"of a row": func(ctx context.Context, tx pgx.Tx, sql string) error {
			_ = tx.QueryRow(ctx, sql).Scan()
			return hidden
		},
		"of rows": func(ctx context.Context, tx pgx.Tx, sql string) error {
			rows, _ := tx.Query(ctx, sql)
			rows.Close()
			_ = add(ctx, tx, "k", 1)
			return hidden
		},
		"of a batch": func(ctx context.Context, tx pgx.Tx, sql string) error {
			b := &pgx.Batch{}
			b.Queue(sql)
			_ = tx.SendBatch(ctx, b).Close()
			return hidden
		},
		"of a savepoint": func(ctx context.Context, tx pgx.Tx, sql string) error {
			inner, err := tx.Begin(ctx)
			if err == nil {
				_, _ = inner.Exec(ctx, sql)
			}
			return hidden
		},
	}
	for _, state := range []string{"40P01", "40001"} {
		db := postgrestest.Open(t, nil, totals)
		for name, fail := range fails {
			runs := 0
			require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if err := add(ctx, tx, name, 1); err != nil {
					return err
				}
				if runs++; runs <= 2 {
					return fail(ctx, tx, raise(state))
				}
				return nil
			}), name)
			require.Equal(t, 3, runs, name)
		}
		require.Equal(t, len(fails), count(t, db, `select sum(n) from totals`))
	}
}

// A deferred trigger runs at the commit.
const refuseAtCommit = `
create sequence tries; -- it also counts what is rolled back
create function refuse() returns trigger language plpgsql as $$ begin
	if nextval('tries') <= 2 then raise exception 'not now' using errcode = '40001'; end if;
	return new;
end $$;
create constraint trigger refuse after insert on totals deferrable initially deferred for each row execute function refuse()`

// Promise: G1.6
func TestTransactRunsAgainIfTheCommitFails(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals, refuseAtCommit)
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, "k", 1) }))
	require.Equal(t, 3, count(t, db, `select last_value from tries`))
	require.Equal(t, 1, count(t, db, `select n from totals`))
}

// Promise: G1.6
func TestTransactRunsAgainWithinLimits(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for name, most := range map[string]int{"its context ends": 3, "too many runs": 1000} {
		ctx, end := patience.Deadline(t)
		runs := 0
		err := db.Transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, raise("40001"))
			if runs++; runs == most {
				end()
			}
			return err
		})
		require.ErrorContains(t, err, "40001", "%s: the last error", name)
		require.Greater(t, runs, 1, name)
		require.LessOrEqual(t, runs, min(most, 20), name)
	}
}

// The errors after which fn does not run again, and nothing is written.
// Promise: G1.6
func TestTransactRollsBack(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for name, c := range map[string]struct {
		fn    func(ctx context.Context, db *postgres.DB, tx pgx.Tx) error
		is    error  // what the error is
		says  string // part of its text
		panic bool
		runs  int
	}{
		"error": {fn: func(context.Context, *postgres.DB, pgx.Tx) error { return refused }, is: refused, runs: 1},
		"panic": {fn: func(context.Context, *postgres.DB, pgx.Tx) error { panic(refused) }, panic: true, runs: 1},
		"exit": {fn: func(context.Context, *postgres.DB, pgx.Tx) error {
			runtime.Goexit()
			return nil
		}, panic: true, runs: 1},
		"swallowed error": {fn: func(ctx context.Context, _ *postgres.DB, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "select 1 / 0")
			_, _ = tx.Exec(ctx, "select 1")
			return nil
		}, says: "fn returned nil after an SQL error, which rolled the transaction back: ERROR: division by zero", runs: 1},
		"open rows": {fn: func(ctx context.Context, _ *postgres.DB, tx pgx.Tx) error {
			_, err := tx.Query(ctx, "select generate_series(1, 100000)")
			return err
		}, says: "fn has left the rows of a query open", runs: 1},
		"own rollback": {fn: func(ctx context.Context, _ *postgres.DB, tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, "rollback")
			return err
		}, is: postgres.ErrHeld, runs: 1},
		"closed connection": {fn: func(ctx context.Context, _ *postgres.DB, tx pgx.Tx) error {
			_ = tx.Conn().Close(ctx)
			return nil
		}, says: "the connection was lost before the commit", runs: 1},
		"conflict that fn cannot resolve": {fn: func(ctx context.Context, db *postgres.DB, tx pgx.Tx) error {
			_, err := db.InTx(tx).Append(ctx, "a-1", 7, drafts(t, 1))
			return err
		}, is: eventstore.ErrConflict, runs: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil, totals)
			woken, runs, returned := db.Enqueued(), 0, false
			var err error
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				err = db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					runs++
					if err := add(ctx, tx, "k", 1); err != nil {
						return err
					}
					return c.fn(ctx, db, tx)
				})
				returned = true
			}()
			<-done
			require.Equal(t, c.panic, !returned)
			if !c.panic {
				require.Error(t, err)
				require.ErrorContains(t, err, c.says)
			}
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
			require.Equal(t, c.runs, runs)
			require.Zero(t, count(t, db, `select count(*) from totals`))
			require.Zero(t, db.Pool().Stat().AcquiredConns())
			if name == "error" || c.panic {
				require.EqualValues(t, 1, db.Pool().Stat().NewConnsCount(), "the connection can be used again")
			}
			select {
			case <-woken:
				require.Fail(t, "nothing was written, and relays were woken")
			default:
			}
		})
	}
}

func TestTransactEndsWithItsContext(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for name, statement := range map[string]string{"between statements": "select 1", "in a statement": "select pg_sleep(60)"} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // wherever it ends
		defer cancel()
		err := db.Transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := add(ctx, tx, "k", 1); err != nil {
				return err
			}
			_, _ = tx.Exec(ctx, statement)
			<-ctx.Done()
			return nil
		})
		require.ErrorIs(t, err, context.DeadlineExceeded, name)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
}

func TestTransactsTransactionCannotBeEnded(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		require.ErrorIs(t, tx.Commit(ctx), postgres.ErrHeld)
		require.ErrorIs(t, tx.Rollback(ctx), postgres.ErrHeld)
		_, err := tx.Exec(ctx, "commit")
		require.ErrorIs(t, err, postgres.ErrHeld)
		inner, err := tx.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, add(ctx, inner, "inner", 1))
		require.NoError(t, inner.Rollback(ctx))
		var level string
		require.NoError(t, tx.QueryRow(ctx, "show transaction_isolation").Scan(&level))
		require.Equal(t, "read committed", level)
		return add(ctx, tx, "k", 1)
	}))
	require.Equal(t, 1, count(t, db, `select count(*) from totals`))
}

// Promise: G1.7
func TestTransactWhoseCommitReplyIsLost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lose func(t *testing.T, proxy *pgtest.Proxy, direct *postgres.DB)
		runs int
	}{
		"committed": {func(*testing.T, *pgtest.Proxy, *postgres.DB) {}, 1},
		"committed, and a pooler replies": {func(_ *testing.T, proxy *pgtest.Proxy, _ *postgres.DB) {
			proxy.AnswerFatal()
		}, 1},
		"not committed": {func(t *testing.T, _ *pgtest.Proxy, direct *postgres.DB) {
			_, err := direct.Pool().Exec(context.Background(),
				`select pg_terminate_backend(pid, 10000) from pg_locks where relation = 'totals'::regclass
					and database = (select oid from pg_database where datname = current_database())`) // databases of one template share oids
			require.NoError(t, err)
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			proxy, _, direct := throughProxy(t)
			db := borrowed(t, &postgres.Config{Route: outbox.ByCategory}, proxy.DSN, func(c *pgxpool.Config) { c.MaxConns = 1 })
			woken, runs := db.Enqueued(), 0
			var first atomic.Bool
			proxy.LoseReply(func(kind byte, body []byte) bool {
				if !isCommit(kind, body) || !first.CompareAndSwap(false, true) {
					return false
				}
				c.lose(t, proxy, direct)
				return true
			})
			err := db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				runs++
				_, err := db.InTx(tx).Append(ctx, "a-1", eventstore.Any, drafts(t, 1))
				return errors.Join(err, add(ctx, tx, "k", 1))
			})
			require.NoError(t, err)
			require.Equal(t, c.runs, runs)
			require.Equal(t, 1, count(t, direct, `select n from totals`))
			require.Equal(t, 1, count(t, direct, `select count(*) from kinora.events`))
			patience.Receive(t, woken, "the committed entry")
		})
	}
}

// A server that crashes gives the number of a lost transaction to the next one.
// Promise: G1.7
func TestTransactDoesNotTrustTheNumberOfAnotherTransaction(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, "wal_writer_delay=10s", "autovacuum=off")
	proxy := pgtest.NewProxy(t, server.DSN)
	db, err := postgres.Open(t.Context(), proxy.DSN, nil)
	require.NoError(t, err)
	defer db.Close()
	direct, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	defer direct.Close()
	_, err = direct.Pool().Exec(t.Context(), totals)
	require.NoError(t, err)
	var before time.Time // a recovery sets a later one
	require.NoError(t, direct.Pool().QueryRow(t.Context(), `select stats_reset from pg_stat_bgwriter`).Scan(&before))
	var first atomic.Bool
	var pid int
	var own, other string
	another := make(chan error, 1)
	proxy.LoseReply(func(kind byte, body []byte) bool {
		if !isCommit(kind, body) || !first.CompareAndSwap(false, true) {
			return false
		}
		backend, err := os.FindProcess(pid)
		if err == nil {
			err = backend.Kill()
		}
		for limit := time.Now().Add(patience.Limit()); err == nil && time.Now().Before(limit); {
			const insert = `insert into totals select 'other', 1 from pg_stat_bgwriter where stats_reset > $1
				returning pg_current_xact_id()::text`
			if direct.Pool().QueryRow(context.Background(), insert, before).Scan(&other) == nil {
				break
			}
		}
		another <- err
		return true
	})
	err = db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `select pg_current_xact_id()::text, pg_backend_pid()`).Scan(&own, &pid)
		return errors.Join(err, add(ctx, tx, "own", 1))
	})
	require.NoError(t, <-another)
	require.ErrorIs(t, err, eventstore.ErrAmbiguous)
	require.Equal(t, other, own, "the crash lost the number")
	require.Zero(t, count(t, direct, `select count(*) from totals where key = 'own'`))
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, "own", 1) }))
}

// The connection is lost while the server still commits.
// Promise: G1.7
func TestTransactWaitsForACommitInProgress(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	proxy.IgnoreCancels()
	gate, err := direct.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = gate.Rollback(context.Background()) }()
	_, err = gate.Exec(t.Context(), `select pg_advisory_xact_lock(1)`)
	require.NoError(t, err)
	_, err = direct.Pool().Exec(t.Context(), `
		create function wait() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(1); return new; end $$;
		create constraint trigger wait after insert on totals deferrable initially deferred for each row execute function wait()`)
	require.NoError(t, err)
	active := func(where string) func() bool {
		return func() bool {
			return count(t, direct, `select count(*) from pg_stat_activity where datname = current_database()
				and pid <> pg_backend_pid() and `+where) > 0
		}
	}
	runs, done := 0, make(chan error, 1)
	go func() {
		done <- db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			runs++
			return add(ctx, tx, "k", 1)
		})
	}()
	patience.Until(t, active("query = 'commit' and wait_event = 'advisory'"), "the commit to wait")
	proxy.Away(true)
	proxy.Away(false)
	patience.Until(t, active("query like '%pg_xact_status($1%'"), "the question whether it is committed")
	require.NoError(t, gate.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, 1, runs)
	require.Equal(t, 1, count(t, direct, `select n from totals`))
}

// Transact and Wake wake the relays of this process, and with Config.Notify those of others.
func TestTransactAndWakeWakeRelays(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func(db *postgres.DB) error{
		"transact": func(db *postgres.DB) error {
			return db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "t"})
			})
		},
		"wake": func(db *postgres.DB) error {
			err := pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
				return db.InTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "t"})
			})
			db.Wake()
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dsn := postgrestest.DSN(t, nil)
			db, other := notifying(t, dsn, true), ear(t, dsn)
			woken := db.Enqueued()
			require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `select count(*) from kinora.outbox`)
				return err
			}))
			select {
			case <-woken:
				require.Fail(t, "a transaction that only reads wakes no relay")
			default:
			}
			require.NoError(t, write(db))
			patience.Receive(t, woken, "%s", name)
			require.Empty(t, hear(t, other))
		})
	}
}
