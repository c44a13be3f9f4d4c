package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// doSQL is do for handlers of *sql.Tx.
func doSQL(ctx context.Context, db *postgres.DB, u provider.Unit, f func(ctx context.Context, tx *sql.Tx) error) error {
	return db.SQL().Do(ctx, u, func(ctx context.Context, tx *sql.Tx, found provider.Found) (c provider.Closing, err error) {
		if isFresh(found) {
			err = f(ctx, tx)
		}
		return c, err
	})
}

func addTo(ctx context.Context, tx *sql.Tx, n int) error {
	_, err := tx.ExecContext(ctx, addSQL, "k", n)
	return err
}

// single returns a DB whose pool has one connection: a unit that kept it would stop all others.
func single(t *testing.T) *postgres.DB {
	t.Helper()
	cfg := &postgres.Config{Route: outbox.ByCategory}
	return borrowed(t, cfg, postgrestest.DSN(t, cfg, totals), func(c *pgxpool.Config) { c.MaxConns = 1 })
}

// appliesOne runs a unit that adds 1, and requires the total.
func appliesOne(t *testing.T, db *postgres.DB, u provider.Unit, total int) {
	t.Helper()
	require.NoError(t, doSQL(patience.Context(t), db, u, func(ctx context.Context, tx *sql.Tx) error { return addTo(ctx, tx, 1) }))
	require.Equal(t, total, count(t, db, `select coalesce(sum(n), 0) from totals`))
}

// The handler's writes, events, messages and tasks commit with the marker, once.
// Promise: G4.5
func TestASQLUnitCommitsWithItsMarker(t *testing.T) {
	t.Parallel()
	db := single(t)
	everything := func(ctx context.Context, tx *sql.Tx) error {
		if err := addTo(ctx, tx, 1); err != nil {
			return err
		}
		if _, err := db.InSQLTx(tx).Append(ctx, "a-1", eventstore.Any, drafts(t, 1)); err != nil {
			return err
		}
		if err := db.InSQLTx(tx).Enqueue(ctx, outbox.Message{Topic: "x"}); err != nil {
			return err
		}
		return db.SQL().TasksIn(tx).Enqueue(ctx, draft("one"))
	}
	refused := errors.New("refused")
	err := doSQL(t.Context(), db, marked("m"), func(ctx context.Context, tx *sql.Tx) error {
		return errors.Join(everything(ctx, tx), refused)
	})
	require.ErrorIs(t, err, refused)
	const stored = `select (select count(*) from kinora.markers) * 1000 + (select coalesce(sum(n), 0) from totals) * 100
		+ (select count(*) from kinora.outbox) * 10 + (select count(*) from kinora.tasks)`
	require.Equal(t, 0, count(t, db, stored))
	for range 2 {
		require.NoError(t, doSQL(t.Context(), db, marked("m"), everything))
	}
	require.Equal(t, 1121, count(t, db, stored))
}

// A handler that ends the transaction, or tries to, fails its unit: nothing is committed, and the error
// names its message.
// Promise: G4.5
func TestASQLHandlerCannotEndItsTransaction(t *testing.T) {
	t.Parallel()
	statement := func(s string) func(ctx context.Context, tx *sql.Tx) error {
		return func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, s)
			return err
		}
	}
	for name, end := range map[string]struct {
		end     func(ctx context.Context, tx *sql.Tx) error
		refused bool // the error is ErrHeld
	}{
		"commit":   {func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }, true},
		"rollback": {func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }, true},
		"exec":     {statement("commit"), true},
		"query": {func(ctx context.Context, tx *sql.Tx) error {
			return tx.QueryRowContext(ctx, "rollback").Scan()
		}, true},
		"prepare": {func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.PrepareContext(ctx, "commit")
			return err
		}, true},
		"rollback behind a comment": {statement("/**/ rollback"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := single(t)
			for _, hidden := range []bool{true, false} {
				err := db.SQL().Do(t.Context(), marked("a", "b", "c"), func(ctx context.Context, tx *sql.Tx, found provider.Found) (c provider.Closing, err error) {
					for m := range 3 {
						found.Begin(m)
						err := addTo(ctx, tx, 1)
						if m == 1 {
							require.NoError(t, err)
							if err = end.end(ctx, tx); end.refused {
								require.ErrorIs(t, err, postgres.ErrHeld)
							}
							if hidden {
								err = nil
							}
						}
						if err != nil {
							return c, err
						}
					}
					return c, nil
				})
				ended := name == "commit" || name == "rollback"
				switch {
				case hidden && (ended || !end.refused):
					require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "%v", err)
					require.ErrorContains(t, err, "tx_ended")
				case hidden: // refused without an effect
					require.NoError(t, err)
					require.Equal(t, 3, count(t, db, `select n from totals`))
					return
				case end.refused:
					require.ErrorIs(t, err, postgres.ErrHeld)
				default:
					require.Error(t, err)
				}
				if hidden && ended {
					blamed, ok := errors.AsType[*provider.MessageError](err)
					require.True(t, ok, "%v", err)
					require.Equal(t, 1, blamed.Message)
				}
				require.Equal(t, 0, count(t, db, `select count(*) from kinora.markers`))
			}
			_, err := db.Pool().Exec(t.Context(), `truncate totals`) // a write after the comment was outside of a transaction
			require.NoError(t, err)
			appliesOne(t, db, marked("a"), 1)
		})
	}
}

// The unit ends the transaction for the handler, whatever the handler leaves or keeps.
// Promise: G4.5
func TestASQLUnitEndsItsTransaction(t *testing.T) {
	t.Parallel()
	db := single(t)
	var kept *sql.Tx
	var open *sql.Rows
	var prepared *sql.Stmt
	err := doSQL(t.Context(), db, marked("a"), func(ctx context.Context, tx *sql.Tx) (err error) {
		kept = tx
		if prepared, err = tx.PrepareContext(ctx, addSQL); err != nil {
			return err
		}
		for range 2 {
			if _, err := prepared.ExecContext(ctx, "k", 1); err != nil {
				return err
			}
		}
		open, err = tx.QueryContext(ctx, `select generate_series(1, 100000)`)
		require.True(t, open.Next())
		return err
	})
	require.NoError(t, err)
	require.Equal(t, 2, count(t, db, `select n from totals`))
	require.Equal(t, 0, count(t, db, `select count(*) from pg_prepared_statements where statement like 'insert into totals%'`))
	require.False(t, open.Next())
	require.ErrorIs(t, addTo(t.Context(), kept, 1), sql.ErrTxDone)
	require.ErrorIs(t, kept.Commit(), sql.ErrTxDone)
	require.ErrorIs(t, kept.Rollback(), sql.ErrTxDone)
	_, err = db.InSQLTx(kept).Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
	require.ErrorIs(t, err, sql.ErrTxDone)
	_, err = prepared.ExecContext(t.Context(), "k", 1)
	require.Error(t, err)
	appliesOne(t, db, marked("b"), 3)
}

// An error in rows that the handler did not read is found when the unit closes them.
// Promise: G4.5
func TestASQLUnitFindsAnErrorInOpenRows(t *testing.T) {
	t.Parallel()
	db := single(t)
	err := doSQL(t.Context(), db, marked("a"), func(ctx context.Context, tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, `select 1 / (50000 - i) from generate_series(1, 50000) i`)
		require.True(t, rows.Next())
		return err
	})
	require.ErrorContains(t, err, "a handler continued after an SQL error")
	appliesOne(t, db, marked("a"), 1)
}

// A goroutine of a handler uses the transaction while the unit ends.
// Promise: G4.5
func TestASQLTransactionUsedWhileItsUnitEnds(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]func(tx *sql.Tx){
		"return":  func(*sql.Tx) {},
		"panic":   func(*sql.Tx) { panic("poison") },
		"end":     func(tx *sql.Tx) { go func() { _ = tx.Rollback() }() },
		"in time": func(tx *sql.Tx) { _ = tx.Rollback() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil, totals)
			for range 20 {
				began, done := make(chan struct{}, 1), make(chan error, 1)
				func() {
					defer func() { _ = recover() }()
					_ = doSQL(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx *sql.Tx) error {
						for _, s := range []string{`select 1`, `select 2`, `select 3`} { // to be closed at the end
							if _, err := tx.PrepareContext(ctx, s); err != nil {
								return err
							}
						}
						go func() {
							for {
								if err := addTo(context.WithoutCancel(ctx), tx, 1); err != nil {
									done <- err
									return
								}
								select {
								case began <- struct{}{}:
								default:
								}
							}
						}()
						<-began
						ends(tx)
						return nil
					})
				}()
				require.ErrorIs(t, <-done, sql.ErrTxDone)
			}
		})
	}
}

// A handler that panics or calls runtime.Goexit while it reads rows leaves nothing.
// Promise: G4.5
func TestASQLHandlerThatDoesNotReturnLeavesNothing(t *testing.T) {
	t.Parallel()
	db := single(t)
	for _, exit := range []func(){func() { panic("poison") }, runtime.Goexit} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer func() { _ = recover() }()
			_ = doSQL(t.Context(), db, marked("a"), func(ctx context.Context, tx *sql.Tx) error {
				if err := addTo(ctx, tx, 1); err != nil {
					return err
				}
				rows, err := tx.QueryContext(ctx, `select generate_series(1, 100000)`)
				if err == nil && rows.Next() {
					exit()
				}
				t.Error("the handler went on")
				return err
			})
		}()
		<-ended
		require.Equal(t, 0, count(t, db, `select (select count(*) from totals) + (select count(*) from kinora.markers)`))
	}
	appliesOne(t, db, marked("a"), 1)
}

// The transaction of a handler that does not return is rolled back: its marker and the pool's only
// connection become free.
// Promise: G4.5
func TestAStuckSQLHandlersTransactionIsRolledBack(t *testing.T) {
	t.Parallel()
	for name, stuck := range map[string]func(tx *sql.Tx, release chan struct{}){
		"waiting":        func(_ *sql.Tx, release chan struct{}) { <-release },
		"in a statement": func(tx *sql.Tx, _ chan struct{}) { _, _ = tx.Exec(sleepSQL) },
		"reading rows": func(tx *sql.Tx, release chan struct{}) {
			rows, err := tx.Query(`select generate_series(1, 1000000)`)
			if err != nil || !rows.Next() {
				panic(err)
			}
			<-release
			for rows.Next() {
			}
			_ = rows.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := single(t)
			ctx, end := patience.Deadline(t)
			began, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				done <- doSQL(ctx, db, marked("m"), func(_ context.Context, tx *sql.Tx) error {
					if err := addTo(context.Background(), tx, 100); err != nil {
						return err
					}
					close(began)
					stuck(tx, release)
					if err := addTo(context.Background(), tx, 100); err == nil {
						t.Error("the handler can still write")
					}
					return nil
				})
			}()
			<-began
			end()
			require.NoError(t, doSQL(patience.Context(t), db, marked("m"), func(ctx context.Context, tx *sql.Tx) error { return addTo(ctx, tx, 1) }))
			close(release)
			err := <-done
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotEqual(t, provider.ClassPermanent, provider.ClassOf(err))
			require.Equal(t, 1, count(t, db, `select n from totals where key = 'k'`))
		})
	}
}

// The errors of a unit have the classes that they have for handlers of pgx.Tx.
// Promise: G4.5
func TestASQLUnitsErrorsHaveTheClassesOfPgx(t *testing.T) {
	t.Parallel()
	type exec = func(ctx context.Context, statement string) error
	type test struct {
		db     *postgres.DB
		cancel func()
		exec   exec
	}
	const kill = `select pg_terminate_backend(pg_backend_pid())`
	for name, handler := range map[string]func(ctx context.Context, u test) error{
		"a statement":     func(ctx context.Context, u test) error { return u.exec(ctx, `select 1 / 0`) },
		"a missing table": func(ctx context.Context, u test) error { return u.exec(ctx, `select * from nothing`) },
		"a hidden error": func(ctx context.Context, u test) error {
			_ = u.exec(ctx, `select 1 / 0`)
			return nil
		},
		"a statement after an error": func(ctx context.Context, u test) error {
			_ = u.exec(ctx, `select 1 / 0`)
			return u.exec(ctx, `select 1`)
		},
		"a lost connection": func(ctx context.Context, u test) error { return u.exec(ctx, kill) },
		"after a lost connection": func(ctx context.Context, u test) error {
			_ = u.exec(ctx, kill)
			return u.exec(ctx, `select 1`)
		},
		"a hidden lost connection": func(ctx context.Context, u test) error {
			_ = u.exec(ctx, kill)
			return nil
		},
		"a stop": func(ctx context.Context, u test) error {
			u.cancel()
			return u.exec(ctx, `select 1`)
		},
		"a hidden stop": func(_ context.Context, u test) error {
			u.cancel()
			return nil
		},
		"a stop in a statement": func(ctx context.Context, u test) error {
			go func() {
				defer u.cancel()
				asleep(t, u.db, 1)
			}()
			return u.exec(ctx, sleepSQL)
		},
		"a deadline in a statement": func(_ context.Context, u test) error {
			ctx, end := patience.Deadline(t)
			go func() {
				defer end()
				asleep(t, u.db, 1)
			}()
			return u.exec(ctx, sleepSQL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil, totals)
			one, cancelOne := context.WithCancel(t.Context())
			defer cancelOne()
			want := do(one, db, marked("a"), func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return nil, handler(ctx, test{db, cancelOne, func(ctx context.Context, s string) error { _, err := tx.Exec(ctx, s); return err }})
			})
			asleep(t, db, 0)
			two, cancelTwo := context.WithCancel(t.Context())
			defer cancelTwo()
			got := doSQL(two, db, marked("b"), func(ctx context.Context, tx *sql.Tx) error {
				return handler(ctx, test{db, cancelTwo, func(ctx context.Context, s string) error { _, err := tx.ExecContext(ctx, s); return err }})
			})
			require.Error(t, want)
			require.Error(t, got)
			require.Equal(t, provider.ClassOf(want), provider.ClassOf(got), "%v: %v", want, got)
			a, _ := errors.AsType[*provider.Error](want)
			b, _ := errors.AsType[*provider.Error](got)
			require.Equal(t, a.Code, b.Code, "%v: %v", want, got)
			require.Equal(t, errors.Is(want, context.Canceled), errors.Is(got, context.Canceled), "%v: %v", want, got)
			require.Equal(t, 0, count(t, db, `select count(*) from kinora.markers`))
		})
	}
}
