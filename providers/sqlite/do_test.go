package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func requireClass(t *testing.T, err error, class, code string) {
	t.Helper()
	var e *provider.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, class, e.Class.String(), "class of %v", err)
	require.Equal(t, code, e.Code, "code of %v", err)
}

// requireMessage requires that err names this message.
func requireMessage(t *testing.T, err error, message int) {
	t.Helper()
	var e *provider.MessageError
	require.ErrorAs(t, err, &e)
	require.Equal(t, message, e.Message)
}

// requireNothing requires that no unit left a row.
func requireNothing(t *testing.T, db *sqlite.DB) {
	t.Helper()
	for _, table := range []string{"kinora_markers", "kinora_outbox", "kinora_parked", "totals"} {
		require.Equal(t, 0, count(t, db.SQL(), table), table)
	}
}

// A unit needs no more statements for many messages than for one, except the handlers' own.
func TestUnitStatements(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	unit := func(u provider.Unit) []string {
		return tr.during(func() { require.NoError(t, db.Do(ctx, u, adds("p1"))) })
	}
	plain := provider.Unit{Projector: "totals", Messages: []provider.Message{{ID: "m0", Handlers: []provider.Handler{{Name: handler}}}}}
	require.Len(t, unit(plain), 5, "without a marker: begin, holds, the checkpoint, the handler's, commit")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))

	many := make([]string, 500)
	for i := range many {
		many[i] = fmt.Sprint("many-", i)
	}
	for _, ids := range [][]string{{"m1"}, many} {
		statements := unit(delivery(ids...))
		require.Len(t, statements, 6+len(ids), "begin, held lanes, the checkpoint, markers twice, the handler's, commit")
		require.Contains(t, statements[1], "from kinora_parked")
		require.Contains(t, statements[2], "from kinora_checkpoints")
		require.Contains(t, statements[3], "from kinora_markers")
		require.Contains(t, statements[4], "insert into kinora_markers")
		require.Equal(t, addToTotal, statements[5])
		require.Len(t, unit(delivery(ids...)), 5, "duplicates: begin, held lanes, the checkpoint, markers, commit")
	}
	require.Equal(t, 502, total(t, db.SQL(), "p1"))

	for version := range eventstore.Expected(2) {
		statements := tr.during(func() {
			_, err := db.Append(ctx, "review-1", version, drafts(1))
			require.NoError(t, err)
		})
		// The first append also reads the lineage of the log.
		require.Len(t, statements, 7-int(version), "an append with one entry: begin, ids, version, event, entry, commit")
	}
}

// If a handler tries to end its transaction, by any means, the unit is rolled back.
// Promise: G4.4
func TestHandlerCannotEndItsTransaction(t *testing.T) {
	t.Parallel()
	output := []outbox.Message{{Topic: "review", Payload: []byte("{}")}}
	for name, end := range map[string]func(ctx context.Context, tx *sql.Tx){
		"commit":     func(_ context.Context, tx *sql.Tx) { _ = tx.Commit() },
		"rollback":   func(_ context.Context, tx *sql.Tx) { _ = tx.Rollback() },
		"sql commit": func(ctx context.Context, tx *sql.Tx) { _, _ = tx.ExecContext(ctx, `commit`) },
		"sql rollback, then a write": func(ctx context.Context, tx *sql.Tx) {
			_, _ = tx.ExecContext(ctx, `rollback`)
			_ = add(ctx, tx, "p2")
		},
		"sql rollback, then another transaction": func(ctx context.Context, tx *sql.Tx) {
			for _, query := range []string{`rollback`, `begin immediate`, `insert into totals values ('p2', 1)`} {
				_, _ = tx.ExecContext(ctx, query)
			}
		},
		"an ignored error that rolls back, then a write": func(ctx context.Context, tx *sql.Tx) {
			_, _ = tx.ExecContext(ctx, `insert or rollback into totals values ('p1', 1)`)
			_ = add(ctx, tx, "p2")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			for _, out := range [][]outbox.Message{nil, output} {
				err := db.Do(context.Background(), delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
					err := add(ctx, tx, "p1")
					end(ctx, tx)
					return provider.Closing{Output: out}, err
				})
				requireClass(t, err, "permanent", "tx_ended")
				requireNothing(t, db)
			}
			require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")), "the next unit works")
			require.Equal(t, 1, total(t, db.SQL(), "p1"))
		})
	}
}

func TestHandlerThatPanicsOrExits(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for _, exit := range []func(){func() { panic("no") }, runtime.Goexit} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { _ = recover() }()
			_ = db.Do(context.Background(), delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
				err := add(ctx, tx, "p1")
				exit()
				return provider.Closing{}, err
			})
		}()
		<-done
		requireNothing(t, db)
	}
	require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")))
}

// A handler that does not return blocks no other writer after its context has ended.
func TestHandlerThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	release, result := make(chan struct{}), make(chan error, 1)
	go func() {
		result <- db.Do(ctx, delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			err := add(ctx, tx, "p1")
			cancel()
			<-release
			return provider.Closing{}, err
		})
	}()
	<-ctx.Done()
	require.NoError(t, db.Do(context.Background(), delivery("m2"), adds("p2")))
	_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	close(release)
	err = <-result
	requireClass(t, err, "shutdown", "")
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 0, total(t, db.SQL(), "p1"))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_markers"))
	require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")))
}

// This also holds if the handler ignores its context, even in a statement that never ends.
// Promise: G6.4
func TestHandlerThatIgnoresItsContext(t *testing.T) {
	t.Parallel()
	const forever = `with recursive n (i) as (select 1 union all select i + 1 from n) select count(*) from n`
	for name, hang := range map[string]func(tx *sql.Tx, release chan struct{}){
		"waits":     func(_ *sql.Tx, release chan struct{}) { <-release },
		"statement": func(tx *sql.Tx, release chan struct{}) { _, _ = tx.Exec(forever); <-release },
		"query":     func(tx *sql.Tx, release chan struct{}) { _ = tx.QueryRow(forever).Err(); <-release },
		"prepared": func(tx *sql.Tx, release chan struct{}) {
			s, err := tx.Prepare(forever)
			if err == nil {
				_, _ = s.Exec()
			}
			<-release
		},
		"further row": func(tx *sql.Tx, release chan struct{}) {
			_ = furtherRow(context.Background(), tx)
			<-release
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			release, result, inside := make(chan struct{}), make(chan error, 1), make(chan struct{})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			go func() {
				result <- db.Do(ctx, delivery("m1"), func(_ context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
					_ = add(context.Background(), tx, "p1")
					close(inside)
					hang(tx, release)
					return provider.Closing{}, add(context.Background(), tx, "p1")
				})
			}()
			<-inside
			cancel()
			require.NoError(t, db.Do(patience.Context(t), delivery("m2"), adds("p2")))
			_, err := db.Append(patience.Context(t), "review-1", eventstore.NoStream, drafts(1))
			require.NoError(t, err)
			close(release)
			requireClass(t, <-result, "shutdown", "")
			require.Equal(t, 0, total(t, db.SQL(), "p1"))
			require.Equal(t, 1, count(t, db.SQL(), "kinora_markers"))
		})
	}
}

// furtherRow finds one row at once, and then searches for another one without end.
func furtherRow(ctx context.Context, tx *sql.Tx) error {
	rows, err := tx.QueryContext(ctx, `with recursive n (i) as (select 1 union all select i + 1 from n) select i from n where i = 1 or i < 0`)
	if err != nil {
		return err
	}
	for rows.Next() {
	}
	return errors.Join(rows.Err(), rows.Close())
}

func TestHandlerPastItsDeadline(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for _, fails := range []bool{true, false} {
		unit, pass := patience.Deadline(t)
		err := db.Do(unit, delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			err := add(ctx, tx, "p1")
			pass()
			<-ctx.Done()
			if fails {
				err = add(ctx, tx, "p1")
			}
			return provider.Closing{}, err
		})
		requireClass(t, err, "unknown", "deadline")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		requireNothing(t, db)
	}
}

// A handler's deadline can be earlier than the unit's.
func TestHandlerWithAnEarlierDeadline(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	const forever = `with recursive n (i) as (select 1 union all select i + 1 from n) insert into totals select i, i from n`
	for _, wait := range []func(context.Context, *sql.Tx) error{
		func(ctx context.Context, _ *sql.Tx) error { <-ctx.Done(); return ctx.Err() },
		func(ctx context.Context, tx *sql.Tx) error { _, err := tx.ExecContext(ctx, forever); return err },
		furtherRow,
	} {
		err := db.Do(context.Background(), delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			err := add(ctx, tx, "p1")
			return provider.Closing{}, errors.Join(err, wait(ctx, tx))
		})
		requireClass(t, err, "unknown", "deadline")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		requireNothing(t, db)
	}
	require.NoError(t, db.Do(patience.Context(t), delivery("m1"), adds("p1")), "the write lock is free")
}

// With a pool of one connection and more callers than connections, no caller deadlocks.
func TestPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	db, _ := traced(t, 1, routed())
	errs := make(chan error)
	const n = 8
	for i := range n {
		go func() {
			errs <- db.Do(ctx, delivery(fmt.Sprint("m", i%4)), func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error) {
				if !found.Fresh[0][0] {
					return provider.Closing{}, nil
				}
				_, err := db.InTx(tx).Append(ctx, "review-out", eventstore.Any, drafts(1))
				return provider.Closing{Output: []outbox.Message{{Topic: "out"}}}, err
			})
		}()
		go func() {
			_, err := db.Append(ctx, fmt.Sprint("review-", i), eventstore.NoStream, drafts(2))
			for range db.ReadStream(ctx, "review-out", 0) {
				// the reader holds no connection in the loop body
				err = errors.Join(err, db.SQL().PingContext(ctx))
			}
			errs <- err
		}()
	}
	for range 2 * n {
		require.NoError(t, <-errs)
	}
	require.Equal(t, 4+2*n, count(t, db.SQL(), "kinora_events"))
	require.Equal(t, 4+4+2*n, count(t, db.SQL(), "kinora_outbox"))
}
