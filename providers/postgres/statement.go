package postgres

import (
	"context"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// planned makes the server plan a statement on each call, for the current tables. That costs a
// fraction of a millisecond for a whole batch. See append.go.
const planned = pgx.QueryExecModeCacheDescribe

// querier is a pool, a transaction, or a connection.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// session is a transaction, its connection, or a pool.
type session interface {
	querier
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// collect runs a statement and returns its rows.
func collect[T any](ctx context.Context, on querier, row pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, _ := on.Query(ctx, sql, args...) // the rows return its error too
	return pgx.CollectRows(rows, row)
}

// read is collect on the pool. doing is what its caller does, for errors. invalid is the error of the caller's
// arguments: then nothing is sent.
func read[T any](ctx context.Context, db *Provider, doing string, invalid error, row pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	if invalid != nil {
		return nil, wrap(doing, invalid)
	}
	all, err := collect(ctx, db.pool, row, db.q(sql), args...)
	return all, wrap(doing, explain(err))
}

// row is read for a statement that returns at most one row, into columns. found reports whether it returned one.
func (db *Provider) row(ctx context.Context, doing string, invalid error, columns []any, sql string, args ...any) (found bool, err error) {
	if err = invalid; err == nil {
		err = db.pool.QueryRow(ctx, db.q(sql), args...).Scan(columns...)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, wrap(doing, explain(err))
}

// exec is read for a statement that returns no rows. n is the number of those that it changed.
func (db *Provider) exec(ctx context.Context, doing string, invalid error, sql string, args ...any) (n int, err error) {
	if invalid != nil {
		return 0, wrap(doing, invalid)
	}
	tag, err := db.pool.Exec(ctx, db.q(sql), args...)
	return int(tag.RowsAffected()), wrap(doing, explain(err))
}

// queueRows queues a statement, and calls found for each row of its result, with the columns in row.
func queueRows(b *pgx.Batch, row []any, found func(), sql string, args ...any) {
	b.Queue(sql, args...).Query(func(rows pgx.Rows) error { return eachRow(rows, row, found) })
}

// eachRow calls found for each row, with its columns in row.
func eachRow(rows pgx.Rows, row []any, found func()) error {
	_, err := pgx.ForEachRow(rows, row, func() error {
		found()
		return nil
	})
	return err
}

// queueAll queues a statement whose rows are stored in all.
func queueAll[T any](b *pgx.Batch, all *[]T, scan pgx.RowToFunc[T], sql string, args ...any) {
	b.Queue(sql, args...).Query(func(rows pgx.Rows) (err error) {
		*all, err = pgx.CollectRows(rows, scan)
		return err
	})
}

// queueRow queues a statement that returns one row, into columns.
func queueRow(b *pgx.Batch, columns []any, sql string, args ...any) {
	b.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(columns...) })
}

// into returns a function that scans a row. columns returns where its columns go.
func into[T any](columns func(*T) []any) pgx.RowToFunc[T] {
	return func(row pgx.CollectableRow) (v T, err error) {
		err = row.Scan(columns(&v)...)
		return v, err
	}
}

// scannedTime is a time as it is stored. The zero time is null, infinite, or outside the years 1 to 9999.
type scannedTime time.Time

// ScanTimestamptz implements pgtype.TimestamptzScanner.
func (t *scannedTime) ScanTimestamptz(v pgtype.Timestamptz) error {
	at, _ := provider.StoredTime(v.Time) // of null and infinite times it is the zero time
	*t = scannedTime(at)
	return nil
}

// scanTime returns where a column with a time goes.
func scanTime(to *time.Time) *scannedTime { return (*scannedTime)(to) }

// roundUp returns t in PostgreSQL's microseconds, or the next one. pgx rounds down.
func roundUp(t time.Time) time.Time { return t.Add(time.Microsecond - 1).Truncate(time.Microsecond) }

// jsonList returns a list that always has a JSON form as an argument for json: never null.
func jsonList[T any](list []T) string {
	text, _ := json.Marshal(append([]T{}, list...))
	return string(text)
}

// some returns nil for an empty list.
func some[T any](all []T) []T {
	if len(all) == 0 {
		return nil
	}
	return all
}

// mapSlice applies f to each element. It returns nil for nil.
func mapSlice[T, R any](list []T, f func(*T) R) []R {
	if list == nil {
		return nil
	}
	all := make([]R, len(list))
	for i := range list {
		all[i] = f(&list[i])
	}
	return all
}

// SQLSTATEs that the code distinguishes.
const (
	uniqueViolation     = "23505"
	lockNotAvailable    = "55P03"
	laneHeld            = "KN001" // raised by kinora.unheld
	checkpointDecides   = "KN002" // raised by kinora.unheld, kinora.unmarked and kinora.advance
	checkpointFenced    = "KN003" // raised by kinora.advance
	undefinedTable      = "42P01"
	undefinedFunction   = "42883"
	inFailedTransaction = "25P02"
	deadlockDetected    = "40P01"
	serializationFailed = "40001"
	queryCanceled       = "57014"
	syntaxError         = "42601"
	notSupported        = "0A000"
	dependentObjects    = "2BP01"

	// The server ended the session for this reason, or because of its transaction's length: nothing was committed. The latter
	// can also come in the microseconds in which a commit ends; then the marker decides when the message is tried again.
	idleInTransaction  = "25P03"
	transactionTooLong = "25P04"
)

// Advisory locks have a class for each use, and a key from a fixed hash (FNV-1a). hashtext is not
// used, because it may change between versions. A collision only makes two names share a lock.
const (
	lockClassMigrate = 1802661486
	lockClassFence   = 1802661488 // 1802661487 is the gap lock of migration 1
	lockClassHold    = 1802661489
	lockClassSerial  = 1802661490
)

func lockKey(name string) int32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return int32(h.Sum32())
}

// orderedKey returns the lock of a key with OrderedKey. It has 64 bits, so it differs from the locks above.
func orderedKey(schema, topic, key string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(schema + "\x00" + topic + "\x00" + key + "\x00")) // no part has a NUL
	return int64(h.Sum64())
}

func pgError(err error) *pgconn.PgError {
	e, _ := errors.AsType[*pgconn.PgError](err)
	return e
}

// violates reports whether err is a violation of this unique constraint.
func violates(err error, constraint string) bool {
	e := pgError(err)
	return e != nil && e.Code == uniqueViolation && e.ConstraintName == constraint
}

// ours matches the server's error if one of Kinora's tables or functions is missing.
var ours = regexp.MustCompile(`\.(streams|events|outbox|markers|low_water_marks|generations|parked|holds|runners|in_flight|checkpoints|leases|incarnation|migrations|tasks|task_groups|task_trail|snapshots|services|pauses|acts)"|\.(un)?(held|marked)\(|\.(checkpoint|advance|(enqueue|claim|change)_tasks|enqueue_task_group|(answer|postpone)_task)\(`)

// explain adds ErrNotMigrated to the error of a missing table or function.
func explain(err error) error {
	if e := pgError(err); e != nil && (e.Code == undefinedTable || e.Code == undefinedFunction) && ours.MatchString(e.Message) {
		return errors.Join(ErrNotMigrated, err)
	}
	return err
}

// wrap adds the failed action to err. It returns nil for nil.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// transient matches the SQLSTATEs that are not the message's fault (see docs/architecture.md): the
// connection, a rollback, resources, the operator, and the lock timeout.
var transient = regexp.MustCompile(`^(08|40|53|57|55P03)`)

// class gives an error of a statement a class, unless it has one.
func class(err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok || err == nil {
		return err
	}
	of := provider.HandlerError(err)
	switch e := pgError(err); {
	case of.Class == provider.ClassPermanent && !violates(err, "events_id_key"): // the latter may pass
	case e != nil:
		of.Class, of.Code = provider.ClassUnknown, e.Code
		switch {
		case e.Code == queryCanceled && e.Routine == "CopyGetData": // the client could not read or encode rows to copy
		case e.Code == deadlockDetected:
			of.Class, of.Code = provider.ClassTransient, provider.CodeDeadlock
		case strings.HasPrefix(e.Code, "22"): // data: a retry cannot help
			of.Class = provider.ClassPermanent
		case transient.MatchString(e.Code):
			of.Class = provider.ClassTransient
		}
	case isNetwork(err):
		of.Class, of.Code = provider.ClassTransient, "network"
	}
	of.Err = explain(err)
	return of
}

// isNetwork reports whether the connection failed, and not the statement. A caller's deadline is
// neither, but connecting has a separate deadline.
func isNetwork(err error) bool {
	_, network := errors.AsType[net.Error](err) // includes net.ErrClosed
	network = network || errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	return isConnect(err) || network && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

// ofHandler classes an error of a handler whose unit's connection works. A network error is then the
// handler's, unless only PostgreSQL's client returns it, for example if the handler reads through a pool.
// The source of an unexpected EOF or a reset is unknown: the attempt counts.
func ofHandler(err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok || err == nil || pgError(err) != nil || !isNetwork(err) ||
		isConnect(err) || errors.Is(err, pgconn.ErrConnClosed) {
		return err
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: err}
}

// classifyOwn classes an error of a Kinora statement or of acquiring a connection: it is not the
// message's fault, except the server's errors about data (22) and limits (54). An error of arguments has no class.
func classifyOwn(ctx context.Context, err error) error {
	switch e := pgError(err); {
	case err == nil || errors.Is(err, eventstore.ErrInvalid) || errors.Is(err, provider.ErrInput):
		return err
	case e != nil && (strings.HasPrefix(e.Code, "22") || strings.HasPrefix(e.Code, "54")):
		return class(err)
	case e == nil && errors.Is(ctx.Err(), context.Canceled):
		return &provider.Error{Class: provider.ClassShutdown, Err: err}
	case e == nil && ctx.Err() != nil:
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeDeadline, Err: err}
	}
	of, _ := errors.AsType[*provider.Error](class(err))
	return &provider.Error{Class: provider.ClassTransient, Code: of.Code, Err: of.Err}
}

func isConnect(err error) bool {
	_, ok := errors.AsType[*pgconn.ConnectError](err)
	return ok && !errors.Is(err, context.Canceled)
}

// maybeExecuted reports whether a statement that failed with err may have been executed. A FATAL error, or
// one of class 08, may come from a pooler whose connection to the server broke. SafeToRetry is ignored for
// a closed connection: see docs/adr/0005.
func maybeExecuted(err error) bool {
	if err == nil || isConnect(err) {
		return false
	}
	if e := pgError(err); e != nil {
		return e.Severity == "FATAL" || e.Severity == "PANIC" || strings.HasPrefix(e.Code, "08")
	}
	return errors.Is(err, pgconn.ErrConnClosed) || !pgconn.SafeToRetry(err)
}

// isAmbiguous reports whether a unit may be committed although its commit failed with err.
func isAmbiguous(err error) bool {
	e := pgError(err)
	return maybeExecuted(err) && (e == nil || e.Code != idleInTransaction && e.Code != transactionTooLong)
}
