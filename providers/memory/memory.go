// Package memory is a provider that keeps everything in memory. Its code can serve as a specification.
//
// It keeps every promise of the contracts while the process runs. It writes no file, and a second
// process has a separate store. Transactions run one after another. Readers never wait and see the
// last commit.
//
//	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, ratings)
//	db.View(func(m *memory.Model) { rating, ok = m.Get("ratings", "42") })
//
// The example shows a whole service. A transaction must not begin another: in a handler, DB.Append is
// provider.ErrInTransaction. Use DB.InTx there.
//
// Authors of a provider can read the package in this order: state, in this file, lists the stored
// data; unit.go and switch.go implement provider.Units; generations.go implements provider.Builds;
// parking.go implements provider.Parking; records.go implements the markers, provider.Records and
// provider.Liveness; progress.go implements provider.Progress and provider.Leases; log.go implements
// provider.Log; operations.go implements provider.Operations; tasks.go and task_tx.go implement tasks.
package memory

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Config configures a DB; the zero value is the default.
type Config struct {
	Route      outbox.Route     // maps events to the topics of their entries; nil: no entries
	MaxPayload int              // most bytes of a payload; zero means 1 MiB
	Clock      func() time.Time // the store's clock; nil: time.Now

	// RequeueWindow is how long after its last attempt an entry can be requeued without Force. Zero
	// means provider.DefaultRequeueWindow, which says when to set it.
	RequeueWindow time.Duration
}

// DB is an event store, an outbox and read models in the memory of one process. Repositories,
// relays and runners take it. Its methods are safe for concurrent use.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	*provider.Routes
	cfg       Config
	committed atomic.Pointer[state]
	lock      chan struct{} // write lock, of capacity 1: an open transaction has one element in it
	lineage   string        // of the log
}

// state is all that is stored. A committed one never changes: a commit replaces it with a changed copy.
type state struct {
	position int64                                       // of the last event
	streams  *tree[string, *tree[int64, eventstore.Raw]] // events by stream and version
	log      *tree[int64, eventstore.Raw]                // every event, by its position
	places   *tree[string, eventstore.Appended]          // of every event, by its id
	// by stream and schema
	snapshots *tree[string, *tree[string, snapshot]]
	entries   *tree[int64, outbox.Entry] // by Seq
	seq       int64                      // of the last entry
	open      *tree[int64, struct{}]     // the Seqs of the open entries
	held      *tree[int64, struct{}]     // the Seqs of the held entries
	messages  *tree[string, int64]       // Seqs by topic and message id
	// by projector and number
	generations *tree[string, provider.Generation]
	// by handler, generation and message id
	markers *tree[string, marker]
	// by projector and generation
	checkpoints *tree[string, provider.Checkpoint]
	leases      *tree[string, lease] // by name
	// of handlers: markers created up to this time may be deleted
	lowWater *tree[string, time.Time]
	parked   *tree[int64, provider.Parked] // by Seq
	// Seqs of the messages not replayed, by projector, generation and message id
	parkedIDs *tree[string, int64]
	parkings  int64 // the last Seq of a parked message
	// Seqs of the messages that wait or are stuck, by projector, generation and lane
	lanes   *tree[string, *tree[int64, struct{}]]
	runners *tree[string, time.Time] // the ends of their leases
	// messages in flight of careful workers, by runner and number
	inFlight *tree[string, []string]
	tables   *tree[string, *tree[string, any]] // the read models
	views    *tree[string, string]             // the tables that views show
	work     work                              // the tasks
	services *tree[string, provider.ServiceReport]
	pauses   *tree[string, provider.Pause] // by kind, NUL and name
	acts     *tree[int64, provider.Act]    // by ID
	act      int64                         // the last ID
	// closed when a later state has more entries, more events, or more tasks to claim
	added, appended, tasksDue chan struct{}
}

// New returns an empty store.
func New(cfg *Config) (*DB, error) {
	db := &DB{&Provider{lock: make(chan struct{}, 1), lineage: rand.Text()}}
	if cfg != nil {
		db.cfg = *cfg
	}
	db.Routes = provider.NewRoutes(db.cfg.Route)
	if db.cfg.MaxPayload < 0 {
		return nil, fmt.Errorf("memory: MaxPayload is %d: it must not be negative; zero means 1 MiB", db.cfg.MaxPayload)
	}
	if db.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("memory: RequeueWindow is %s: it must not be negative; zero means the default", db.cfg.RequeueWindow)
	}
	db.cfg.RequeueWindow = cmp.Or(db.cfg.RequeueWindow, provider.DefaultRequeueWindow)
	if db.cfg.Clock == nil {
		db.cfg.Clock = time.Now //nolint:forbidigo // this is the store's clock
	}
	db.committed.Store(&state{added: make(chan struct{}), appended: make(chan struct{}), tasksDue: make(chan struct{})})
	return db, nil
}

// now returns the store's time. Each method reads it once.
func (db *Provider) now() time.Time { return db.cfg.Clock().UTC().Round(0) }

// Transact runs fn once, in a transaction, and commits if fn returns nil. The writes of fn through
// tx and InTx(tx) are visible after the commit, and wake relays then. If fn returns an error, panics
// or calls runtime.Goexit, or if ctx has ended, nothing is written. Transactions run one after
// another: a conflict cannot pass in another run, and there is no lost reply.
func (db *DB) Transact(ctx context.Context, fn func(ctx context.Context, tx *Model) error) error {
	return db.tx(ctx, func(tx *Model) error { return fn(tx.inside(ctx), tx) })
}

func (db *Provider) tx(ctx context.Context, fn func(tx *Model) error) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return err
	}
	return tx.run(ctx, fn)
}

func (tx *Model) run(ctx context.Context, fn func(tx *Model) error) error {
	defer tx.end()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.commit(ctx)
}

// update runs fn in a transaction and returns its result, unless the input is invalid. doing is the prefix of an error.
func update[R any](ctx context.Context, db *Provider, doing string, invalid error, fn func(*state, time.Time) (R, error)) (r R, err error) {
	if err = invalid; err == nil {
		err = db.tx(ctx, func(tx *Model) error {
			r, err = fn(&tx.staged, db.now())
			return err
		})
	}
	return result(r, doing, err)
}

// query returns the result of ask on the committed state, unless the input is invalid. doing is the prefix of an error.
func query[R any](ctx context.Context, db *Provider, doing string, invalid error, ask func(s *state, now time.Time) R) (r R, err error) {
	if err = cmp.Or(invalid, ctx.Err()); err == nil {
		r = ask(db.committed.Load(), db.now())
	}
	return result(r, doing, err)
}

// result returns r, or an error with its prefix.
func result[R any](r R, doing string, err error) (R, error) {
	if err != nil {
		var none R
		return none, fmt.Errorf("%s: %w", doing, err)
	}
	return r, nil
}

// View calls fn with the read models of one commit. Writing to m panics.
func (db *DB) View(fn func(m *Model)) {
	m := &Model{staged: *db.committed.Load(), readOnly: true}
	defer m.end()
	fn(m)
}

var (
	errOver    = errors.New("the transaction is over")
	errForeign = errors.New("not a transaction of this store")
)

// insideKey is the key of the open transaction of a store in the context of its function.
type insideKey struct{ db *Provider }

func (m *Model) inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, insideKey{m.db}, m)
}

// isInside reports whether ctx is that of an open transaction.
func (db *Provider) isInside(ctx context.Context) bool {
	m, ok := ctx.Value(insideKey{db}).(*Model)
	return ok && !m.ended.Load()
}

// begin waits until no other transaction is open.
func (db *Provider) begin(ctx context.Context) (*Model, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	if db.isInside(ctx) {
		return nil, fmt.Errorf("begin: %w", provider.ErrInTransaction)
	}
	select {
	case db.lock <- struct{}{}:
		return &Model{db: db, staged: *db.committed.Load()}, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("begin: wait for the open transaction to end: %w", ctx.Err())
	}
}

// commit stores the staged state, unless ctx has ended or the changes are to be discarded.
func (m *Model) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if m.discard {
		return nil
	}
	if !m.endOnce() {
		return fmt.Errorf("commit: %w", errOver)
	}
	defer func() { <-m.db.lock }()
	next, before := m.staged, m.db.committed.Load()
	if next.seq > before.seq {
		next.added = make(chan struct{})
		defer close(before.added) // after the next state is stored
	}
	if next.position > before.position {
		next.appended = make(chan struct{})
		defer close(before.appended)
	}
	if next.work.wakes > before.work.wakes {
		next.tasksDue = make(chan struct{})
		defer close(before.tasksDue)
	}
	m.db.committed.Store(&next)
	return nil
}

// end releases the write lock. Uncommitted changes are dropped.
func (m *Model) end() {
	m.over = true
	if !m.readOnly && m.endOnce() {
		<-m.db.lock
	}
}

// endOnce returns true once, to the call that ends the transaction.
func (m *Model) endOnce() bool { return m.ended.CompareAndSwap(false, true) }

const grace = time.Second // for a handler to return after its context has ended

// endLate releases the write lock when ctx has ended and grace has passed, even if the transaction's
// function has not returned. After that it works on a copy that is never committed.
func (m *Model) endLate(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		time.AfterFunc(grace, func() {
			if m.endOnce() {
				<-m.db.lock
			}
		})
	})
}

// What DB must have, TestConformance checks.
var (
	_ provider.LogWaker        = (*DB)(nil)
	_ provider.Waker           = (*DB)(nil)
	_ provider.TaskWaker       = (*DB)(nil)
	_ provider.EventFinder     = (*Tx)(nil)
	_ eventstore.TxStore       = (*Tx)(nil)
	_ eventstore.SnapshotStore = (*Tx)(nil)
)
