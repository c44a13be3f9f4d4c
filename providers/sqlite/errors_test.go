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
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

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

// An error that comes with a further row is that error, though the query has returned long before.
func TestErrorsOfFurtherRows(t *testing.T) {
	t.Parallel()
	const second = `select json_extract(column1, '$') from (values ('{}'), ('{'))`
	for name, query := range map[string]func(ctx context.Context, tx *sql.Tx) (*sql.Rows, error){
		"query": func(ctx context.Context, tx *sql.Tx) (*sql.Rows, error) { return tx.QueryContext(ctx, second) },
		"prepared": func(ctx context.Context, tx *sql.Tx) (*sql.Rows, error) {
			s, err := tx.PrepareContext(ctx, second)
			if err != nil {
				return nil, err
			}
			return s.QueryContext(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			unit, cancel := context.WithCancel(t.Context())
			defer cancel()
			err := db.Do(unit, marks("m1"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				defer cancel()
				rows, err := query(ctx, tx)
				require.NoError(t, err)
				n := 0
				for rows.Next() {
					n++
				}
				require.Equal(t, 1, n)
				return nil, errors.Join(rows.Err(), rows.Close())
			})
			requireClass(t, err, "unknown", "SQLITE_ERROR")
			require.NotErrorIs(t, err, context.Canceled)
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

			events = drafts(2)
			broken(2)
			_, err = db.Append(ctx, "review-2", eventstore.NoStream, events)
			require.ErrorIs(t, err, eventstore.ErrAmbiguous)
			at, err = db.Append(ctx, "review-2", eventstore.NoStream, events)
			require.NoError(t, err, "the same drafts again")
			require.Equal(t, eventstore.Appended{Stream: "review-2", Version: 2, Position: 5, Count: 2, Replayed: committed}, at)
			require.Equal(t, 5, count(t, db.SQL(), "kinora_outbox"))

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
	if !errors.Is(appendErr, eventstore.ErrAmbiguous) {
		return fmt.Errorf("the append: %w", appendErr)
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
