package sqlite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"

	"github.com/kinora-go/kinora/providers/sqlite"
)

// tracer is a connector that records every statement, and can break a commit.
type tracer struct {
	driver.Connector
	mu    sync.Mutex
	ran   []string
	onEnd func(tx driver.Tx) error // called instead of Commit
}

// traced opens a migrated file through a tracer, with a pool of at most size connections.
func traced(t *testing.T, size int, cfg *sqlite.Config) (*sqlite.DB, *tracer) {
	t.Helper()
	params := url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(100)", "foreign_keys(1)"}}
	c, err := moderncsqlite.NewConnector("file:" + migrated(t) + "?" + params.Encode())
	require.NoError(t, err)
	tr := &tracer{Connector: c}
	pool := sql.OpenDB(tr)
	pool.SetMaxOpenConns(size)
	db, err := sqlite.New(pool, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		checkAtRest(t, pool)
		require.NoError(t, db.Close())
		require.NoError(t, pool.Close())
	})
	return db, tr
}

// during returns the statements that ran during fn.
func (tr *tracer) during(fn func()) []string {
	tr.mu.Lock()
	tr.ran = nil
	tr.mu.Unlock()
	fn()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.ran
}

func (tr *tracer) note(query string) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.ran = append(tr.ran, strings.Join(strings.Fields(query), " "))
}

func (tr *tracer) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := tr.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return tracedConn{c, tr}, nil
}

type tracedConn struct {
	driver.Conn
	tr *tracer
}

func (c tracedConn) IsValid() bool { return c.Conn.(driver.Validator).IsValid() }
func (c tracedConn) ResetSession(ctx context.Context) error {
	return c.Conn.(driver.SessionResetter).ResetSession(ctx)
}

func (c tracedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.tr.note(query)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}

func (c tracedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.tr.note(query)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c tracedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	s, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	return tracedStmt{s, query, c.tr}, nil
}

func (c tracedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	c.tr.note("begin")
	return tracedTx{tx, c.tr}, nil
}

type tracedStmt struct {
	driver.Stmt
	query string
	tr    *tracer
}

func (s tracedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.tr.note(s.query)
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

func (s tracedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.tr.note(s.query)
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

type tracedTx struct {
	driver.Tx
	tr *tracer
}

func (tx tracedTx) Commit() error {
	tx.tr.note("commit")
	if tx.tr.onEnd != nil {
		return tx.tr.onEnd(tx.Tx)
	}
	return tx.Tx.Commit()
}

func (tx tracedTx) Rollback() error {
	tx.tr.note("rollback")
	return tx.Tx.Rollback()
}
