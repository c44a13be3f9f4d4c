package sqlite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Transactions that change two streams, in both orders, run one after another.
// Promise: G1.6
func TestTransfersInBothDirections(t *testing.T) {
	t.Parallel()
	const transfers = 40
	db := open(t, routed())
	var all sync.WaitGroup
	errs := make([]error, transfers)
	for i := range transfers {
		from, to := "account-1", "account-2"
		if i%2 == 1 {
			from, to = to, from
		}
		all.Go(func() {
			errs[i] = db.Transact(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				for _, stream := range []string{from, to} {
					var version int64
					for e, err := range db.InTx(tx).ReadStream(ctx, stream, 0) {
						if err != nil {
							return err
						}
						version = e.Version
					}
					if _, err := db.InTx(tx).Append(ctx, stream, eventstore.Expected(version), drafts(1)); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, 2*transfers, count(t, db.SQL(), "kinora_events"))
	require.Equal(t, 2*transfers, count(t, db.SQL(), "kinora_outbox"))
}

// Promise: G1.6
func TestTransactRunsAgainWhileTheDatabaseIsBusy(t *testing.T) {
	t.Parallel()
	db, tr := traced(t, 2, routed())
	busy := errorOf(sqlite3.SQLITE_BUSY)
	for _, at := range []string{"fn", "commit"} {
		runs := 0
		tr.onEnd = func(tx driver.Tx) error {
			if at == "commit" && runs <= 2 {
				return errors.Join(busy, tx.Rollback())
			}
			return tx.Commit()
		}
		require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			runs++
			_, err := tx.ExecContext(ctx, addToTotal, at, 1)
			if err == nil && at == "fn" && runs <= 2 {
				return fmt.Errorf("transfer: %w", busy)
			}
			return err
		}))
		require.Equal(t, 3, runs, at)
		require.Equal(t, 1, total(t, db.SQL(), at))
	}
	for name, most := range map[string]int{"its context ends": 3, "too many runs": 1000} {
		ctx, pass := patience.Deadline(t)
		runs := 0
		err := db.Transact(ctx, func(context.Context, *sql.Tx) error {
			if runs++; runs == most {
				pass()
			}
			return busy
		})
		require.ErrorIs(t, err, busy, name)
		require.Greater(t, runs, 1, name)
		require.LessOrEqual(t, runs, min(most, 20), name)
	}
}

// Promise: G1.7
func TestTransactWhoseCommitFailsOnTheDiskIsAmbiguous(t *testing.T) {
	t.Parallel()
	db, tr := traced(t, 2, routed())
	tr.onEnd = func(tx driver.Tx) error { return errors.Join(errorOf(sqlite3.SQLITE_IOERR_FSYNC), tx.Rollback()) }
	runs := 0
	err := db.Transact(t.Context(), func(context.Context, *sql.Tx) error { runs++; return nil })
	require.ErrorIs(t, err, eventstore.ErrAmbiguous)
	require.Equal(t, 1, runs)
}

func TestTransactsTransactionCannotBeEnded(t *testing.T) {
	t.Parallel()
	db := open(t, routed())
	for name, end := range map[string]func(tx *sql.Tx) error{
		"Commit": (*sql.Tx).Commit, "Rollback": (*sql.Tx).Rollback,
		"commit":   func(tx *sql.Tx) error { _, err := tx.Exec("commit"); return err },
		"rollback": func(tx *sql.Tx) error { _, err := tx.Exec("rollback"); return err },
	} {
		err := db.Transact(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, addToTotal, "k", 1); err != nil {
				return err
			}
			_ = end(tx)
			return nil
		})
		require.ErrorContains(t, err, "fn has ended the transaction", name)
		require.Zero(t, total(t, db.SQL(), "k"), name)
	}
}

// A DB from New does not see the commits of its pool.
func TestWake(t *testing.T) {
	t.Parallel()
	db, err := sqlite.New(pooled(t, migrated(t), immediate), routed())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	woken := db.Enqueued()
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	require.NoError(t, db.InTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "out"}))
	require.NoError(t, tx.Commit())
	select {
	case <-woken:
		t.Fatal("the commit was seen: Wake is not needed")
	default:
	}
	db.Wake()
	patience.Receive(t, woken, "Wake")
}
