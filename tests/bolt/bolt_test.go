package bolt

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/bbolt"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Config configures a DB; the zero value is the default.
type Config struct {
	Route         outbox.Route
	MaxPayload    int              // zero means 1 MiB
	RequeueWindow time.Duration    // zero means provider.DefaultRequeueWindow
	Clock         func() time.Time // nil: time.Now
	NoSync        bool             // a crash of the machine may lose commits
}

// DB is a handle on a file. bbolt runs one transaction that writes at a time, and lets one process open a
// file. So every committed event is settled, and a unit waits only for the lock of the writer.
type DB struct {
	*provider.Routes
	events
	cfg  Config
	file *file
}

// file is an open file, which handles share.
type file struct {
	bolt    *bbolt.DB
	lock    chan struct{} // of the writer, of capacity 1
	lineage string
}

// Open opens or creates a file.
func Open(path string, cfg Config) (*DB, error) {
	opened, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second, NoSync: cfg.NoSync, NoFreelistSync: cfg.NoSync})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := &file{bolt: opened, lock: make(chan struct{}, 1)}
	err = opened.Update(func(tx *bbolt.Tx) error {
		if _, err := tx.CreateBucketIfNotExists([]byte("kinora")); err != nil {
			return err
		}
		s := &session{tx: tx}
		if f.lineage, _ = lineages.get(s, key("log")); f.lineage == "" {
			f.lineage = rand.Text()
			lineages.put(s, key("log"), f.lineage)
		}
		return s.err
	})
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	return f.handle(cfg), nil
}

func (f *file) handle(cfg Config) *DB {
	cfg.RequeueWindow = cmp.Or(cfg.RequeueWindow, provider.DefaultRequeueWindow)
	if cfg.Clock == nil {
		cfg.Clock = time.Now //nolint:forbidigo // this is the store's clock
	}
	db := &DB{Routes: provider.NewRoutes(cfg.Route), cfg: cfg, file: f}
	db.events = events{db: db}
	return db
}

// Again returns another handle on the open file.
func (db *DB) Again() *DB { return db.file.handle(db.cfg) }

func (db *DB) Close() error { return db.file.bolt.Close() }

func (db *DB) now() time.Time { return db.cfg.Clock().UTC().Round(0) }

// session is a transaction of bbolt, with its time and its first error.
type session struct {
	tx  *bbolt.Tx
	now time.Time
	err error
}

func (s *session) fail(err error) { s.err = cmp.Or(s.err, err) }

// query runs ask on what is committed, unless the arguments are invalid.
func query[R any](ctx context.Context, db *DB, doing string, invalid error, ask func(s *session) R) (result R, err error) {
	err = db.read(ctx, doing, invalid, func(s *session) { result = ask(s) })
	return result, err
}

// update runs change in a transaction, unless the arguments are invalid.
func update[R any](ctx context.Context, db *DB, doing string, invalid error, change func(s *session) (R, error)) (result R, err error) {
	err = db.write(ctx, doing, invalid, func(s *session) (err error) {
		result, err = change(s)
		return err
	})
	if err != nil {
		var none R
		return none, err
	}
	return result, nil
}

// Tx is a transaction. It ends when the function that got it returns, or, in a unit, a second after its
// context has ended: then every call returns an error.
type Tx struct {
	db   *DB
	mu   sync.Mutex
	s    *session
	over bool
}

var errOver = errors.New("the transaction is over")

// use calls fn unless the transaction is over.
func (tx *Tx) use(fn func(s *session) error) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return errOver
	}
	return cmp.Or(fn(tx.s), tx.s.err)
}

// Get returns a value of the read model, or nil.
func (tx *Tx) Get(name string) (value []byte, err error) {
	err = tx.use(func(s *session) error {
		value, _ = model.get(s, key(name))
		return nil
	})
	return value, err
}

// Put sets a value of the read model.
func (tx *Tx) Put(name string, value []byte) error {
	return tx.use(func(s *session) error {
		model.put(s, key(name), value)
		return nil
	})
}

// Get returns a committed value of the read model, or nil.
func (db *DB) Get(ctx context.Context, name string) ([]byte, error) {
	return query(ctx, db, "read the read model", nil, func(s *session) []byte {
		value, _ := model.get(s, key(name))
		return value
	})
}

// insideKey is the key of the open transaction in the context of its function.
type insideKey struct{ *file }

// begin waits until no other transaction is open.
func (db *DB) begin(ctx context.Context) (*Tx, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	if tx, ok := ctx.Value(insideKey{db.file}).(*Tx); ok && tx.use(func(*session) error { return nil }) == nil {
		return nil, fmt.Errorf("begin: %w", provider.ErrInTransaction)
	}
	select {
	case db.file.lock <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("begin: wait for the open transaction to end: %w", ctx.Err())
	}
	tx, err := db.file.bolt.Begin(true)
	if err != nil {
		<-db.file.lock
		return nil, fmt.Errorf("begin: %w", err)
	}
	return &Tx{db: db, s: &session{tx: tx, now: db.now()}}, nil
}

// end commits the transaction, unless there is an error, or rolls it back.
func (tx *Tx) end(commit bool, err error) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return errOver
	}
	tx.over = true
	defer func() { <-tx.db.file.lock }()
	if err = cmp.Or(err, tx.s.err); err != nil || !commit {
		return errors.Join(err, tx.s.tx.Rollback())
	}
	return tx.s.tx.Commit()
}

// Transact runs fn in a transaction, and commits if fn returns nil.
func (db *DB) Transact(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.end(false, nil) }() // fn may not return
	if err := fn(context.WithValue(ctx, insideKey{db.file}, tx), tx); err != nil {
		return err
	}
	return tx.end(true, ctx.Err())
}
