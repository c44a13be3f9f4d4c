package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
)

// Config is the configuration of a DB. The zero value is the default.
type Config struct {
	Route      outbox.Route // maps events to the topics of their entries; nil: no entries
	MaxPayload int          // most bytes of a payload; zero means 1 MiB

	// RequeueWindow is how long after its last attempt an entry can be requeued without Force. Zero
	// means provider.DefaultRequeueWindow, which says when to set it.
	RequeueWindow time.Duration
}

// DB is an event store, an outbox and read models in one SQLite file. Repositories, relays and
// runners take it. Its methods are safe for concurrent use.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	*provider.Routes
	cfg  Config
	path string // absolute path of the file
	// Open made the pools; otherwise all three are the caller's pool
	owned bool

	users *pool // for the application's statements
	// for Kinora's reads: no transaction waits for the write lock with a connection of it
	reads *pool
	write *pool // for Kinora's transactions: one connection

	older   atomic.Bool          // the file has the version before the one that this program knows
	lock    chan struct{}        // of capacity 1: the writer has one element in it
	current atomic.Pointer[unit] // the unit that has the write lock, if a unit has it
	added   signal               // sent after a commit that added entries
	appends signal               // sent after a commit that added events
	due     signal               // sent after a commit that may have made tasks due
	hinted  hints

	id atomic.Pointer[provider.LogID] // once it was read
}

const (
	// Statements of the application wait this long for a lock, unless their context ends first.
	busyTimeout = 5 * time.Second
	// New has no context of its caller.
	probeTimeout = 30 * time.Second
)

// Open opens the file at path, or creates it. It uses WAL mode, synchronous=FULL, foreign keys
// and immediate transactions. Call Migrate to create the tables.
//
// Open takes a path literally, "?", "#" and "%" included. It refuses in-memory databases: use
// package providers/memory.
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
	writes, failed := sqlite.NewConnector(dsn(d.path, 0)) // Kinora's transactions wait in begin, not inside SQLite
	if err = cmp.Or(err, failed); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	size := max(8, 2*runtime.GOMAXPROCS(0))
	// No limit: a handler's reads must not wait for transactions that wait for the handler.
	d.users = newPool(sql.OpenDB(wrapped{shared, d.queue}), size, 0)
	d.reads = newPool(sql.OpenDB(shared), size, size)
	d.write = newPool(sql.OpenDB(wrapped{writes, d.guard}), 1, 1)
	d.users.older, d.reads.older, d.write.older = &d.older, &d.older, &d.older
	if err = useWAL(ctx, d.reads.db); err == nil {
		err = d.users.warmUpIfMigrated(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), d.Close())
	}
	return d, nil
}

// New uses a pool of the caller. Its connections must
//   - be of modernc.org/sqlite, to a file in WAL mode;
//   - begin every transaction as immediate ("_txlock=immediate"), so that a transaction that
//     reads first never fails to write later.
//
// New refuses any other pool. A pool of one connection is enough. The caller chooses the other
// settings: "synchronous" determines how durable a commit is, and "busy_timeout" how often
// Kinora's transactions retry while another connection writes. With more than a few milliseconds,
// waiting transactions delay others for long.
func New(db *sql.DB, cfg *Config) (*DB, error) {
	if db == nil {
		return nil, errors.New("sqlite: New requires a pool")
	}
	d, err := newDB(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	err = retryBusy(ctx, func() error {
		d.path, err = probe(ctx, db)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("sqlite: this pool cannot be used: %w", err)
	}
	d.users = &pool{db: db, of: d.Provider, older: &d.older}
	d.reads, d.write = d.users, d.users
	if err := d.users.warmUpIfMigrated(ctx); err != nil {
		return nil, fmt.Errorf("sqlite: prepare statements: %w", err)
	}
	return d, nil
}

func newDB(cfg *Config) (*DB, error) {
	d := &DB{&Provider{lock: make(chan struct{}, 1)}}
	if cfg != nil {
		d.cfg = *cfg
	}
	d.Routes = provider.NewRoutes(d.cfg.Route)
	if d.cfg.MaxPayload < 0 {
		return nil, fmt.Errorf("sqlite: MaxPayload is %d: it must not be negative; zero means 1 MiB", d.cfg.MaxPayload)
	}
	if d.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("sqlite: RequeueWindow is %s: it must not be negative; zero means the default", d.cfg.RequeueWindow)
	}
	d.cfg.RequeueWindow = cmp.Or(d.cfg.RequeueWindow, provider.DefaultRequeueWindow)
	return d, nil
}

// SQL returns the pool for the application's tables: the pool that Open made or New received. Its
// transactions are immediate, and InTx adds Kinora's writes to them. On a pool from Open they wait for
// the write lock in the same order as Kinora's, and a statement outside of them waits for at most 5s. Do
// not limit its connections: handlers that read through it could wait for transactions that wait for
// these handlers.
func (d *DB) SQL() *sql.DB { return d.users.db }

// Close closes the pools of Open. A pool passed to New stays open.
func (d *DB) Close() error {
	if !d.owned {
		return d.users.close(false)
	}
	return errors.Join(d.write.close(true), d.reads.close(true), d.users.close(true))
}

// What DB must have, TestConformance checks.
var (
	_ provider.LogWaker        = (*DB)(nil)
	_ provider.Waker           = (*DB)(nil)
	_ provider.TaskWaker       = (*DB)(nil)
	_ provider.ReadyChecker    = (*DB)(nil)
	_ provider.EventFinder     = (*Tx)(nil)
	_ eventstore.TxStore       = (*Tx)(nil)
	_ eventstore.SnapshotStore = (*Tx)(nil)
	_ outbox.Enqueuer          = (*Tx)(nil)
)

// checkPath makes path absolute. It refuses paths that name no file.
func checkPath(path string) (string, error) {
	switch {
	case path == "" || path == ":memory:":
		return "", fmt.Errorf("sqlite: open %q: an in-memory database ends with its connection: use package providers/memory", path)
	case strings.HasPrefix(path, "file:"):
		return "", fmt.Errorf("sqlite: open %q: a URI is not a path: open the URI with database/sql and pass the pool to New", path)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("sqlite: open %q: the path has a NUL byte: remove it", path)
	}
	abs, err := filepath.Abs(path)
	return result(abs, fmt.Sprintf("open %s", path), err)
}

// These characters would end the path of a URI, or begin an escape.
var escapePath = strings.NewReplacer("%", "%25", "?", "%3F", "#", "%23")

// dsn returns a URI, which can express every path. Its authority is empty: a path may begin with "//".
func dsn(path string, busy time.Duration) string {
	p := filepath.ToSlash(path)
	if !strings.HasPrefix(p, "/") {
		// a Windows path with a drive letter
		p = "/" + p
	}
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {
		"busy_timeout(" + strconv.FormatInt(busy.Milliseconds(), 10) + ")",
		"foreign_keys(1)", "synchronous(full)",
	}}
	return "file://" + escapePath.Replace(p) + "?" + q.Encode()
}

func setBusyTimeout(ms int64) string { return "pragma busy_timeout = " + strconv.FormatInt(ms, 10) }

// useWAL sets the journal mode. It is stored in the file, and another process may be changing it.
func useWAL(ctx context.Context, db *sql.DB) error {
	return retryBusy(ctx, func() error {
		var mode string
		if err := db.QueryRowContext(ctx, `pragma journal_mode = wal`).Scan(&mode); err != nil {
			return err
		}
		if mode != "wal" {
			return fmt.Errorf("the journal mode is %s: this file system does not support wal", mode)
		}
		return nil
	})
}

// probe checks, with one connection, whether New can use a pool, and returns the path of its file.
func probe(ctx context.Context, db *sql.DB) (path string, err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// This check comes first: another driver would bring another SQLite library, and closing a
	// file in one library drops the locks that the other holds on the file in this process.
	_, err = conn.ExecContext(ctx, `select kinora_no_such_function()`)
	if _, ok := errors.AsType[*sqlite.Error](err); !ok {
		return "", fmt.Errorf("its driver %T is not the one of modernc.org/sqlite: %w", db.Driver(), err)
	}
	const mainFile = `select file from pragma_database_list where name = 'main'`
	var file sql.NullString
	if err := conn.QueryRowContext(ctx, mainFile).Scan(&file); err != nil {
		return "", err
	}
	if file.String == "" {
		return "", errors.New("its database is in memory: use package providers/memory")
	}
	var mode string
	if err := conn.QueryRowContext(ctx, `pragma journal_mode`).Scan(&mode); err != nil {
		return "", err
	}
	if mode != "wal" {
		return "", fmt.Errorf(`its journal mode is %s: open it with "_pragma=journal_mode(wal)"`, mode)
	}
	if err := checkWritable(ctx, conn); err != nil {
		return "", err
	}
	return file.String, probeImmediate(ctx, conn, file.String)
}

// probeImmediate checks that the pool's transactions are immediate. While another connection has the
// write lock, one can begin only if it does not take that lock.
func probeImmediate(ctx context.Context, conn *sql.Conn, path string) (err error) {
	connector, err := sqlite.NewConnector(dsn(path, 0))
	if err != nil {
		return err
	}
	other := sql.OpenDB(connector)
	defer func() { err = errors.Join(err, other.Close()) }()
	var timeout int64
	if err := conn.QueryRowContext(ctx, `pragma busy_timeout`).Scan(&timeout); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, setBusyTimeout(0)); err != nil {
		return err
	}
	defer func() {
		_, restored := conn.ExecContext(context.WithoutCancel(ctx), setBusyTimeout(timeout))
		err = errors.Join(err, restored)
	}()
	var held *sql.Tx
	err = retryBusy(ctx, func() error {
		var err error
		held, err = other.BeginTx(ctx, nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("take the write lock: %w", err)
	}
	tx, begun := conn.BeginTx(ctx, nil)
	if begun == nil {
		begun = errors.Join(errors.New(`its transactions are not immediate: open it with "_txlock=immediate"`), tx.Rollback())
	} else if isBusy(begun) {
		begun = nil
	}
	return errors.Join(begun, held.Rollback())
}
