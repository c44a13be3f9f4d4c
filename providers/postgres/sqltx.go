package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
)

// InSQLTx is InTx for a transaction of database/sql, such as that of sqlx, GORM or sqlc. The
// transaction must have been begun with pgx's driver, package github.com/jackc/pgx/v5/stdlib, in the
// database of this DB.
//   - The statements of one method run while database/sql executes a statement of tx. So they wait
//     for other statements of tx, and these for them.
//   - If tx has ended, the error is sql.ErrTxDone.
//   - If tx is nil, or of another driver, the error is an *eventstore.InvalidError, and no statement
//     was sent.
//   - Close the rows of a query first, as before any other statement of tx.
//   - A tracer of the pgx connection also gets one empty statement, "-- kinora", for each method: one
//     round trip more. A wrapper of the driver that records errors gets an error of this statement.
func (db *DB) InSQLTx(tx *sql.Tx) *Tx { return &Tx{db: db.Provider, in: db.inSQL(tx)} }

// borrowSQL is the statement that pgx rewrites. It is not sent.
const borrowSQL = `-- kinora`

// inSQL borrows the connection of tx. database/sql does not return it; but pgx calls an argument
// that implements pgx.QueryRewriter with the connection, before the statement. So f runs while
// database/sql has locked the connection for this statement.
func (db *Provider) inSQL(tx *sql.Tx) within {
	return func(ctx context.Context, f func(q session) error) error {
		if tx == nil {
			return notPgx("must not be nil")
		}
		b := &borrower{db: db, f: f}
		_, err := tx.ExecContext(ctx, borrowSQL, b)
		switch {
		case !b.borrowed:
			return unborrowed(ctx, err)
		case b.err != nil:
			return b.err // err may be driver.ErrBadConn instead
		case errors.Is(err, errDone):
			return nil
		}
		return err
	}
}

func notPgx(reason string) error { return &eventstore.InvalidError{Field: "tx", Reason: reason} }

// unborrowed returns the error of a statement whose argument was not called.
func unborrowed(ctx context.Context, err error) error {
	if errors.Is(err, sql.ErrTxDone) || errors.Is(err, driver.ErrBadConn) || ctx.Err() != nil || pgError(err) != nil || isNetwork(err) {
		return fmt.Errorf("use the *sql.Tx: %w", err)
	}
	return notPgx("must have been begun with the driver github.com/jackc/pgx/v5/stdlib")
}

// borrower calls f with a connection.
type borrower struct {
	db       *Provider
	f        func(q session) error
	borrowed bool
	err      error
}

// errDone ends the statement whose argument was called.
var errDone = errors.New("no error: the statements of Kinora have been executed")

// RewriteQuery implements pgx.QueryRewriter. An error ends the statement, so that nothing is sent.
func (b *borrower) RewriteQuery(_ context.Context, conn *pgx.Conn, sql string, _ []any) (string, []any, error) {
	b.borrowed = true
	if b.err = b.db.checkSettings(conn); b.err == nil {
		b.err = b.f(conn)
	}
	if b.err != nil {
		return "", nil, b.err
	}
	if conn.Config().Tracer != nil { // it would record the error
		return sql, nil, nil
	}
	return "", nil, errDone
}
