package sqlite

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync"
	"time"

	"modernc.org/sqlite"
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

// driverConn has all methods of modernc.org/sqlite's connection, so that sql.Conn.Raw offers all
// of them.
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

// queue makes the transactions of a connection wait for the write lock of this process, like
// Kinora's own, in the order of their arrival. Otherwise SQLite would retry at growing intervals,
// and one busy writer of this process could delay them for seconds.
func (d *Provider) queue(c driverConn) driver.Conn { return queuedConn{c, d} }

type queuedConn struct {
	driverConn
	db *Provider
}

// BeginTx begins a transaction once it has the write lock. The context of sql.DB.Begin never
// ends, so BeginTx waits no longer than a statement waits for a lock.
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

// begin retries at short intervals while other processes have the file's lock, because other
// transactions of this process wait behind it.
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
