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
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

type (
	message     = outbox.Message
	handlerFunc = func(context.Context, *sql.Tx, []int) ([]message, error)
)

func requireClass(t *testing.T, err error, class, code string) {
	t.Helper()
	var e *projector.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, class, e.Class.String(), "class of %v", err)
	require.Equal(t, code, e.Code, "code of %v", err)
}

// requireNothing requires that no unit of work left anything.
func requireNothing(t *testing.T, db *sqlite.DB) {
	t.Helper()
	for _, table := range []string{"kinora_markers", "kinora_outbox", "kinora_parked", "totals"} {
		require.Equal(t, 0, count(t, db.SQL(), table), table)
	}
}

func TestUnitStatements(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	require.NoError(t, db.Do(ctx, projector.Work{Projector: "totals"}, adds("warm")))

	statements := tr.during(func() { require.NoError(t, db.Do(ctx, projector.Work{Projector: "totals"}, adds("p1"))) })
	require.Equal(t, []string{"begin", addToTotal, "commit"}, statements, "without markers: not one statement more")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))

	statements = tr.during(func() { require.NoError(t, db.Do(ctx, marks("m1"), adds("p1"))) })
	require.Len(t, statements, 4)
	require.Contains(t, statements[1], "insert into kinora_markers")
	require.Equal(t, addToTotal, statements[2])

	statements = tr.during(func() { require.NoError(t, db.Do(ctx, marks("m1"), adds("p1"))) })
	require.Len(t, statements, 3, "a duplicate: begin, look, roll back")

	statements = tr.during(func() {
		_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
		require.NoError(t, err)
	})
	require.Len(t, statements, 6, "an append with one entry: begin, ids, version, event, entry, commit")
}

// What a handler does to its transaction is undone, by whatever means it tries.
func TestHandlerCannotEndItsTransaction(t *testing.T) {
	t.Parallel()
	output := []message{{Topic: "review", Payload: []byte("{}")}}
	for name, end := range map[string]func(ctx context.Context, tx *sql.Tx){
		"commit":     func(_ context.Context, tx *sql.Tx) { _ = tx.Commit() },
		"rollback":   func(_ context.Context, tx *sql.Tx) { _ = tx.Rollback() },
		"sql commit": func(ctx context.Context, tx *sql.Tx) { _, _ = tx.ExecContext(ctx, `commit`) },
		"sql rollback, and on": func(ctx context.Context, tx *sql.Tx) {
			_, _ = tx.ExecContext(ctx, `rollback`)
			_, _ = adds("p2")(ctx, tx, nil)
		},
		"sql rollback, and a transaction of its own": func(ctx context.Context, tx *sql.Tx) {
			for _, query := range []string{`rollback`, `begin immediate`, `insert into totals values ('p2', 1)`} {
				_, _ = tx.ExecContext(ctx, query)
			}
		},
		"an ignored error that rolls back, and on": func(ctx context.Context, tx *sql.Tx) {
			_, _ = tx.ExecContext(ctx, `insert or rollback into totals values ('p1', 1)`)
			_, _ = adds("p2")(ctx, tx, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			for _, out := range [][]message{nil, output} {
				err := db.Do(context.Background(), marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
					_, err := adds("p1")(ctx, tx, nil)
					end(ctx, tx)
					return out, err
				})
				requireClass(t, err, "permanent", "tx_ended")
				requireNothing(t, db)
			}
			require.NoError(t, db.Do(context.Background(), marks("m1"), adds("p1")), "the next one is not harmed")
			require.Equal(t, 1, total(t, db.SQL(), "p1"))
		})
	}
}

func TestHandlerThatPanicsOrExits(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for _, leave := range []func(){func() { panic("no") }, runtime.Goexit} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { _ = recover() }()
			_ = db.Do(context.Background(), marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
				_, err := adds("p1")(ctx, tx, nil)
				leave()
				return nil, err
			})
		}()
		<-done
		requireNothing(t, db)
	}
	require.NoError(t, db.Do(context.Background(), marks("m1"), adds("p1")))
}

// A handler that does not come back holds nobody up once its context has ended.
func TestHandlerThatHangs(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	release, result := make(chan struct{}), make(chan error, 1)
	go func() {
		result <- db.Do(ctx, marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			_, err := adds("p1")(ctx, tx, nil)
			cancel()
			<-release
			return nil, err
		})
	}()
	<-ctx.Done()
	require.NoError(t, db.Do(context.Background(), marks("m2"), adds("p2")))
	_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	close(release)
	err = <-result
	requireClass(t, err, "shutdown", "")
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 0, total(t, db.SQL(), "p1"))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_markers"))
	require.NoError(t, db.Do(context.Background(), marks("m1"), adds("p1")))
}

// Nor does one that is in a statement which never ends and which its context does not end, or one that is rehearsed.
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
		for _, rehearse := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, rehearsed %t", name, rehearse), func(t *testing.T) {
				t.Parallel()
				db := open(t, nil)
				release, result, inside := make(chan struct{}), make(chan error, 1), make(chan struct{})
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				w := marks("m1")
				if rehearse {
					w.Rehearse = func([]projector.Change) { t.Error("it was broken off") }
				}
				go func() {
					result <- db.Do(ctx, w, func(_ context.Context, tx *sql.Tx, _ []int) ([]message, error) {
						_, _ = adds("p1")(context.Background(), tx, nil)
						close(inside)
						hang(tx, release)
						_, err := adds("p1")(context.Background(), tx, nil)
						return nil, err
					})
				}()
				<-inside
				cancel()
				require.NoError(t, db.Do(within(t, 5*time.Second), marks("m2"), adds("p2")))
				_, err := db.Append(within(t, 5*time.Second), "review-1", eventstore.NoStream, drafts(1))
				require.NoError(t, err)
				close(release)
				requireClass(t, <-result, "shutdown", "")
				require.Equal(t, 0, total(t, db.SQL(), "p1"))
				require.Equal(t, 1, count(t, db.SQL(), "kinora_markers"))
			})
		}
	}
}

// furtherRow finds a row at once, and then looks for another one for ever.
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
		err := db.Do(within(t, time.Second), marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			_, err := adds("p1")(ctx, tx, nil)
			<-ctx.Done()
			if fails {
				_, err = adds("p1")(ctx, tx, nil)
			}
			return nil, err
		})
		requireClass(t, err, "unknown", "deadline")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		requireNothing(t, db)
	}
}

// A handler's deadline may be one of its own, nearer than that of the unit.
func TestHandlerPastADeadlineOfItsOwn(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	const forever = `with recursive n (i) as (select 1 union all select i + 1 from n) insert into totals select i, i from n`
	for _, wait := range []func(context.Context, *sql.Tx) error{
		func(ctx context.Context, _ *sql.Tx) error { <-ctx.Done(); return ctx.Err() },
		func(ctx context.Context, tx *sql.Tx) error { _, err := tx.ExecContext(ctx, forever); return err },
		furtherRow,
	} {
		err := db.Do(context.Background(), marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, err := adds("p1")(ctx, tx, nil)
			return nil, errors.Join(err, wait(ctx, tx))
		})
		requireClass(t, err, "unknown", "deadline")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		requireNothing(t, db)
	}
	require.NoError(t, db.Do(within(t, time.Minute), marks("m1"), adds("p1")), "the turn is free")
}

// A pool of one connection, and more callers than connections: nobody waits for himself.
func TestPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	ctx := within(t, time.Minute)
	db, _ := traced(t, 1, routed())
	errs := make(chan error)
	const n = 8
	for i := range n {
		go func() {
			errs <- db.Do(ctx, marks(fmt.Sprint("m", i%4)), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
				_, err := db.InTx(tx).Append(ctx, "review-out", eventstore.Any, drafts(1))
				return []message{{Topic: "out"}}, err
			})
		}()
		go func() {
			_, err := db.Append(ctx, fmt.Sprint("review-", i), eventstore.NoStream, drafts(2))
			for range db.ReadStream(ctx, "review-out", 0) {
				err = errors.Join(err, db.SQL().PingContext(ctx)) // the loop body has the connection to itself
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
