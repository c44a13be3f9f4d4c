package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
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

// queueRows queues a statement. It calls found for each row of the result, with the row's columns
// in row.
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
