package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// Tx is the event store and the outbox inside a transaction of the caller's. Nothing can be claimed through it.
type Tx struct {
	session
	db   *Provider
	unit *unit // where the transaction is that of Do
}

// InTx is the view of tx: one that the caller began, through SQL or any other pool on the same file, or the
// one that Do handed out. Begin it as immediate, or a conflict with another writer may end it.
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
	if err != nil {
		return eventstore.Appended{}, a.wrap(err)
	}
	if a.entries > 0 {
		t.hint()
	}
	return at, nil
}

// ReadStream implements eventstore.Store, with what the transaction itself has appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return streamOf(ctx, t.session, stream, afterVersion)
}

// Enqueue implements outbox.Enqueuer. Message.OrderedKey needs nothing here: SQLite has one writer, so every key
// is in the order of commits.
func (t *Tx) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	ready, err := t.db.normalize(ms)
	if err != nil {
		return err
	}
	err = t.atomically(ctx, func() error { return t.enqueueAll(ctx, ready) })
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	t.hint()
	return nil
}

func (d *Provider) normalize(ms []outbox.Message) ([]outbox.Message, error) {
	ready := make([]outbox.Message, len(ms))
	for i := range ms {
		var err error
		if ready[i], err = ms[i].Normalize(d.cfg.MaxPayload); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
	}
	return ready, nil
}

// hint makes the commit tell that there are entries, where the transaction is one of a pool that Open made. The
// commit of others is not ours to see.
func (t *Tx) hint() {
	if t.unit != nil {
		t.unit.entries = true
	} else {
		t.db.hinted.Store(true)
	}
}

const (
	savepoint = `savepoint kinora`
	release   = `release kinora`
	undo      = `rollback to kinora`
)

// atomically runs fn in a savepoint. Ending that must not depend on ctx: a savepoint left open would commit
// with the transaction what was reported as not written.
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
