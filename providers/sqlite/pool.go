package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kinora-go/kinora/internal/migration"
	sqlite3 "modernc.org/sqlite/lib"
)

// pool is a pool of connections with its prepared statements.
type pool struct {
	db    *sql.DB
	stmts sync.Map // *sql.Stmt by their text
	warm  atomic.Bool
	older *atomic.Bool // the file has the version before the one that this program knows; nil: it does not
	of    *Provider    // for a pool of New, whose units have its connections
}

// newPool keeps up to idle connections open and opens at most limit; 0 means no limit.
func newPool(db *sql.DB, idle, limit int) *pool {
	db.SetMaxOpenConns(limit)
	db.SetMaxIdleConns(idle)
	return &pool{db: db}
}

// form returns a statement for the version of the file.
func (p *pool) form(statement string) string {
	if p.older != nil && p.older.Load() {
		return migration.Before(statement)
	}
	return statement
}

// stmt prepares query once. It needs a connection, so a caller must not hold one.
func (p *pool) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	query = p.form(query)
	if s, ok := p.stmts.Load(query); ok {
		return s.(*sql.Stmt), nil
	}
	s, err := p.db.PrepareContext(ctx, query)
	if err != nil {
		return nil, explain(err)
	}
	if other, ok := p.stmts.LoadOrStore(query, s); ok {
		return other.(*sql.Stmt), s.Close()
	}
	return s, nil
}

// warmUp prepares the statements of transactions, which then need no second connection. It returns
// ErrNotMigrated also if the file lacks a column or an index.
func (p *pool) warmUp(ctx context.Context) error {
	if p.warm.Load() {
		return nil
	}
	version, err := versionOf(ctx, p)
	if err != nil {
		return err
	}
	older := version > 0 && version == known()-1
	p.older.Store(older)
	for _, query := range inTransactions {
		_, err := p.stmt(ctx, query)
		if codeOf(err) == sqlite3.SQLITE_ERROR && !errors.Is(err, ErrNotMigrated) {
			err = fmt.Errorf("%w: %w", ErrNotMigrated, err)
		}
		if err != nil {
			return err
		}
	}
	p.warm.Store(!older) // otherwise the next call looks again
	return nil
}

// warmUpIfMigrated is warmUp for a file that may be new.
func (p *pool) warmUpIfMigrated(ctx context.Context) error {
	if err := p.warmUp(ctx); err != nil && !errors.Is(err, ErrNotMigrated) {
		return err
	}
	return nil
}

// inTransactions lists the statements of frequent transactions.
var inTransactions = []string{
	findEvents, raiseStream, readVersion, insertEvent, insertEntry, readLineage,
	candidates, candidatesUnordered, takeEntry, takeUnordered, markEntry, dropEntry, lanesOf, releaseEntries,
	savepoint, release, readStream,
	findMarked, insertMarkers, findHeld, findSuspects, findFront, parkMessage, keepReplayed, dropReplayed, dueNow, tryParked,
	readCheckpoint, readWholeCheckpoint, moveCheckpoint, moveSegment, taskCandidates, suspectCandidates,
	findTask, saveTask, insertTasks, takeTask, readClock, insertTrail, insertGroup, findGroup, countGroup, renewTask,
	insertInFlight, clearInFlight, extendLease, deleteInFlight, deleteRunner, lastCrash, readLive,
}

func (p *pool) query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if s, ok := ctx.Value(sessionKey{}).(session); ok && s.pool == p {
		return s.query(ctx, query, args...)
	}
	if p.of != nil {
		if err := p.of.notInside(ctx); err != nil && p.db.Stats().MaxOpenConnections == 1 {
			return nil, err
		}
	}
	s, err := p.stmt(ctx, query)
	if err != nil {
		return nil, err
	}
	rows, err := s.QueryContext(ctx, args...)
	return rows, explain(err)
}

func (p *pool) close(owned bool) error {
	var err error
	for query, s := range p.stmts.Range {
		p.stmts.Delete(query)
		err = errors.Join(err, s.(*sql.Stmt).Close())
	}
	if owned {
		err = errors.Join(err, p.db.Close())
	}
	return wrap("close", err)
}

// querier is a pool or a session.
type querier interface {
	query(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// session runs statements inside a transaction.
type session struct {
	tx *sql.Tx
	// the pool of tx, unless the caller used another one
	pool *pool
}

type sessionKey struct{}

// within returns a context whose reads through the session's pool use the session: another
// connection of the pool may not exist. The pools of Open have others.
func (s session) within(ctx context.Context) context.Context {
	return context.WithValue(ctx, sessionKey{}, s)
}

// stmt returns the statement on the transaction's connection, or nil if it was not prepared.
func (s session) stmt(ctx context.Context, query string) *sql.Stmt {
	if stmt, ok := s.pool.stmts.Load(query); ok {
		return s.tx.StmtContext(ctx, stmt.(*sql.Stmt))
	}
	return nil
}

// isForeign reports whether tx is of another pool on the same file. The statement has not run.
func isForeign(err error) bool {
	return err != nil && strings.Contains(err.Error(), "statement from different database used")
}

func (s session) exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	query = s.pool.form(query)
	if stmt := s.stmt(ctx, query); stmt != nil {
		if r, err := stmt.ExecContext(ctx, args...); !isForeign(err) {
			return r, explain(err)
		}
	}
	r, err := s.tx.ExecContext(ctx, query, args...)
	return r, explain(err)
}

func (s session) query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	query = s.pool.form(query)
	if stmt := s.stmt(ctx, query); stmt != nil {
		if rows, err := stmt.QueryContext(ctx, args...); !isForeign(err) {
			return rows, explain(err)
		}
	}
	rows, err := s.tx.QueryContext(ctx, query, args...)
	return rows, explain(err)
}

// find scans the only row of a query into dest, if there is one.
func find(ctx context.Context, q querier, dest []any, query string, args ...any) (found bool, err error) {
	err = eachRow(ctx, q, func(rows *sql.Rows) error {
		found = true
		return rows.Scan(dest...)
	}, query, args...)
	return found, err
}

// one is find for a query that always has a row. It returns sql.ErrNoRows if there is none.
func one(ctx context.Context, q querier, dest []any, query string, args ...any) error {
	found, err := find(ctx, q, dest, query, args...)
	if err == nil && !found {
		err = sql.ErrNoRows
	}
	return err
}

// column returns the values of a query that selects one column.
func column[T any](ctx context.Context, q querier, query string, args ...any) (all []T, err error) {
	return rowsOf(ctx, q, func(v *T) []any { return []any{v} }, query, args...)
}

// rowsOf returns the rows of a query. columns returns where the columns of a row go.
func rowsOf[T any](ctx context.Context, q querier, columns func(*T) []any, query string, args ...any) (all []T, err error) {
	return collect(ctx, q, func(rows *sql.Rows) (v T, err error) {
		err = rows.Scan(columns(&v)...)
		return v, err
	}, query, args...)
}

// collect returns the rows of a query, each as scan reads it.
func collect[T any](ctx context.Context, q querier, scan func(*sql.Rows) (T, error), query string, args ...any) (all []T, err error) {
	err = eachRow(ctx, q, func(rows *sql.Rows) error {
		v, err := scan(rows)
		all = append(all, v)
		return err
	}, query, args...)
	return all, err
}

// count sets the numbers of a query that selects keys and their numbers.
func count[K comparable](ctx context.Context, q querier, to map[K]int64, query string, args ...any) error {
	return fill(ctx, q, to, func(key *K, n *int64) []any { return []any{key, n} }, query, args...)
}

// fill sets the values of a query by their keys. columns returns where the columns of a row go.
func fill[K comparable, V any](ctx context.Context, q querier, to map[K]V, columns func(*K, *V) []any, query string, args ...any) error {
	return eachRow(ctx, q, func(rows *sql.Rows) error {
		var key K
		var v V
		err := rows.Scan(columns(&key, &v)...)
		to[key] = v
		return err
	}, query, args...)
}

// eachRow calls fn for every row of a query.
func eachRow(ctx context.Context, q querier, fn func(*sql.Rows) error, query string, args ...any) error {
	rows, err := q.query(ctx, query, args...)
	if err != nil {
		return err
	}
	// after the last row it is closed already
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		if err := fn(rows); err != nil {
			return err
		}
	}
	return explain(rows.Err())
}

// mapSlice returns the values of fn.
func mapSlice[From, To any](all []From, fn func(From) To) []To {
	to := make([]To, len(all))
	for i, v := range all {
		to[i] = fn(v)
	}
	return to
}
