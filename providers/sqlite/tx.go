package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Tx is the event store and the outbox inside a transaction of the caller. It claims no entries.
type Tx struct {
	session
	db   *Provider
	unit *unit // set if Do began the transaction
}

// InTx returns the view of tx. The caller began tx, through SQL or any other pool on the same
// file, or got it from Do. Begin it as immediate: otherwise a conflict with another writer may
// end it.
func (d *DB) InTx(tx *sql.Tx) *Tx {
	t := &Tx{session: session{tx: tx, pool: d.users}, db: d.Provider}
	if u := d.current.Load(); u != nil && u.tx == tx {
		t.unit, t.pool = u, d.write
	}
	return t
}

// CallersTx implements eventstore.TxStore.
func (*Tx) CallersTx() {}

// Append implements eventstore.Store, inside the transaction.
func (t *Tx) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (at eventstore.Appended, err error) {
	a, err := t.db.check(stream, expected, events)
	if err != nil {
		return eventstore.Appended{}, err
	}
	err = t.atomically(ctx, func() error {
		at, err = a.run(ctx, t.session)
		return err
	})
	if err == nil {
		t.hint(news{entries: a.entries > 0, events: !at.Replayed})
	}
	return a.result(at, err)
}

// ReadStream implements eventstore.Store. It includes the events that the transaction itself
// appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return streamOf(ctx, t.session, stream, afterVersion)
}

// Enqueue implements outbox.Enqueuer. Message.OrderedKey needs no lock here: SQLite has one
// writer, so every key is in the order of commits.
func (t *Tx) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	ready, err := provider.NormalizeAll(ctx, ms, t.db.cfg.MaxPayload)
	if err != nil {
		return err
	}
	err = t.atomically(ctx, func() error { return t.enqueueAll(ctx, ready) })
	if err == nil {
		t.hint(news{entries: true})
	}
	return wrap("enqueue", err)
}

// hint makes the commit signal n, if the transaction is one of Do or of a pool from Open. Kinora does not see the commits of other pools.
func (t *Tx) hint(n news) {
	if u := t.unit; u != nil {
		u.add(n)
		return
	}
	t.db.hinted.Lock()
	defer t.db.hinted.Unlock()
	t.db.hinted.add(n)
}

// hints is what the caller's open transaction added.
type hints struct {
	sync.Mutex
	news
}

// take returns the hints, and forgets them.
func (h *hints) take() news {
	h.Lock()
	defer h.Unlock()
	n := h.news
	h.news = news{}
	return n
}

const (
	savepoint = `savepoint kinora`
	release   = `release kinora`
	undo      = `rollback to kinora`
)

// atomically runs fn in a savepoint. It ends it even if ctx has ended, or the transaction would commit
// rows that were reported as not written.
func (t *Tx) atomically(ctx context.Context, fn func() error) error {
	if _, err := t.exec(ctx, savepoint); err != nil {
		return err
	}
	err := fn()
	end := context.WithoutCancel(ctx)
	if err == nil {
		if _, err = t.exec(end, release); err == nil {
			return nil
		}
	}
	if _, failed := t.exec(end, undo); failed != nil {
		return errors.Join(err, failed)
	}
	_, failed := t.exec(end, release)
	return errors.Join(err, failed)
}

const (
	transactTries = 20
	transactLimit = 15 * time.Second // from the end of the first run to the start of the last one
)

// Transact runs fn in an immediate transaction and commits if fn returns nil. Otherwise, also if
// fn panics or calls runtime.Goexit, or if ctx ends, it rolls back. After the commit it wakes
// relays if fn added entries through InTx.
//   - Transact waits for other writers until ctx ends.
//   - fn may run several times, each time in a new transaction, so it must have no other effects.
//     It runs again if it or the commit fails with SQLITE_BUSY: up to 20 runs in 15 seconds, or
//     until ctx ends.
//   - fn must write only through tx and InTx(tx). Any other write of this DB with the context of fn is
//     provider.ErrInTransaction, and with another context it waits for this transaction.
//   - An error of fn is returned unchanged. After a conflict fn does not run again: no other writer
//     can change a stream between a read and an append of fn.
//   - fn must not end the transaction. On a DB from Open, SQLite then rolls it back and Transact
//     returns an error. On a DB from New, the writes up to there may be committed.
//   - eventstore.ErrAmbiguous: the commit failed while it was written to disk. Read the stored data
//     before you call Transact again.
func (d *DB) Transact(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	err := d.transact(ctx, fn)
	if !isBusy(err) {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, transactLimit)
	defer cancel()
	for try := 1; isBusy(err) && try < transactTries; try++ {
		pauses.Wait(limit, rand.N(pauses.Doubled(pauseMax, try-1, time.Second)), nil)
		if limit.Err() != nil {
			return err
		}
		err = d.transact(ctx, fn)
	}
	return err
}

// transact is one run of Transact.
func (d *DB) transact(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	var failed error // an error of fn
	err := d.writeTx(ctx, func(u *unit) error {
		if failed = fn(u.inside(ctx), u.tx); failed == nil && u.rolledBack.Load() {
			return sql.ErrTxDone
		}
		return failed
	})
	switch {
	case err == nil || failed != nil:
		return err
	case isTxEnded(err):
		return fmt.Errorf("transact: fn has ended the transaction: return nil to commit it: %w", err)
	case isAmbiguous(err):
		return fmt.Errorf("transact: %w: %w", eventstore.ErrAmbiguous, err)
	}
	return fmt.Errorf("transact: %w", err)
}

// Wake makes relays and workers of this DB claim at once. Call it after the commit of a transaction
// that began on another pool than that of Open: the DB does not see such commits.
func (d *DB) Wake() { d.signal(news{entries: true, tasks: true}) }
