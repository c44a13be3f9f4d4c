package sqlite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"reflect"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
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

func TestErrorsOfUnitsAreClassed(t *testing.T) {
	t.Parallel()
	fails := func(query string) handlerFunc {
		return func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			_, err := tx.ExecContext(ctx, query)
			return nil, err
		}
	}
	returns := func(err error) handlerFunc {
		return func(context.Context, *sql.Tx, []int) ([]message, error) { return nil, err }
	}
	boom := errors.New("boom")
	for _, c := range []struct {
		name        string
		apply       handlerFunc
		class, code string
	}{
		{"its own error", returns(boom), "unknown", ""},
		{"a permanent one", returns(fmt.Errorf("handler: %w", projector.Permanent(boom))), "permanent", ""},
		{"unique", fails(`insert into totals values ('there', 1)`), "unknown", "SQLITE_CONSTRAINT_PRIMARYKEY"},
		{"not null", fails(`insert into totals values ('x', null)`), "unknown", "SQLITE_CONSTRAINT_NOTNULL"},
		{"datatype", fails(`insert into totals values ('x', 'y')`), "unknown", "SQLITE_CONSTRAINT_DATATYPE"},
		{"no table", fails(`insert into nowhere values (1)`), "unknown", "SQLITE_ERROR"},
		{"a busy database", returns(fmt.Errorf("elsewhere: %w", errorOf(sqlite3.SQLITE_BUSY))), "transient", "SQLITE_BUSY"},
		{"a locked table", returns(errorOf(sqlite3.SQLITE_LOCKED_SHAREDCACHE)), "transient", "SQLITE_LOCKED"},
		{"an i/o error", returns(errorOf(sqlite3.SQLITE_IOERR_WRITE)), "transient", "SQLITE_IOERR"},
		{"a full disk", returns(errorOf(sqlite3.SQLITE_FULL)), "transient", "SQLITE_FULL"},
		{"no such file", returns(errorOf(sqlite3.SQLITE_CANTOPEN)), "transient", "SQLITE_CANTOPEN"},
		{"no memory", returns(errorOf(sqlite3.SQLITE_NOMEM)), "transient", "SQLITE_NOMEM"},
		{"lock protocol", returns(errorOf(sqlite3.SQLITE_PROTOCOL)), "transient", "SQLITE_PROTOCOL"},
		{"corruption", returns(errorOf(sqlite3.SQLITE_CORRUPT)), "unknown", "SQLITE_CORRUPT"},
		{"a bad message", func(context.Context, *sql.Tx, []int) ([]message, error) {
			return []message{{Topic: "review"}, {Topic: "\x00"}}, nil
		}, "permanent", "invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			_, err := db.SQL().Exec(`insert into totals values ('there', 1)`)
			require.NoError(t, err)
			requireClass(t, db.Do(context.Background(), marks("m1"), c.apply), c.class, c.code)
			require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))
			require.Equal(t, 0, count(t, db.SQL(), "kinora_outbox"))
		})
	}
}

// errorOf makes an error of the driver with a code that is hard to provoke.
func errorOf(code int64) error {
	e := &moderncsqlite.Error{}
	f := reflect.ValueOf(e).Elem().FieldByName("code")
	reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().SetInt(code)
	return e
}

// The commit goes through, or not, and its caller hears of an i/o error either way.
func TestAmbiguousCommit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for name, committed := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, tr := traced(t, 2, routed())
			broken := func(times int) {
				tr.onEnd = func(tx driver.Tx) error {
					if times == 0 {
						return tx.Commit()
					}
					times--
					end := tx.Rollback // as the driver does after a commit that failed
					if committed {
						end = tx.Commit
					}
					return errors.Join(errorOf(sqlite3.SQLITE_IOERR_FSYNC), end())
				}
			}
			events := drafts(3)
			broken(1)
			at, err := db.Append(ctx, "review-1", eventstore.NoStream, events)
			require.NoError(t, err, "an append resolves it by the ids of its events")
			require.Equal(t, eventstore.Appended{Stream: "review-1", Version: 3, Position: 3, Count: 3}, at)
			require.Equal(t, 3, count(t, db.SQL(), "kinora_events"))
			require.Equal(t, 3, count(t, db.SQL(), "kinora_outbox"))

			broken(1)
			requireClass(t, db.Do(ctx, marks("m1"), adds("p1")), "ambiguous", "SQLITE_IOERR")
			require.NoError(t, db.Do(ctx, marks("m1"), adds("p1")), "the marker decides")
			require.Equal(t, 1, total(t, db.SQL(), "p1"))
		})
	}
}

// childFillsDisk lets its files grow no further, and sees what becomes of a unit and of an append.
func childFillsDisk(path string) error {
	signal.Ignore(syscall.SIGXFSZ)
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, routed())
	if err != nil {
		return err
	}
	if err := db.Do(ctx, marks("m0"), adds("p0")); err != nil {
		return err
	}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		return err
	}
	wal, err := os.Stat(path + "-wal")
	if err != nil {
		return err
	}
	limit := syscall.Rlimit{Cur: uint64(wal.Size()) + 100, Max: was.Max}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	_, appendErr := db.Append(ctx, "review-1", eventstore.Any, drafts(3))
	doErr := db.Do(ctx, marks("m1"), adds("p1"))
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		return err
	}
	if appendErr == nil {
		return errors.New("the append should not have succeeded")
	}
	fmt.Println(projector.ClassOf(doErr))
	for range 2 {
		if err := db.Do(ctx, marks("m1"), adds("p1")); err != nil {
			return err
		}
	}
	return db.Close()
}

func TestFilesThatCannotGrow(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	child := start(t, "full-disk", path)
	require.Equal(t, "ambiguous", child.line())
	child.wait()
	db := openAt(t, path, nil)
	require.Equal(t, 1, total(t, db.SQL(), "p0"))
	require.Equal(t, 1, total(t, db.SQL(), "p1"), "what was tried before there was space again left nothing")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_events"))
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

func TestMarkersOfTheLiveGeneration(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	old := projector.Work{Projector: "totals", Marks: []marker.Key{{Handler: "totals/created", MessageID: "m1"}}}
	renamed := projector.Work{Projector: "totals", Marks: []marker.Key{
		{Handler: handler, Was: []string{"totals/made", "totals/created"}, MessageID: "m1"},
	}}
	require.NoError(t, db.Do(ctx, old, adds("p1")))
	require.NoError(t, db.Do(ctx, renamed, adds("p1")))
	require.Equal(t, 1, total(t, db.SQL(), "p1"), "a marker under an earlier name counts")
	outcomes := func() []projector.Outcome {
		o, err := db.Outcomes(ctx, renamed.Marks)
		require.NoError(t, err)
		return o
	}
	require.Equal(t, []projector.Outcome{projector.Applied}, outcomes())

	_, err := db.SQL().Exec(`insert into kinora_generations values ('totals', 2)`)
	require.NoError(t, err)
	require.Equal(t, []projector.Outcome{projector.Unseen}, outcomes())
	for range 2 {
		require.NoError(t, db.Do(ctx, renamed, adds("p1")))
	}
	require.Equal(t, 2, total(t, db.SQL(), "p1"), "another build of the read model starts afresh")
	require.Equal(t, []projector.Outcome{projector.Applied}, outcomes())
}

func TestOutcomesOfParkedMessages(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	park := func(p projector.Parked) {
		require.NoError(t, db.Do(ctx, projector.Work{Projector: p.Projector, Park: []projector.Parked{p}}, nil))
	}
	park(projector.Parked{Projector: "totals", Handler: handler, MessageID: "at the handler"})
	park(projector.Parked{Projector: "totals", Handler: "totals/created", MessageID: "at its old name"})
	park(projector.Parked{Projector: "totals", MessageID: "before any handler"})
	park(projector.Parked{Projector: "others", MessageID: "elsewhere"})
	park(projector.Parked{Projector: "totals", Handler: handler, MessageID: "parked, then applied"})
	require.NoError(t, db.Do(ctx, marks("parked, then applied"), adds("p1")))

	var keys []marker.Key
	for _, id := range []string{"at the handler", "at its old name", "before any handler", "elsewhere", "parked, then applied", "unknown"} {
		keys = append(keys, marker.Key{Handler: handler, Was: []string{"totals/created"}, MessageID: id})
	}
	got, err := db.Outcomes(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, []projector.Outcome{
		projector.IsParked, projector.IsParked, projector.IsParked, projector.Unseen, projector.Applied, projector.Unseen,
	}, got)
}

// What is wrong with a message must not keep it from being set aside.
func TestAnythingCanBeParked(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	bad := "\x00\xff'; drop table kinora_parked; --" + strings.Repeat("long", 1000)
	p := projector.Parked{
		Projector: "totals", MessageID: bad, Topic: bad, Key: bad, Payload: []byte(bad),
		Headers: map[string]string{"valid": "\x00 é ' ☂"}, Class: projector.PermanentClass, Code: "malformed", Attempts: 1,
	}
	require.NoError(t, db.Do(context.Background(), projector.Work{Projector: "totals", Park: []projector.Parked{p}}, nil))
	got, err := db.ParkedMessages(context.Background(), "totals", 0, 10)
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.False(t, got[0].At.IsZero())
	p.Seq, p.At = 1, got[0].At
	require.Equal(t, p, got[0])
}
