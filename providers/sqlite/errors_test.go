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
	"unsafe"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Promise: G6.2
func TestErrorsOfUnitsAreClassed(t *testing.T) {
	t.Parallel()
	fails := func(query string) handlerFunc {
		return func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			_, err := tx.ExecContext(ctx, query)
			return provider.Closing{}, err
		}
	}
	returns := func(err error) handlerFunc {
		return func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{}, err
		}
	}
	boom := errors.New("boom")
	for _, c := range []struct {
		name        string
		apply       handlerFunc
		class, code string
	}{
		{"an error of the handler", returns(boom), "unknown", ""},
		{"a permanent error", returns(fmt.Errorf("handler: %w", &provider.Error{Class: provider.ClassPermanent, Err: boom})), "permanent", ""},
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
		{"a bad message", func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{Output: []outbox.Message{{Topic: "review"}, {Topic: "\x00"}}}, nil
		}, "permanent", "invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			_, err := db.SQL().Exec(`insert into totals values ('there', 1)`)
			require.NoError(t, err)
			requireClass(t, db.Do(context.Background(), delivery("m1"), c.apply), c.class, c.code)
			require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))
			require.Equal(t, 0, count(t, db.SQL(), "kinora_outbox"))
		})
	}
}

// An error names the message whose statement failed or ended the transaction, if it is known.
func TestErrorsNameTheirMessage(t *testing.T) {
	t.Parallel()
	const fails, endsIt = `insert into totals values ('x', null)`, `insert or rollback into totals values ('there', 1)`
	for name, c := range map[string]struct {
		statements  [3]string // one of each message
		swallows    bool
		message     int
		class, code string
	}{
		"the second fails":                                     {[3]string{"", fails, ""}, false, 1, "unknown", "SQLITE_CONSTRAINT_NOTNULL"},
		"the first ends the transaction":                       {[3]string{endsIt, "", ""}, true, 0, "permanent", "tx_ended"},
		"the second ends the transaction, and the third fails": {[3]string{"", endsIt, `insert into nowhere values (1)`}, true, 1, "permanent", "tx_ended"},
		"an ignored failure":                                   {[3]string{"", fails, ""}, true, -1, "", ""},
		"a constraint checked at the commit":                   {[3]string{"", `insert into children values (1, 1)`, ""}, false, -1, "unknown", "SQLITE_CONSTRAINT_FOREIGNKEY"},
		"an error of the handler":                              {[3]string{"", "", "boom"}, false, -1, "unknown", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			_, err := db.SQL().Exec(`
				insert into totals values ('there', 1);
				create table children (id integer primary key, parent integer references children2 deferrable initially deferred);
				create table children2 (id integer primary key)`)
			require.NoError(t, err)
			err = db.Do(t.Context(), delivery("m1", "m2", "m3"), func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error) {
				for i, statement := range c.statements {
					found.Begin(i)
					if statement == "boom" {
						return provider.Closing{}, errors.New(statement)
					}
					if _, err := tx.ExecContext(ctx, statement); err != nil && !c.swallows {
						return provider.Closing{}, err
					}
				}
				return provider.Closing{}, nil
			})
			if c.class == "" {
				require.NoError(t, err)
				return
			}
			requireClass(t, err, c.class, c.code)
			if c.message >= 0 {
				requireMessage(t, err, c.message)
			} else {
				_, named := errors.AsType[*provider.MessageError](err)
				require.False(t, named)
			}
			require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))
		})
	}
}

// If one of Kinora's statements fails, no message is to blame.
func TestErrorsOfKinorasStatementsAreTransient(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"kinora_parked", "kinora_in_flight", "kinora_markers"} {
		db := open(t, nil)
		u := delivery("m1", "m2")
		u.Careful = &provider.Worker{Runner: "r1"}
		require.NoError(t, db.Do(t.Context(), u, adds("p1")))
		u = delivery("m3")
		u.Careful = &provider.Worker{Runner: "r1"}
		_, err := db.SQL().Exec(`alter table ` + table + ` rename to away`)
		require.NoError(t, err)
		err = db.Do(t.Context(), u, adds("p1"))
		require.ErrorIs(t, err, sqlite.ErrNotMigrated)
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err), table)
		_, err = db.SQL().Exec(`alter table away rename to ` + table)
		require.NoError(t, err)
		require.NoError(t, db.Do(t.Context(), u, adds("p1")))
		require.Equal(t, 3, total(t, db.SQL(), "p1"))
	}
}

// An error at a further row is reported, although the query returned without one.
// Promise: G6.2
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
			err := db.Do(unit, delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
				ctx, cancel := context.WithTimeout(ctx, patience.Limit())
				defer cancel()
				rows, err := query(ctx, tx)
				require.NoError(t, err)
				n := 0
				for rows.Next() {
					n++
				}
				require.Equal(t, 1, n)
				return provider.Closing{}, errors.Join(rows.Err(), rows.Close())
			})
			requireClass(t, err, "unknown", "SQLITE_ERROR")
			require.NotErrorIs(t, err, context.Canceled)
		})
	}
}

// errorOf makes a driver error with a code that is hard to provoke.
func errorOf(code int64) error {
	e := &moderncsqlite.Error{}
	f := reflect.ValueOf(e).Elem().FieldByName("code")
	reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().SetInt(code)
	return e
}

// The commit succeeds or not, and the caller gets an i/o error in both cases.
// Promise: G4.3
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
					end := tx.Rollback // as the driver does after a failed commit
					if committed {
						end = tx.Commit
					}
					return errors.Join(errorOf(sqlite3.SQLITE_IOERR_FSYNC), end())
				}
			}
			events := drafts(3)
			broken(1)
			at, err := db.Append(ctx, "review-1", eventstore.NoStream, events)
			require.NoError(t, err, "an append resolves the ambiguity by its event ids")
			require.Equal(t, eventstore.Appended{Stream: "review-1", Version: 3, Position: 3, Count: 3, Log: at.Log}, at)
			require.Equal(t, 3, count(t, db.SQL(), "kinora_events"))
			require.Equal(t, 3, count(t, db.SQL(), "kinora_outbox"))

			events = drafts(2)
			broken(2)
			_, err = db.Append(ctx, "review-2", eventstore.NoStream, events)
			require.ErrorIs(t, err, eventstore.ErrAmbiguous)
			at, err = db.Append(ctx, "review-2", eventstore.NoStream, events)
			require.NoError(t, err, "the same drafts again")
			require.Equal(t, eventstore.Appended{Stream: "review-2", Version: 2, Position: 5, Count: 2, Replayed: committed, Log: at.Log}, at)
			require.Equal(t, 5, count(t, db.SQL(), "kinora_outbox"))

			broken(1)
			requireClass(t, db.Do(ctx, delivery("m1"), adds("p1")), "ambiguous", "SQLITE_IOERR")
			require.NoError(t, db.Do(ctx, delivery("m1"), adds("p1")), "the marker decides")
			require.Equal(t, 1, total(t, db.SQL(), "p1"))
		})
	}
}

// childFillsDisk limits the size of its files, and then runs a unit and an append.
func childFillsDisk(path string) error {
	signal.Ignore(syscall.SIGXFSZ)
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, routed())
	if err != nil {
		return err
	}
	if err := db.Do(ctx, delivery("m0"), adds("p0")); err != nil {
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
	doErr := db.Do(ctx, delivery("m1"), adds("p1"))
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		return err
	}
	if !errors.Is(appendErr, eventstore.ErrAmbiguous) {
		return fmt.Errorf("the append: %w", appendErr)
	}
	fmt.Println(provider.ClassOf(doErr))
	for range 2 {
		if err := db.Do(ctx, delivery("m1"), adds("p1")); err != nil {
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
	require.Equal(t, 1, total(t, db.SQL(), "p1"), "the tries without space left no rows")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_events"))
}
