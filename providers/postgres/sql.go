package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// SQL runs units for handlers of *sql.Tx, on a connection of the DB's pool, by pgx's driver of database/sql.
type SQL struct{ *DB }

// SQL returns the provider for handlers of *sql.Tx, and for those of sqlx, GORM and sqlc, which accept
// one. For the outbox and the events in a handler's transaction, use InSQLTx.
func (db *DB) SQL() *SQL { return &SQL{db} }

// TasksIn returns the tasks in tx, a handler's transaction or one that InSQLTx accepts, at READ
// COMMITTED. After the commit of a transaction that you began yourself, call Wake.
func (s *SQL) TasksIn(tx *sql.Tx) provider.TaskTx { return &taskTx{db: s.Provider, in: s.inSQL(tx)} }

// Do implements provider.Units like DB.Do, with these differences:
//   - The unit ends tx when run returns. Later calls of tx return sql.ErrTxDone.
//   - Commit and Rollback return ErrHeld and end tx for the handlers. Then the unit fails with the code "tx_ended".
//   - tx has no savepoints of its own: execute the statement savepoint.
//   - Rows that a handler leaves open, and its prepared statements, are closed.
//   - If a handler does not return after ctx has ended, the unit closes the connection, but waits for a call of the handler's own
//     code within a statement, such as a Scanner.
func (s *SQL) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error)) error {
	w := s.newUnit(u, false)
	var h *handlersTx
	w.acquire = func(ctx context.Context) (_ *leased, err error) {
		if h, err = newHandlersTx(ctx, s.Provider); err != nil {
			return nil, err
		}
		return &leased{h.driver.Conn.Conn(), h.release, h.abandon}, nil
	}
	return w.do(ctx, func(pgx.Tx) (provider.Closing, error) {
		defer h.end() // also after a panic or runtime.Goexit in run
		w.found.Begin = func(message int) {
			if h.intact() {
				w.now = message
			}
		}
		closing, err := run(ctx, h.tx, w.found)
		h.end()
		if h.driver.ended.Load() && (err == nil || errors.Is(err, sql.ErrTxDone)) {
			err = &provider.Error{Class: errEnded.Class, Code: errEnded.Code, Err: withMessage(w.now, errEnded.Err)}
		}
		return closing, err
	})
}

// handlersTx is the transaction of a unit as a *sql.Tx. Its database has this one connection.
type handlersTx struct {
	driver *heldConn
	db     *sql.DB
	conn   *sql.Conn
	tx     *sql.Tx
}

// newHandlersTx acquires a connection. It sends no statement: the unit begins the transaction.
func newHandlersTx(ctx context.Context, db *Provider) (*handlersTx, error) {
	acquired, err := stdlib.GetPoolConnector(db.pool).Connect(ctx)
	if err != nil {
		return nil, err
	}
	h := &handlersTx{driver: &heldConn{Conn: acquired.(*stdlib.Conn)}}
	h.db = sql.OpenDB(h.driver)
	ctx = context.WithoutCancel(ctx) // its end would end tx while the unit runs
	if h.conn, err = h.db.Conn(ctx); err == nil {
		h.tx, err = h.conn.BeginTx(ctx, nil)
	}
	if err != nil {
		h.release()
		return nil, err
	}
	return h, nil
}

// end ends tx, and waits until no statement uses the connection.
func (h *handlersTx) end() {
	if h.tx != nil {
		h.driver.over.Store(true)
		_ = h.tx.Rollback()
	}
	if h.conn != nil {
		_ = h.conn.Close()
	}
	_ = h.db.Close()
}

func (h *handlersTx) release() {
	h.end()
	_ = h.driver.Conn.Close()
}

// abandon waits for a statement in progress, which fails because the network connection is closed.
func (h *handlersTx) abandon() {
	h.end()
	closeConn(context.Background(), h.driver.Conn.Conn()) // the pool would close it while the unit reads its state
	_ = h.driver.Conn.Close()
}

// intact reports whether statements of tx can still be committed.
func (h *handlersTx) intact() bool {
	status := byte('E')
	_ = h.conn.Raw(func(any) error { // locks the connection
		status = h.driver.Conn.Conn().PgConn().TxStatus()
		return nil
	})
	return status != 'E' && !h.driver.ended.Load()
}

// heldConn is a connection whose transaction only the unit begins and ends. It is its own connector and transaction.
type heldConn struct {
	*stdlib.Conn
	over  atomic.Bool // the unit ends the transaction
	ended atomic.Bool // a handler has called Commit or Rollback
}

func (c *heldConn) Connect(context.Context) (driver.Conn, error) { return c, nil }
func (c *heldConn) Driver() driver.Driver                        { return stdlib.GetDefaultDriver() }

// Close does nothing: the unit releases the connection.
func (c *heldConn) Close() error { return nil }

// BeginTx does nothing: the unit has begun the transaction.
func (c *heldConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return c, nil }

func (c *heldConn) Commit() error {
	c.ended.Store(true)
	return ErrHeld
}

func (c *heldConn) Rollback() error {
	if c.over.Load() {
		return nil
	}
	return c.Commit()
}

// ExecContext, like heldTx.Exec, does not catch all statements that end the transaction; nor do the next two.
func (c *heldConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if endsTx(query) {
		return nil, ErrHeld
	}
	return c.Conn.ExecContext(ctx, query, args)
}

func (c *heldConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if endsTx(query) {
		return nil, ErrHeld
	}
	return c.Conn.QueryContext(ctx, query, args)
}

func (c *heldConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if endsTx(query) {
		return nil, ErrHeld
	}
	return c.Conn.PrepareContext(ctx, query)
}

// InSQLTx is InTx for a transaction of database/sql, such as that of sqlx, GORM or sqlc. It must have been begun with pgx's
// driver, package github.com/jackc/pgx/v5/stdlib, in the database of this DB.
//   - The statements of one method run while database/sql executes a statement of tx. So they wait for other statements of tx,
//     and these for them. Close the rows of a query first, as before any other statement of tx.
//   - If tx has ended, the error is sql.ErrTxDone. If it is nil, or of another driver, the error is an *eventstore.InvalidError,
//     and no statement was sent.
//   - A tracer of the pgx connection also gets one empty statement, "-- kinora", for each method: one round trip more. A wrapper
//     of the driver that records errors gets an error of this statement.
func (db *DB) InSQLTx(tx *sql.Tx) *Tx { return &Tx{db: db.Provider, in: db.inSQL(tx)} }

// inSQL borrows the connection of tx. database/sql does not return it; but pgx calls an argument that implements
// pgx.QueryRewriter with it, before the statement, which is not sent. So f runs while database/sql has locked the connection.
func (db *Provider) inSQL(tx *sql.Tx) within {
	return func(ctx context.Context, f func(q session) error) error {
		if tx == nil {
			return notPgx("must not be nil")
		}
		b := &borrower{db: db, f: f}
		_, err := tx.ExecContext(ctx, `-- kinora`, b)
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
