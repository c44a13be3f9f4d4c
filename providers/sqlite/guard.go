package sqlite

import (
	"cmp"
	"context"
	"database/sql/driver"
	"reflect"
	"sync"
	"time"

	"modernc.org/libc"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// guard makes a connection commit only Kinora's own transactions, from their begin. Without it, a handler that ends its
// transaction would commit its marker without its output; and after an error that rolls the whole transaction back, which a
// handler may ignore, each of its further statements would commit by itself, or Kinora would commit a transaction that the
// handler has begun.
func (d *Provider) guard(c driverConn) driver.Conn {
	c.RegisterCommitHook(func() int32 {
		if u := d.current.Load(); u != nil && u.committing.Load() && !u.undone.Load() {
			return 0
		}
		return 1
	})
	c.RegisterRollbackHook(func() {
		if u := d.current.Load(); u != nil {
			u.undone.Store(true)
		}
	})
	return &guardedConn{driverConn: c, handle: handleOf(c)}
}

// manner is how a transaction differs from others. It is in the context that it begins with.
type manner struct {
	sync  string // empty: full
	watch sqlite.PreUpdateHookFn
}

type mannerKey struct{}

// unsynced makes the next transaction's commit one that is not synced: half a dozen times as fast.
//
// It is in the log as any other, after what was committed before and before what is committed next. A process that
// is killed loses nothing, as the log's pages are the operating system's by then. A loss of power may tear the log
// at any place after its last sync, and recovery ends at the first frame whose checksum, which goes on from frame to
// frame, does not fit: so it loses this commit, or this one and those after it that are no more synced, and never
// one that was synced, as that syncs all before it. Nothing is damaged either way: the log is synced before a checkpoint
// copies it into the database, the database before the log is begun anew, and the log's new header before its first
// frames. SQLite does all three at synchronous=NORMAL; only the sync at commit is left out.
func unsynced(ctx context.Context) context.Context {
	return context.WithValue(ctx, mannerKey{}, manner{sync: "normal"})
}

// watched makes fn see each row that the next transaction changes, before it does.
func watched(ctx context.Context, fn sqlite.PreUpdateHookFn) context.Context {
	return context.WithValue(ctx, mannerKey{}, manner{watch: fn})
}

// guardedConn begins transactions in their manner, and ends their statements with their units: a handler may run one with a
// context that does not end with the unit, and the connection is not free before that statement is over.
type guardedConn struct {
	driverConn
	handle uintptr // of SQLite's connection; 0 where the driver does not tell
	sync   string  // as its last transaction was
}

// handleOf looks into the driver, which interrupts a statement while it searches for its first row, and none that searches for a
// further one.
func handleOf(c driver.Conn) uintptr {
	v := reflect.Indirect(reflect.ValueOf(c))
	if v.Kind() != reflect.Struct || v.FieldByName("db").Kind() != reflect.Uintptr {
		return 0
	}
	return uintptr(v.FieldByName("db").Uint())
}

// watch ends, while it is on, each statement that its connection runs when a context has ended, or later. A single interrupt
// could come just before the statement begins.
type watch struct {
	mu     sync.Mutex
	on     bool
	forget func() bool
}

func (c *guardedConn) watch(ctx context.Context, on bool) *watch {
	w := &watch{on: on}
	w.forget = context.AfterFunc(ctx, func() {
		for w.interrupt(c.handle) {
			time.Sleep(pauseMax)
		}
	})
	return w
}

func (w *watch) interrupt(handle uintptr) (again bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.on || handle == 0 {
		return false
	}
	tls := libc.NewTLS()
	defer tls.Close()
	sqlite3.Xsqlite3_interrupt(tls, handle)
	return true
}

func (w *watch) turn(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on = on
}

// BeginTx implements driver.ConnBeginTx. SQLite changes the setting between transactions only.
func (c *guardedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	m, _ := ctx.Value(mannerKey{}).(manner)
	if sync := cmp.Or(m.sync, "full"); sync != c.sync {
		c.sync = "" // if this fails, it is not known
		if _, err := c.ExecContext(context.Background(), `pragma synchronous = `+sync, nil); err != nil {
			return nil, err
		}
		c.sync = sync
	}
	c.RegisterPreUpdateHook(m.watch)
	tx, err := c.driverConn.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return guardedTx{tx, c.watch(ctx, true)}, nil
}

type guardedTx struct {
	driver.Tx
	unit *watch
}

func (tx guardedTx) Commit() error { return tx.end(tx.Tx.Commit) }

func (tx guardedTx) Rollback() error { return tx.end(tx.Tx.Rollback) }

func (tx guardedTx) end(how func() error) error {
	tx.unit.forget()
	tx.unit.turn(false)
	return how()
}

func (c *guardedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.driverConn.QueryContext(ctx, query, args)
	return c.guardRows(ctx, rows), err
}

func (c *guardedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	s, err := c.driverConn.PrepareContext(ctx, query)
	if full, ok := s.(driverStmt); ok {
		return guardedStmt{full, c}, err
	}
	return s, err
}

type driverStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type guardedStmt struct {
	driverStmt
	conn *guardedConn
}

func (s guardedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := s.driverStmt.QueryContext(ctx, args)
	return s.conn.guardRows(ctx, rows), err
}

// guardedRows end the search for a further row when their context ends, before that of the unit does.
type guardedRows struct {
	driverRows
	*watch
	ctx context.Context
}

type driverRows interface {
	driver.Rows
	driver.RowsColumnTypeDatabaseTypeName
	driver.RowsColumnTypeLength
	driver.RowsColumnTypeNullable
	driver.RowsColumnTypePrecisionScale
	driver.RowsColumnTypeScanType
}

func (c *guardedConn) guardRows(ctx context.Context, rows driver.Rows) driver.Rows {
	if full, ok := rows.(driverRows); ok {
		return guardedRows{full, c.watch(ctx, false), ctx}
	}
	return rows
}

// Next implements driver.Rows.
func (r guardedRows) Next(dest []driver.Value) error {
	r.turn(true)
	defer r.turn(false)
	if err := r.ctx.Err(); err != nil {
		return err
	}
	return r.driverRows.Next(dest)
}

// Close implements driver.Rows.
func (r guardedRows) Close() error {
	r.forget()
	return r.driverRows.Close()
}
