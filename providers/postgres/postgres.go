package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/migration"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// maxStored is the most bytes of a payload that the tables take: see migration 3.
const maxStored = 64 << 20

// Config is the configuration of a DB. The zero value is the default.
type Config struct {
	// Schema is the PostgreSQL schema of Kinora's tables: ^[a-z][a-z0-9_]{0,40}$, and neither a
	// reserved word of PostgreSQL nor one of its own schemas ("pg_…"). Empty means "kinora".
	Schema     string
	Route      outbox.Route // maps events to the topics of their entries; nil: no entries
	MaxPayload int          // most bytes of a payload, up to 64 MiB; zero means 1 MiB

	// RequeueWindow is how long after its last attempt an entry can be requeued without Force:
	// the shortest time for which any of its consumers keeps markers (marker.Retention.Window).
	// Zero means provider.DefaultRequeueWindow.
	RequeueWindow time.Duration

	// Notify makes additions of events, entries and tasks through this DB, and changes that make tasks due, notify the
	// Listeners of other processes: after the commit, separately, and at most once in about 10ms. After a transaction that you
	// began yourself, call Wake: NOTIFY in it would make its commit wait for others. Close sends the last notification.
	Notify bool
}

// ErrNotMigrated means that the schema does not exist, or is older than this package requires.
var ErrNotMigrated = errors.New("the database is not migrated: call Migrate")

// ErrEncoding means that the database is not encoded as UTF-8.
var ErrEncoding = errors.New("the database must have the encoding UTF8: create another one with it, from template0")

// NewerError is the error of Migrate and Ready if a newer program has migrated the schema.
type NewerError = provider.NewerError

// DB is an event store, an outbox and read models in one PostgreSQL database. Repositories,
// relays and runners take it. Its methods are safe for concurrent use.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	*provider.Routes
	pool      *pgxpool.Pool
	owned     bool
	cfg       Config
	wake      waker
	appends   waker
	due       waker        // of workers
	tasked    atomic.Int64 // calls that may have made tasks due in a transaction
	notifier  notifier
	queue     appendQueue
	scans     atomic.Pointer[places]
	log       settling
	eventSize atomic.Int64           // mean, of the last page of the log
	logged    atomic.Pointer[string] // LogID.String
	onPool    *Tx                    // each of its calls has transactions of its own
	dryRuns   chan struct{}          // lock of dry runs, of capacity 1
	turns     chan struct{}          // lock of repeated runs of Transact, of capacity 1
	lifetime  atomic.Pointer[string]
	cached    sync.Map    // statement for schema "kinora" → for this schema
	older     atomic.Bool // the schema has the version before the one that this program knows
	describe  bool        // see described
}

// Open connects to dsn with a separate pool, which Close closes. An idle connection that does not
// reply within five seconds is closed, unless dsn has another pool_ping_timeout. Zero means the
// default. Sessions have the client_encoding UTF8, whatever that of the role or the database is.
func Open(ctx context.Context, dsn string, cfg *Config) (*DB, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	if config.ConnConfig.RuntimeParams["client_encoding"] == "" { // before that of the role and the database
		config.ConnConfig.RuntimeParams["client_encoding"] = encodingUTF8
	}
	if config.PingTimeout == 0 { // pgx: no timeout
		config.PingTimeout = 5 * time.Second
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	db, err := New(pool, cfg)
	if err == nil {
		err = pool.Ping(ctx)
	}
	if err == nil {
		_, _ = db.check(ctx, provider.AnyService) // notes the version of the schema
	}
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("open postgres: %w", err)
	}
	db.owned = true
	return db, nil
}

// New uses the caller's pool. It sends no statement. Call Ready if the schema may be that of the version before. A schema name that Config.Schema does not
// accept is an *eventstore.InvalidError.
func New(pool *pgxpool.Pool, cfg *Config) (*DB, error) {
	if pool == nil {
		return nil, errors.New("postgres: New requires a pool")
	}
	db := &DB{&Provider{
		pool: pool, dryRuns: make(chan struct{}, 1), turns: make(chan struct{}, 1), log: settling{turn: make(chan struct{}, 1)},
	}}
	db.onPool = &Tx{db: db.Provider, in: func(_ context.Context, f func(q session) error) error { return f(pool) }}
	if cfg != nil {
		db.cfg = *cfg
	}
	db.Routes = provider.NewRoutes(db.cfg.Route)
	db.cfg.Schema = cmp.Or(db.cfg.Schema, defaultSchema)
	if db.cfg.MaxPayload < 0 || db.cfg.MaxPayload > maxStored {
		return nil, fmt.Errorf("postgres: MaxPayload is %d: it must be from 0, which means 1 MiB, to %d", db.cfg.MaxPayload, maxStored)
	}
	if db.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("postgres: RequeueWindow is %s: it must not be negative; zero means the default", db.cfg.RequeueWindow)
	}
	db.cfg.RequeueWindow = cmp.Or(db.cfg.RequeueWindow, provider.DefaultRequeueWindow)
	if err := checkSchema(db.cfg.Schema); err != nil {
		return nil, err
	}
	mode := pool.Config().ConnConfig.DefaultQueryExecMode
	db.describe = mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol
	db.scans.Store(&places{})
	db.queue.most = most(pool.Config().MaxConns)
	db.notifier.stop = make(chan struct{})
	db.notifier.send = func(ctx context.Context) { _ = db.notify(ctx, db.channel(), "") }
	return db, nil
}

// described returns the arguments of a statement that has lists of uuids, times or nulls. pgx cannot
// encode these without a description of the statement, which two modes of pools do not ask for.
func (db *Provider) described(args []any) []any {
	if db.describe {
		return append([]any{planned}, args...)
	}
	return args
}

// Pool returns the pool, for the service's own statements.
func (db *DB) Pool() *pgxpool.Pool { return db.pool }

// Close sends the last notification (Config.Notify), which takes at most a second. If Open made
// the pool, Close closes it and waits at most five seconds; connections still in use, or on a
// network that does not reply, are closed later. Close a borrowed pool after Close.
func (db *DB) Close() {
	db.notifier.close()
	if !db.owned {
		return
	}
	closed, done := context.WithTimeout(context.Background(), 5*time.Second)
	go func() {
		defer done()
		db.pool.Close()
	}()
	<-closed.Done()
}

const defaultSchema = "kinora"

// q returns a statement, which is written for the schema "kinora", for the configured one.
func (db *Provider) q(statement string) string {
	if db.older.Load() {
		statement = migration.Before(statement)
	}
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

// in returns a statement for this schema.
func in(schema, statement string) string {
	// Unlike other names, the name of a type cannot begin with a keyword such as values without
	// quotes.
	return strings.NewReplacer("::"+defaultSchema+".", `::"`+schema+`".`, `"`+defaultSchema+`".`, `"`+schema+`".`, defaultSchema+".", schema+".").Replace(statement)
}

// within calls f, which sends statements in a transaction. It returns f's error or one of the transaction.
type within func(ctx context.Context, f func(q session) error) error

func (db *Provider) in(tx pgx.Tx) within {
	return func(_ context.Context, f func(q session) error) error {
		if conn := tx.Conn(); conn != nil {
			if err := db.checkSettings(conn); err != nil {
				return err
			}
		}
		return f(tx)
	}
}

// Tx is the event store and the outbox inside a transaction of the caller. It claims no entries.
type Tx struct {
	db *Provider
	in within
}

// InTx returns the view of tx, which must be at READ COMMITTED: at a higher level, a stale expected
// version is the error 40001 and an aborted transaction instead of a conflict.
func (db *DB) InTx(tx pgx.Tx) *Tx { return &Tx{db: db.Provider, in: db.in(tx)} }

// CallersTx marks a store inside a caller's transaction.
func (*Tx) CallersTx() {}

// waker signals listeners that entries or events were added.
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

// Enqueued implements provider.Waker. Appends and units through this DB signal, and a Listener for other processes.
func (db *Provider) Enqueued() <-chan struct{} { return db.wake.listen() }

// connect opens a connection outside the pool, configured like those of the pool.
func connect(ctx context.Context, pool *pgxpool.Config) (*pgx.Conn, error) {
	config, err := connConfig(ctx, pool)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err == nil && pool.AfterConnect != nil {
		if err = pool.AfterConnect(ctx, conn); err != nil {
			closeConn(ctx, conn)
		}
	}
	return conn, err
}

// connConfig returns the configuration of the pool's connections for one outside the pool.
func connConfig(ctx context.Context, pool *pgxpool.Config) (*pgx.ConnConfig, error) {
	c := pool.ConnConfig.Copy()
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 2 * time.Minute // as pgxpool does
	}
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// closeConn closes a connection. It waits at most five seconds for the server.
func closeConn(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// ErrSettings: a setting of the role, the database or the connection changes the meaning of what is sent or read.
// client_encoding must be UTF8, and DateStyle ISO if the pool sends text (pgx.QueryExecModeExec or QueryExecModeSimpleProtocol).
var ErrSettings = errors.New("a setting of the session changes the meaning of statements")

// checkSettings returns ErrEncoding or ErrSettings. The server reports these settings by itself, and whenever they change.
func (db *Provider) checkSettings(conn *pgx.Conn) error {
	is := conn.PgConn().ParameterStatus
	if encoding := is("server_encoding"); encoding != "" && encoding != encodingUTF8 {
		return wrongEncoding(encoding)
	}
	if encoding := is("client_encoding"); encoding != "" && encoding != encodingUTF8 {
		return fmt.Errorf("%w: client_encoding is %s: remove it from the role, the database and the connection string", ErrSettings, encoding)
	}
	if style := is("DateStyle"); db.describe && style != "" && !strings.HasPrefix(style, "ISO") {
		return fmt.Errorf("%w: DateStyle is %s: remove it from the role, the database and the connection string, or use another query exec mode", ErrSettings, style)
	}
	return nil
}

// acquire returns a connection of the pool, if its settings are right.
func (db *Provider) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if err := db.checkSettings(conn.Conn()); err != nil {
		conn.Release()
		return nil, err
	}
	return conn, nil
}

// reserved are the words that PostgreSQL does not accept as a schema name without quotes: those of the categories R and T of
// pg_get_keywords in version 15, plus system_user, which is reserved since version 16.
var reserved = strings.Fields(`
all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation column concurrently
constraint create cross current_catalog current_date current_role current_schema current_time current_timestamp current_user default
deferrable desc distinct do else end except false fetch for foreign freeze from full grant group having ilike in initially inner
intersect into is isnull join lateral leading left like limit localtime localtimestamp natural not notnull null offset on only or
order outer overlaps placing primary references returning right select session_user similar some symmetric system_user table
tablesample then to trailing true union unique user using variadic verbose when where window with`)

// checkSchema returns an *eventstore.InvalidError for a name that SQL does not accept without quotes, or PostgreSQL has.
func checkSchema(name string) error {
	if err := provider.CheckName("schema", name); err != nil {
		return err
	}
	if strings.HasPrefix(name, "pg_") || name == "information_schema" {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name belongs to PostgreSQL itself: choose another one"}
	}
	if slices.Contains(reserved, name) {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name is a reserved word of PostgreSQL: choose another one"}
	}
	return nil
}
