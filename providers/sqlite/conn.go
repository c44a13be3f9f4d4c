package sqlite

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"reflect"
	"sync"
	"time"

	"modernc.org/libc"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// wrapped wraps the connections of the driver.
type wrapped struct {
	driver.Connector
	wrap func(driverConn) driver.Conn
}

func (w wrapped) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	full, ok := c.(driverConn)
	if !ok {
		return nil, errors.Join(errors.New("the driver's connection lacks methods"), c.Close())
	}
	return w.wrap(full), nil
}

// driverConn has all methods of the driver's connection, so that sql.Conn.Raw offers all of them.
type driverConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	sqlite.ExecQuerierContext
	sqlite.HookRegisterer
	sqlite.AuthorizerRegisterer
	sqlite.FileControl
	Status(op sqlite.DBStatusOp, reset bool) (current, high int, err error)
	ColumnInfo(query string) ([]sqlite.ColumnInfo, error)
	Serialize() ([]byte, error)
	Deserialize(buf []byte) error
	NewBackup(dstURI string) (*sqlite.Backup, error)
	NewRestore(srcURI string) (*sqlite.Backup, error)
	IsReadOnly(schema string) (bool, error)
}

// queue makes transactions of a connection wait for the write lock of this process in the order of their
// arrival. SQLite would retry at growing intervals, and one busy writer could delay them for seconds.
func (d *Provider) queue(c driverConn) driver.Conn { return queuedConn{c, d} }

type queuedConn struct {
	driverConn
	db *Provider
}

// BeginTx waits for the write lock, no longer than a statement: the context of sql.DB.Begin never ends.
func (c queuedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if opts.ReadOnly {
		return c.driverConn.BeginTx(ctx, opts)
	}
	if err := c.db.notInside(ctx); err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	unlock := func() {}
	select {
	case c.db.lock <- struct{}{}:
		unlock = sync.OnceFunc(func() { <-c.db.lock })
	// without the lock SQLite reports the error
	case <-wait.Done():
	}
	tx, err := c.begin(ctx, wait, opts)
	if err != nil {
		unlock()
		return nil, err
	}
	return queuedTx{tx, c.db, unlock}, nil
}

// begin retries at short intervals, because other transactions of this process wait behind it.
func (c queuedConn) begin(ctx, wait context.Context, opts driver.TxOptions) (tx driver.Tx, err error) {
	if err := c.busyTimeout(0); err != nil {
		return nil, err
	}
	var begun error
	err = retryBusy(wait, func() error {
		tx, begun = c.driverConn.BeginTx(ctx, opts)
		return begun
	})
	if err != nil && ctx.Err() == nil {
		// hide the end of wait: it is not the caller's context
		err = begun
	}
	if restored := c.busyTimeout(busyTimeout); restored != nil && err == nil {
		return nil, errors.Join(restored, tx.Rollback())
	}
	return tx, err
}

func (c queuedConn) busyTimeout(d time.Duration) error {
	_, err := c.ExecContext(context.Background(), setBusyTimeout(d.Milliseconds()), nil)
	return err
}

type queuedTx struct {
	driver.Tx
	db     *Provider
	unlock func()
}

func (tx queuedTx) Commit() error {
	err := tx.Tx.Commit()
	if n := tx.db.hinted.take(); err == nil {
		tx.db.signal(n)
	}
	tx.unlock()
	return err
}

func (tx queuedTx) Rollback() error {
	tx.db.hinted.take()
	defer tx.unlock()
	return tx.Tx.Rollback()
}

// guard makes a connection refuse every commit except those of Kinora's own transactions. Without
// it, a handler that ends its transaction would commit its marker without its output. After an
// error that rolls back the whole transaction, which a handler may ignore, each further statement
// would commit by itself, or Kinora would commit a transaction that the handler began.
func (d *Provider) guard(c driverConn) driver.Conn {
	c.RegisterCommitHook(func() int32 {
		if u := d.current.Load(); u != nil && u.committing.Load() && !u.rolledBack.Load() {
			return 0
		}
		return 1
	})
	c.RegisterRollbackHook(func() {
		if u := d.current.Load(); u != nil {
			u.rolledBack.Store(true)
		}
	})
	return &guardedConn{driverConn: c, handle: handleOf(c)}
}

// txOptions are the options of one transaction. They are in the context of its BeginTx.
type txOptions struct {
	sync  string // value of pragma synchronous; empty: full
	watch sqlite.PreUpdateHookFn
}

type txOptionsKey struct{}

// unsynced makes the next transaction commit without a sync, which is about six times as fast.
//
// If the process is killed, nothing is lost. A loss of power may tear the log after its last sync, and
// recovery ends at the first frame with a wrong checksum. So it may lose this commit and later unsynced
// ones, but never a synced one: a sync covers all frames before it. The database is not damaged, because
// synchronous=NORMAL keeps the syncs around a checkpoint and a restart of the log.
func unsynced(ctx context.Context) context.Context {
	return context.WithValue(ctx, txOptionsKey{}, txOptions{sync: "normal"})
}

// watched makes SQLite call fn before each row change of the next transaction.
func watched(ctx context.Context, fn sqlite.PreUpdateHookFn) context.Context {
	return context.WithValue(ctx, txOptionsKey{}, txOptions{watch: fn})
}

// guardedConn begins transactions with their options, and interrupts their statements when the unit
// ends: a handler may run one with a context that outlives the unit, which keeps the connection.
type guardedConn struct {
	driverConn
	handle uintptr // SQLite's connection; 0 if the driver does not expose it
	sync   string  // setting of the last transaction
}

// handleOf reads the handle from the driver's private field. The driver itself interrupts a statement
// only while it searches for its first row.
func handleOf(c driver.Conn) uintptr {
	v := reflect.Indirect(reflect.ValueOf(c))
	if v.Kind() != reflect.Struct || v.FieldByName("db").Kind() != reflect.Uintptr {
		return 0
	}
	return uintptr(v.FieldByName("db").Uint())
}

// watch interrupts, while it is on, what its connection runs after a context has ended. It does so
// repeatedly, because a single interrupt could come just before a statement begins.
type watch struct {
	mu   sync.Mutex
	on   bool
	stop func() bool
}

func (c *guardedConn) watch(ctx context.Context, on bool) *watch {
	w := &watch{on: on}
	w.stop = context.AfterFunc(ctx, func() {
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

func (w *watch) set(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on = on
}

// BeginTx implements driver.ConnBeginTx. SQLite changes the setting only between transactions.
func (c *guardedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	m, _ := ctx.Value(txOptionsKey{}).(txOptions)
	if sync := cmp.Or(m.sync, "full"); sync != c.sync {
		// unknown if the statement fails
		c.sync = ""
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
	tx.unit.stop()
	tx.unit.set(false)
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

// guardedRows stop the search for a further row when their own context ends, before that of the unit.
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
	r.set(true)
	defer r.set(false)
	if err := r.ctx.Err(); err != nil {
		return err
	}
	return r.driverRows.Next(dest)
}

// Close implements driver.Rows.
func (r guardedRows) Close() error {
	r.stop()
	return r.driverRows.Close()
}
