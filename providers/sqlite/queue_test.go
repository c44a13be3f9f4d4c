package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// The application's transactions and Kinora's get the write lock in the order of their arrival:
// while one goroutine appends continuously, a transaction begins after about one append.
func TestUsersTransactionsQueueFairly(t *testing.T) {
	t.Parallel()
	db := open(t, routed())
	ctx, stop := context.WithCancel(context.Background())
	appended, begun := make(chan int), make(chan struct{})
	begin := sync.OnceFunc(func() { close(begun) })
	go func() {
		n := 0
		for ctx.Err() == nil {
			if _, err := db.Append(context.Background(), fmt.Sprint("review-", n), eventstore.NoStream, drafts(1)); err != nil {
				t.Error(err)
				break
			}
			n++
			begin()
		}
		begin()
		appended <- n
	}()
	<-begun
	const begins = 50
	seen := 0
	for range begins {
		before := count(t, db.SQL(), "kinora_events")
		tx, err := db.SQL().Begin()
		require.NoError(t, err)
		var after int
		require.NoError(t, tx.QueryRow(`select count(*) from kinora_events`).Scan(&after))
		require.NoError(t, tx.Rollback())
		seen += after - before
	}
	stop()
	require.Positive(t, <-appended)
	require.Less(t, seen, 5*begins, "appends ahead of %d transactions", begins)
}

// An application's transaction that waits for the write lock takes no connection from readers or
// from the handler for which it waits.
func TestReadersDoNotWaitForUsersTransactions(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	db := open(t, routed())
	waiting := 4 * max(8, 2*runtime.GOMAXPROCS(0))
	begun := make(chan error)
	require.NoError(t, db.Do(ctx, delivery("m1"), func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		for range waiting {
			go func() {
				tx, err := db.SQL().BeginTx(ctx, nil)
				if err == nil {
					err = tx.Rollback()
				}
				begun <- err
			}()
		}
		patience.Until(t, func() bool { return db.SQL().Stats().InUse >= min(waiting, max(8, 2*runtime.GOMAXPROCS(0))) }, "waiting transactions")
		for _, err := range db.ReadStream(ctx, "review-1", 0) {
			require.NoError(t, err)
		}
		_, err := db.EntryCandidates(ctx, provider.EntryQuery{}, 1)
		require.NoError(t, err)
		return provider.Closing{}, db.SQL().QueryRowContext(ctx, `select 1`).Err()
	}))
	for range waiting {
		require.NoError(t, <-begun)
	}
}

// The signal for a caller's transaction comes after its commit, and not after a rollback.
func TestEnqueuedSignalsAfterTheCallersCommit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	wake := db.Enqueued()
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
		select {
		case <-wake:
			t.Fatal("no commit yet")
		default:
		}
		tx, err := db.SQL().Begin()
		require.NoError(t, err)
		require.NoError(t, db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "out"}))
		require.NoError(t, end(tx))
	}
	<-wake
}

// A transaction that waits for another one of the same goroutine ends with an error.
func TestWaitingTransactionTimesOut(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	_, err = db.SQL().BeginTx(within(t, 20*time.Millisecond), nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	read, err := db.SQL().BeginTx(context.Background(), &sql.TxOptions{ReadOnly: true})
	require.NoError(t, err, "a reader does not wait")
	require.NoError(t, read.Rollback())
	_, err = db.SQL().Begin()
	var busy *moderncsqlite.Error
	require.True(t, errors.As(err, &busy) && busy.Code() == 5, "%v", err)
	require.NoError(t, tx.Rollback())
	require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")), "the write lock is free")
	var timeout int
	for range 20 { // on every connection
		require.NoError(t, db.SQL().QueryRow(`pragma busy_timeout`).Scan(&timeout))
		require.Equal(t, 5000, timeout)
	}
}

// The driver's methods beyond database/sql are reachable.
func TestDriverIsReachable(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	conn, err := db.SQL().Conn(context.Background())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.Raw(func(c any) error {
		copied, err := c.(interface{ Serialize() ([]byte, error) }).Serialize()
		require.NotEmpty(t, copied)
		return err
	}))
}
