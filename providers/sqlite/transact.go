package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
)

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
