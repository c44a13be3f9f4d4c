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

// driverConn is all of modernc.org/sqlite's connection: through sql.Conn.Raw nothing is lost.
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

// queue makes the transactions of a connection wait for their turn like Kinora's own, in the order that they came.
// Without it they would have to guess when the file is free, at longer and longer intervals, and one busy writer in
// this process would keep them away for seconds.
func (d *Provider) queue(c driverConn) driver.Conn { return queuedConn{c, d} }

type queuedConn struct {
	driverConn
	db *Provider
}

// BeginTx begins a transaction in its turn. As the context of a sql.DB.Begin never ends, it waits no longer than
// a statement waits for a lock.
func (c queuedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if opts.ReadOnly {
		return c.driverConn.BeginTx(ctx, opts)
	}
	wait, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	leave := func() {}
	select {
	case c.db.turn <- struct{}{}:
		leave = sync.OnceFunc(func() { <-c.db.turn })
	case <-wait.Done(): // without a turn SQLite reports the error
	}
	tx, err := c.begin(ctx, wait, opts)
	if err != nil {
		leave()
		return nil, err
	}
	return queuedTx{tx, c.db, leave}, nil
}

// begin looks often whether other processes let it, as others in this one wait behind.
func (c queuedConn) begin(ctx, wait context.Context, opts driver.TxOptions) (tx driver.Tx, err error) {
	if err := c.busyTimeout(0); err != nil {
		return nil, err
	}
	var begun error
	err = patiently(wait, func() error {
		tx, begun = c.driverConn.BeginTx(ctx, opts)
		return begun
	})
	if err != nil && ctx.Err() == nil {
		err = begun // the end of wait is not the caller's
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
	db    *Provider
	leave func()
}

func (tx queuedTx) Commit() error {
	err := tx.Tx.Commit()
	if tx.db.hinted.Swap(false) && err == nil {
		tx.db.added.send()
	}
	tx.leave()
	return err
}

func (tx queuedTx) Rollback() error {
	tx.db.hinted.Store(false)
	defer tx.leave()
	return tx.Tx.Rollback()
}
