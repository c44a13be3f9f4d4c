package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Config tells how a DB works; the zero value is the default.
type Config struct {
	// Schema is the PostgreSQL schema of Kinora's tables: ^[a-z][a-z0-9_]{0,40}$, and neither a reserved word of
	// PostgreSQL nor one of its own schemas ("pg_…"). Empty means "kinora".
	Schema     string
	Route      outbox.Route // which events make entries, to which topics; nil: none
	MaxPayload int          // bytes of one event's or message's payload; zero means 1 MiB

	// RequeueWindow is for how long after its last attempt an entry is requeued without Force: the shortest time for which any of its
	// consumers keeps markers (marker.Retention.Window). Zero means provider.DefaultRequeueWindow.
	RequeueWindow time.Duration

	// Notify: whatever adds entries through this DB also notifies the Listeners of other processes, after its commit
	// and apart from it, at most once in about 10ms for all of it. What a caller's own transaction adds (InTx)
	// notifies nobody, since NOTIFY would make its commit wait for those of others that notify. Close sends the last one.
	Notify bool
}

// ErrNotMigrated: the schema is not there, or older than this package needs. Call Migrate.
var ErrNotMigrated = errors.New("the database is not migrated: call Migrate")

// ErrEncoding: the database is not encoded as UTF-8.
var ErrEncoding = errors.New("the database must have the encoding UTF8: create another one with it, from template0")

// NewerError is the error of Migrate and Ready if a newer program has migrated the schema.
type NewerError = provider.NewerError

// DB is an event store, an outbox and read models in one PostgreSQL database. Repositories, relays and runners take it. Its
// methods may be called concurrently.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	pool    *pgxpool.Pool
	owned   bool
	cfg     Config
	wake    waker
	notes   notifier
	orphans walk
	dryRuns chan struct{} // of size 1: held by a dry run
	cached  sync.Map      // statement as written → with the schema's name
}

var (
	_ eventstore.Store              = (*DB)(nil)
	_ eventstore.TxStore            = (*Tx)(nil)
	_ provider.Outbox               = (*DB)(nil)
	_ provider.BatchClaimer         = (*DB)(nil)
	_ outbox.Inspector              = (*DB)(nil)
	_ provider.EntryMaintainer      = (*DB)(nil)
	_ provider.MarkerMaintainer     = (*DB)(nil)
	_ provider.Waker                = (*DB)(nil)
	_ provider.ReadyChecker         = (*DB)(nil)
	_ provider.ReadyChecker         = (*Batched)(nil)
	_ outbox.Enqueuer               = (*Tx)(nil)
	_ provider.Provider[pgx.Tx]     = (*DB)(nil)
	_ provider.Provider[*pgx.Batch] = (*Batched)(nil)
)

// Open connects to dsn with a pool of its own, which Close closes. An idle connection that does not answer within five seconds is
// given up, unless dsn has another pool_ping_timeout; zero is none of its own.
func Open(ctx context.Context, dsn string, cfg *Config) (*DB, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	if config.PingTimeout == 0 { // pgx: none
		config.PingTimeout = pingLimit
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	db, err := New(pool, cfg)
	if err == nil {
		err = pool.Ping(ctx)
	}
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	db.owned = true
	return db, nil
}

// New borrows the caller's pool. It does nothing else yet. A schema's name that Config.Schema does not take is an
// *eventstore.InvalidError.
func New(pool *pgxpool.Pool, cfg *Config) (*DB, error) {
	if pool == nil {
		return nil, errors.New("postgres: wants a pool")
	}
	db := &DB{&Provider{pool: pool, dryRuns: make(chan struct{}, 1)}}
	if cfg != nil {
		db.cfg = *cfg
	}
	if db.cfg.Schema == "" {
		db.cfg.Schema = defaultSchema
	}
	if db.cfg.MaxPayload < 0 {
		return nil, fmt.Errorf("postgres: max payload %d: want no negative size", db.cfg.MaxPayload)
	}
	if db.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("postgres: requeue window %s: want no negative time", db.cfg.RequeueWindow)
	}
	if db.cfg.RequeueWindow == 0 {
		db.cfg.RequeueWindow = provider.DefaultRequeueWindow
	}
	if err := checkSchema(db.cfg.Schema); err != nil {
		return nil, err
	}
	db.notes.send = func(ctx context.Context) { _ = db.notify(ctx, db.channel(), "") }
	return db, nil
}

// Pool is the pool, for the service's own statements.
func (db *DB) Pool() *pgxpool.Pool { return db.pool }

// Close sends the last notification (Config.Notify), for which it waits at most a second, and closes the pool if
// Open made it: for that it waits at most five seconds. What is in use by then, or on a network that does not answer, is
// closed when it can be. A borrowed pool is closed after it.
func (db *DB) Close() {
	db.notes.close()
	if !db.owned {
		return
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		db.pool.Close()
	}()
	limit := time.NewTimer(closeLimit)
	defer limit.Stop()
	select {
	case <-closed:
	case <-limit.C:
	}
}

const (
	closeLimit = 5 * time.Second
	pingLimit  = 5 * time.Second
)

const defaultSchema = "kinora"

// q is a statement with the schema's name put in. Statements are written for the schema "kinora".
func (db *Provider) q(statement string) string {
	if db.cfg.Schema == defaultSchema {
		return statement
	}
	if s, ok := db.cached.Load(statement); ok {
		return s.(string)
	}
	s := in(db.cfg.Schema, statement)
	db.cached.Store(statement, s)
	return s
}

// in is a statement for this schema.
func in(schema, statement string) string {
	return strings.ReplaceAll(statement, defaultSchema+".", schema+".")
}

// querier is a pool, a transaction, or a connection.
type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Tx is the event store and the outbox inside a transaction of the caller's. Nothing can be claimed through it.
type Tx struct {
	db *Provider
	tx pgx.Tx
}

// InTx is the view of tx, which must be at READ COMMITTED: at a higher level, PostgreSQL answers a stale
// expected version with 40001 and an aborted transaction instead of a conflict.
func (db *DB) InTx(tx pgx.Tx) *Tx { return &Tx{db: db.Provider, tx: tx} }

// CallersTx marks a store inside a caller's transaction.
func (*Tx) CallersTx() {}

// waker tells whoever listens that entries were added.
type waker struct {
	mu sync.Mutex
	ch chan struct{}
}

func (w *waker) listen() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch == nil {
		w.ch = make(chan struct{})
	}
	return w.ch
}

func (w *waker) signal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch != nil {
		close(w.ch)
		w.ch = nil
	}
}

// Enqueued implements provider.Waker: appends and units of work through this DB give the hint, and a Listener gives it
// for what other processes add.
func (db *Provider) Enqueued() <-chan struct{} { return db.wake.listen() }
