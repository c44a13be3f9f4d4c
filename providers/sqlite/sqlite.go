package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
)

// Config is the configuration of a DB. The zero value is the default.
type Config struct {
	Route      outbox.Route // which events make entries, to which topics; nil: none
	MaxPayload int          // bytes of one event's or message's payload; zero means 1 MiB

	// RequeueWindow is for how long after its last attempt an entry is requeued without Force: the shortest time for which any of its
	// consumers keeps markers (marker.Retention.Window). Zero means provider.DefaultRequeueWindow.
	RequeueWindow time.Duration
}

// DB is an event store, an outbox and read models in one SQLite file. Repositories, relays and runners take it. Its methods
// may be called concurrently.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	cfg   Config
	path  string // of the file, absolute
	owned bool   // Open made the pools, else they are one and the same

	users *pool // for the user's own statements
	reads *pool // for Kinora's reading: no transaction that waits for its turn holds a connection of it
	write *pool // for Kinora's transactions: one connection

	turn    chan struct{}        // of size 1: a writer puts something in it
	current atomic.Pointer[unit] // the unit that has the turn, if it is one
	added   signal               // entries
	hinted  atomic.Bool          // the caller's transaction that has the turn added some
}

const (
	// A user's own statements wait as long for a lock, unless their context ends first.
	busyTimeout = 5 * time.Second
	// New has no context of its caller's.
	probeTimeout = 30 * time.Second
)

// Open opens the file at path, or makes it: in WAL mode, synchronous=FULL, foreign keys on, every transaction
// immediate. Migrate makes the tables.
//
// A path is taken letter by letter, "?", "#" and "%" included. In-memory databases are refused: that is what
// package providers/memory is for.
func Open(ctx context.Context, path string, cfg *Config) (*DB, error) {
	d, err := newDB(cfg)
	if err != nil {
		return nil, err
	}
	d.owned = true
	if d.path, err = checkPath(path); err != nil {
		return nil, err
	}
	shared, err := sqlite.NewConnector(dsn(d.path, busyTimeout))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	// Our own transactions wait by taking turns (see begin), not inside of SQLite.
	writes, err := sqlite.NewConnector(dsn(d.path, 0))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	size := max(8, 2*runtime.GOMAXPROCS(0))
	// Without a limit: a handler's own reads must not wait for transactions that wait for the handler.
	d.users = newPool(sql.OpenDB(wrapped{shared, d.queue}), size, 0)
	d.reads = newPool(sql.OpenDB(shared), size, size)
	d.write = newPool(sql.OpenDB(wrapped{writes, d.guard}), 1, 1)
	if err = useWAL(ctx, d.reads.db); err == nil {
		err = d.users.warmUpIfMigrated(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), d.Close())
	}
	return d, nil
}

// New uses a pool of the caller's, whose connections must
//   - be those of modernc.org/sqlite, to a file in WAL mode;
//   - begin every transaction as immediate ("_txlock=immediate"), so that a transaction that reads first
//     never fails to write later.
//
// It refuses any other. A pool of one connection will do. What else the connections are set to is the caller's:
// how durable a commit is ("synchronous"), and, by "busy_timeout", how often Kinora's transactions look whether
// another connection lets them write. With more than a few milliseconds, busy ones hold up the others for long.
func New(db *sql.DB, cfg *Config) (*DB, error) {
	if db == nil {
		return nil, errors.New("sqlite: New wants a pool")
	}
	d, err := newDB(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	err = patiently(ctx, func() error {
		d.path, err = probe(ctx, db)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("sqlite: this pool will not do: %w", err)
	}
	d.users = &pool{db: db}
	d.reads, d.write = d.users, d.users
	if err := d.users.warmUpIfMigrated(ctx); err != nil {
		return nil, fmt.Errorf("sqlite: prepare statements: %w", err)
	}
	return d, nil
}

func newDB(cfg *Config) (*DB, error) {
	d := &DB{&Provider{turn: make(chan struct{}, 1)}}
	if cfg != nil {
		d.cfg = *cfg
	}
	if d.cfg.MaxPayload < 0 {
		return nil, fmt.Errorf("sqlite: max payload %d: want no negative size", d.cfg.MaxPayload)
	}
	if d.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("sqlite: requeue window %s: want no negative time", d.cfg.RequeueWindow)
	}
	if d.cfg.RequeueWindow == 0 {
		d.cfg.RequeueWindow = provider.DefaultRequeueWindow
	}
	return d, nil
}

// SQL is the pool for the user's own tables: the one that Open made, or that New was given. Transactions on it
// are immediate. See InTx for Kinora's part in them. Those of a pool that Open made have their turn in the same
// order as Kinora's own; a statement outside of a transaction does not queue, and waits for 5s at most. Such a pool
// opens as many connections as are used at once: with a limit on them, handlers that read through it may wait for
// transactions that wait for them.
func (d *DB) SQL() *sql.DB { return d.users.db }

// Close closes what Open opened. A pool that New was given stays open.
func (d *DB) Close() error {
	if !d.owned {
		return d.users.close(false)
	}
	return errors.Join(d.write.close(true), d.reads.close(true), d.users.close(true))
}

var (
	_ eventstore.Store           = (*DB)(nil)
	_ eventstore.TxStore         = (*Tx)(nil)
	_ outbox.Enqueuer            = (*Tx)(nil)
	_ provider.Outbox            = (*DB)(nil)
	_ provider.BatchClaimer      = (*DB)(nil)
	_ provider.EntryMaintainer   = (*DB)(nil)
	_ outbox.Inspector           = (*DB)(nil)
	_ provider.Waker             = (*DB)(nil)
	_ provider.MarkerMaintainer  = (*DB)(nil)
	_ provider.ReadyChecker      = (*DB)(nil)
	_ provider.Provider[*sql.Tx] = (*DB)(nil)
)
