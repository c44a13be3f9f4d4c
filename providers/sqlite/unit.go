package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// unit is a write transaction in its turn.
type unit struct {
	session
	db         *DB
	entries    bool // it added some
	idle       bool // it has nothing to commit
	committing atomic.Bool
	undone     atomic.Bool // whatever is open on its connection now is not its transaction
	once       sync.Once
}

// Pauses between two tries to take the write lock: another process gives it back after a commit, which takes
// about as long as the shortest, or after a handler, which may take any time.
const (
	pauseMin = 100 * time.Microsecond
	pauseMax = 4 * time.Millisecond
)

// begin waits for the turn in this process, in which others are served in the order that they came, and then
// for the file's write lock, until ctx ends.
func (d *DB) begin(ctx context.Context) (*unit, error) {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("begin: wait for the turn: %w", ctx.Err())
	}
	u := &unit{db: d, session: session{pool: d.write}}
	err := patiently(ctx, func() error {
		err := d.write.warmUp(ctx)
		if err == nil {
			u.tx, err = d.write.db.BeginTx(ctx, nil)
		}
		return err
	})
	if err != nil {
		u.leave()
		return nil, fmt.Errorf("begin: %w", err)
	}
	d.current.Store(u)
	return u, nil
}

// patiently runs fn again for as long as another connection is in its way, until ctx ends.
func patiently(ctx context.Context, fn func() error) error {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		err := fn()
		if !isBusy(err) {
			return err
		}
		t := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("the database is busy: %w", ctx.Err())
		}
	}
}

// mayCommit tells whether the commit under way on the writing connection is ours.
func (d *DB) mayCommit() bool {
	u := d.current.Load()
	return u != nil && u.committing.Load() && !u.undone.Load()
}

// rolledBack notes that the transaction on the writing connection is over.
func (d *DB) rolledBack() {
	if u := d.current.Load(); u != nil {
		u.undone.Store(true)
	}
}

func (u *unit) commit() error {
	u.committing.Store(true)
	defer u.committing.Store(false)
	if err := u.tx.Commit(); err != nil {
		return &commitError{err}
	}
	if u.entries {
		u.db.added.send()
	}
	return nil
}

// end undoes what was not committed and lets the next one have its turn. It is deferred, so that it runs also
// when a handler panics or calls runtime.Goexit.
func (u *unit) end() {
	_ = u.tx.Rollback() // after a commit there is nothing to undo, and it says so
	u.leave()
}

func (u *unit) leave() {
	u.once.Do(func() {
		u.db.current.CompareAndSwap(u, nil)
		<-u.db.turn
	})
}

// inTurn runs fn in a write transaction.
func (d *DB) inTurn(ctx context.Context, fn func(u *unit) error) error {
	u, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer u.end()
	if err = fn(u); err == nil {
		err = u.commit()
	}
	// The end of ctx ends the transaction under our hands, and database/sql then says whatever it meets first:
	// that the transaction is done, or that a statement is closed.
	if err != nil && ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// clock is SQLite's, in milliseconds. It stands still for as long as a statement runs.
const clock = `cast(round(unixepoch('subsec') * 1000) as integer)`

func timeOf(ms int64) time.Time { return time.UnixMilli(ms).UTC() }

func timeOrZero(ms sql.NullInt64) time.Time {
	if !ms.Valid {
		return time.Time{}
	}
	return timeOf(ms.Int64)
}

// millis rounds up, so that a lease is never shorter than was asked for. There is room for what is longer than anybody lives.
func millis(d time.Duration) int64 {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	return ms
}

// signal is closed and replaced each time that it is sent.
type signal struct {
	mu sync.Mutex
	ch chan struct{}
}

func (s *signal) wait() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

func (s *signal) send() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}
