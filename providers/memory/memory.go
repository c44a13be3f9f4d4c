// Package memory is a provider that keeps everything in this process, and reads like the specification.
//
// It makes every promise of the contracts for as long as the process lives, and none beyond: there is no file,
// and a second process has a store of its own. Transactions run one after another: if a message is delivered
// twice, the second delivery finds the marker of the first and is skipped. Readers never wait, and see the last
// commit.
//
//	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, ratings)
//	db.View(func(m *memory.Model) { rating, ok = m.Get("ratings", "42") })
//
// The example shows a whole service. A transaction must not begin another: a handler that calls DB.Append
// waits for itself until its context ends. Inside a transaction, use DB.InTx.
//
// Authors of a provider may read it in this order: state, in this file, lists what a store keeps; unit.go has
// provider.Units, parking.go the queues of parked messages and provider.Parking, liveness.go provider.Liveness, and
// records.go the markers and provider.Records.
package memory

import (
	"context"
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
	Route      outbox.Route     // which events make entries, to which topics; nil: none
	MaxPayload int              // bytes of one event's or message's payload; zero means 1 MiB
	Clock      func() time.Time // the store's clock; nil: time.Now

	// RequeueWindow is how long after its last attempt an entry can be requeued without Force: the shortest time for
	// which any of its consumers keeps markers (marker.Retention.Window). Zero means provider.DefaultRequeueWindow.
	RequeueWindow time.Duration
}

// DB is an event store, an outbox and read models in the memory of one process. Repositories, relays and runners take it. Its
// methods may be called concurrently.
type DB struct{ *Provider }

// Provider has the methods of a DB that relays and runners call. Applications do not need them.
type Provider struct {
	cfg       Config
	committed atomic.Pointer[state]
	turn      chan struct{} // of size 1: a transaction puts something in it, and takes it out when it ends
}

// state is everything that is stored. A committed state never changes: a transaction changes a copy of its own, and
// its commit replaces the committed state with the copy.
type state struct {
	position  int64                                       // of the last event
	streams   *tree[string, *tree[int64, eventstore.Raw]] // events by stream and version
	places    *tree[string, place]                        // of every event, by its id
	entries   *tree[int64, outbox.Entry]                  // by Seq
	seq       int64                                       // of the last entry
	open      *tree[int64, struct{}]                      // the Seqs of those that are open
	held      *tree[int64, struct{}]                      // the Seqs of those that are held
	messages  *tree[string, int64]                        // Seqs by topic and message id
	live      *tree[string, int]                          // the live generation of a projector; 1 if it is not there
	markers   *tree[string, time.Time]                    // when they were left, by handler, generation and message id
	lowWater  *tree[string, time.Time]                    // of handlers: up to then their markers may be missing
	parked    *tree[int64, provider.Parked]               // by Seq
	parkedIDs *tree[string, int64]                        // Seqs of those not replayed, by projector and message id
	parkings  int64                                       // the last Seq of a parked message
	lanes     *tree[string, *tree[int64, struct{}]]       // Seqs of those waiting or stuck, by projector and lane
	runners   *tree[string, time.Time]                    // when their leases end
	names     *tree[string, []string]                     // what careful workers are about to run, by runner and number
	tables    *tree[string, *tree[string, any]]           // the read model
	added     chan struct{}                               // closed when a later state has more entries
}

// New makes an empty store.
func New(cfg *Config) (*DB, error) {
	db := &DB{&Provider{turn: make(chan struct{}, 1)}}
	if cfg != nil {
		db.cfg = *cfg
	}
	if db.cfg.MaxPayload < 0 {
		return nil, fmt.Errorf("memory: max payload %d: want no negative size", db.cfg.MaxPayload)
	}
	if db.cfg.RequeueWindow < 0 {
		return nil, fmt.Errorf("memory: requeue window %s: want no negative time", db.cfg.RequeueWindow)
	}
	if db.cfg.RequeueWindow == 0 {
		db.cfg.RequeueWindow = provider.DefaultRequeueWindow
	}
	if db.cfg.Clock == nil {
		db.cfg.Clock = time.Now //nolint:forbidigo // this is the store's clock
	}
	db.committed.Store(&state{added: make(chan struct{})})
	return db, nil
}

// now is the store's time. Each method reads it once.
func (db *Provider) now() time.Time { return db.cfg.Clock().UTC().Round(0) }

// Tx runs fn in a transaction: what fn writes through tx, and through InTx(tx), commits when fn returns nil.
// If fn returns an error, panics or calls runtime.Goexit, or ctx has ended, nothing is written. It runs once.
func (db *DB) Tx(ctx context.Context, fn func(tx *Model) error) error { return db.tx(ctx, fn) }

func (db *Provider) tx(ctx context.Context, fn func(tx *Model) error) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return err
	}
	defer tx.end()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.commit(ctx)
}

// update is Tx for changes that give a result. doing is for the error.
func update[R any](ctx context.Context, db *Provider, doing string, change func(s *state, now time.Time) R) (R, error) {
	var result, none R
	err := db.tx(ctx, func(tx *Model) error {
		result = change(&tx.staged, db.now())
		return nil
	})
	if err != nil {
		return none, fmt.Errorf("%s: %w", doing, err)
	}
	return result, nil
}

// query asks the committed state. doing is for the error.
func query[R any](ctx context.Context, db *Provider, doing string, ask func(s *state, now time.Time) R) (R, error) {
	if err := ctx.Err(); err != nil {
		var none R
		return none, fmt.Errorf("%s: %w", doing, err)
	}
	return ask(db.committed.Load(), db.now()), nil
}

// View reads the committed read model, all of it as it was at one moment. Writing to m panics.
func (db *DB) View(fn func(m *Model)) {
	m := &Model{staged: *db.committed.Load(), readOnly: true}
	defer m.end()
	fn(m)
}

var (
	errOver    = errors.New("the transaction is over")
	errForeign = errors.New("not a transaction of this store")
)

// begin waits until no other transaction is open.
func (db *Provider) begin(ctx context.Context) (*Model, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	select {
	case db.turn <- struct{}{}:
		return &Model{db: db, staged: *db.committed.Load()}, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("begin: wait for the transaction before: %w", ctx.Err())
	}
}

// commit replaces the committed state with the staged one, unless ctx has ended. A dry run is not committed.
func (m *Model) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if m.wrote != nil {
		return nil
	}
	if !m.last() {
		return fmt.Errorf("commit: %w", errOver)
	}
	defer func() { <-m.db.turn }()
	next, before := m.staged, m.db.committed.Load()
	if next.seq > before.seq {
		next.added = make(chan struct{})
		defer close(before.added) // once the next state is there
	}
	m.db.committed.Store(&next)
	return nil
}

// end lets the next transaction begin. Staged changes that were not committed are dropped.
func (m *Model) end() {
	m.over = true
	if !m.readOnly && m.last() {
		<-m.db.turn
	}
}

// last is true once: for the call that ends the transaction.
func (m *Model) last() bool { return m.ended.CompareAndSwap(false, true) }

const grace = time.Second // for a handler to return once its context has ended

// breakOff lets the next transaction begin when ctx has ended and grace has passed, even if the function of this one
// has not returned. From then on it works on a copy that is never committed.
func (m *Model) breakOff(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		time.AfterFunc(grace, func() {
			if m.last() {
				<-m.db.turn
			}
		})
	})
}

var (
	_ eventstore.Store          = (*DB)(nil)
	_ eventstore.TxStore        = (*Tx)(nil)
	_ provider.Outbox           = (*DB)(nil)
	_ provider.BatchClaimer     = (*DB)(nil)
	_ outbox.Inspector          = (*DB)(nil)
	_ provider.Waker            = (*DB)(nil)
	_ provider.Provider[*Model] = (*DB)(nil)
)
