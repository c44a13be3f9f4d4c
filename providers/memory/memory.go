// Package memory is a provider that keeps everything in this process, and reads like the specification.
//
// It makes every promise of the contracts for as long as the process lives, and none beyond: there is no file,
// and a second process has a store of its own. Transactions run one after another, so that of two deliveries
// of one message the second finds the first one's marker and is skipped. Readers never wait and see what was
// committed last.
//
//	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), nil, ratings)
//	db.View(func(m *memory.Model) { rating, ok = m.Get("ratings", "42") })
//
// The example shows a whole service. A transaction must not begin another: a handler that calls DB.Append
// waits for itself until its context ends. Inside of one, use DB.InTx.
package memory

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// Config tells how a DB works; the zero value is the default.
type Config struct {
	Route      outbox.Route     // which events make entries, to which topics; nil: none
	MaxPayload int              // bytes of one event's or message's payload; zero means 1 MiB
	Clock      func() time.Time // the store's clock; nil: time.Now

	// RequeueWindow is for how long after its last attempt an entry is requeued without Force: the shortest time for which any of its
	// consumers keeps markers (marker.Retention.Window). Zero means outbox.RequeueWindow.
	RequeueWindow time.Duration
}

// DB is every contract of Kinora in one process. Its methods may be called concurrently.
type DB struct {
	cfg       Config
	committed atomic.Pointer[state]
	turn      chan struct{} // of size 1: whoever has put something in it is the one writer
	apart     sync.RWMutex
}

// state is everything that is stored. A committed state never changes: a transaction changes its own copy, and
// commits by putting that in the place of the one before.
type state struct {
	position int64                                       // of the last event
	streams  *tree[string, *tree[int64, eventstore.Raw]] // events by stream and version
	places   *tree[string, place]                        // of every event, by its id
	entries  *tree[int64, outbox.Entry]                  // by Seq
	seq      int64                                       // of the last entry
	open     *tree[int64, struct{}]                      // the Seqs of those that are open
	held     *tree[int64, struct{}]                      // the Seqs of those that are held
	messages *tree[string, int64]                        // Seqs by topic and message id
	markers  *tree[string, time.Time]                    // when they were left, by handler and message id
	floors   *tree[string, time.Time]                    // of handlers of which markers were pruned
	parked   *tree[int64, projector.Parked]              // by Seq
	parkings int64                                       // the last Seq of a parked message
	due      *tree[int64, struct{}]                      // the Seqs of those that wait, and need not
	attempts *tree[string, tally]                        // by handler and message id
	names    *tree[string, time.Time]                    // of attempts under way, by handler and message id, and runner: since when
	runners  *tree[string, time.Time]                    // until when they live
	tables   *tree[string, *tree[string, any]]           // the read model
	added    chan struct{}                               // closed when a later state has more entries
}

// New makes an empty store.
func New(cfg *Config) (*DB, error) {
	db := &DB{turn: make(chan struct{}, 1)}
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
		db.cfg.RequeueWindow = outbox.RequeueWindow
	}
	if db.cfg.Clock == nil {
		db.cfg.Clock = time.Now //nolint:forbidigo // this is the store's clock
	}
	db.committed.Store(&state{added: make(chan struct{})})
	return db, nil
}

// now is read once a statement.
func (db *DB) now() time.Time { return db.cfg.Clock().UTC().Round(0) }

// Tx runs fn in a transaction: what fn writes through tx, and through InTx(tx), commits when fn returns nil.
// If fn returns an error, panics or calls runtime.Goexit, or ctx has ended, nothing is written. It runs once.
func (db *DB) Tx(ctx context.Context, fn func(tx *Model) error) error {
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

// begin waits for its turn.
func (db *DB) begin(ctx context.Context) (*Model, error) {
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

// commit puts what is staged in the place of what was there, unless ctx has ended.
func (m *Model) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if !m.last() {
		return fmt.Errorf("commit: %w", errOver)
	}
	defer func() { <-m.db.turn }()
	m.over = true
	next := m.staged
	before := m.db.committed.Load()
	grown := next.seq > before.seq
	if grown {
		next.added = make(chan struct{})
	}
	m.db.committed.Store(&next)
	if grown {
		close(before.added)
	}
	return nil
}

// end gives the turn to the next. What was not committed is forgotten.
func (m *Model) end() {
	m.over = true
	if !m.readOnly && m.last() {
		<-m.db.turn
	}
}

// last is true once: for what ends the transaction.
func (m *Model) last() bool { return m.ended.CompareAndSwap(false, true) }

const grace = time.Second // for a handler to return once its context has ended

// breakOff gives the turn to the next where ctx ends and grace is over, whatever this goroutine does. From then on it works on a
// copy that is never committed.
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
	_ eventstore.Store             = (*DB)(nil)
	_ eventstore.TxStore           = (*Tx)(nil)
	_ outbox.Store                 = (*DB)(nil)
	_ outbox.BatchClaimer          = (*DB)(nil)
	_ outbox.Inspector             = (*DB)(nil)
	_ outbox.Waker                 = (*DB)(nil)
	_ projector.UnitOfWork[*Model] = (*DB)(nil)
	_ projector.ParkedInspector    = (*DB)(nil)
	_ projector.Journal            = (*DB)(nil)
	_ projector.State              = (*DB)(nil)
)
