package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// unit is a write transaction that has its turn.
type unit struct {
	session
	db         *Provider
	entries    bool // it added outbox entries
	committing atomic.Bool
	undone     atomic.Bool  // its transaction is over: another one may be open on its connection
	message    atomic.Int64 // the message whose handlers run, or ran when it was undone, or -1
	leave      func()       // gives the turn to the next writer
}

// Pauses between two tries to take the write lock. Another process releases it after a commit, which takes about as
// long as the shortest pause, or after a handler, which may take any time.
const (
	pauseMin = 100 * time.Microsecond
	pauseMax = 4 * time.Millisecond
)

// begin waits for its turn in this process, first come first served, and then for the file's write lock, until ctx
// ends. It has no connection while it waits for its turn.
func (d *Provider) begin(ctx context.Context) (*unit, error) {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, own(beginning, fmt.Errorf("wait for the turn: %w", ctx.Err()))
	}
	u := &unit{db: d, session: session{pool: d.write}}
	u.message.Store(-1)
	u.leave = sync.OnceFunc(func() {
		d.current.CompareAndSwap(u, nil)
		<-d.turn
	})
	err := patiently(ctx, func() error {
		err := d.write.warmUp(ctx)
		if err == nil {
			u.tx, err = d.write.db.BeginTx(ctx, nil)
		}
		return err
	})
	if err != nil {
		u.leave()
		return nil, own(beginning, err)
	}
	d.current.Store(u)
	return u, nil
}

// patiently runs fn again as long as the database is busy, until ctx ends.
func patiently(ctx context.Context, fn func() error) error {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		err := fn()
		if !isBusy(err) {
			return err
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return fmt.Errorf("the database is busy: %w", ctx.Err())
		}
	}
}

// inTurn runs fn in a write transaction and commits it. If ctx ends, the transaction is rolled back and others have their
// turn, even if fn has not returned. If fn panics or calls runtime.Goexit, nothing is committed.
func (d *Provider) inTurn(ctx context.Context, fn func(u *unit) error) error {
	u, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer u.leave()
	defer func() { _ = u.tx.Rollback() }() // after a commit there is nothing to undo, and it says so
	stay := context.AfterFunc(ctx, u.leave)
	defer stay()
	if err = fn(u); err == nil {
		if !stay() {
			return ctx.Err()
		}
		u.committing.Store(true)
		err = own(committing, u.tx.Commit())
		u.committing.Store(false)
		if err == nil && u.entries {
			d.added.send()
		}
	}
	// The error of a transaction that database/sql has rolled back may say that it is done, or a statement is closed.
	if err != nil && ctx.Err() != nil && !errors.Is(err, ctx.Err()) && !isAmbiguous(err) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// clock is SQLite's, in milliseconds. It does not change while a statement runs.
const clock = `cast(round(unixepoch('subsec') * 1000) as integer)`

func timeOf(ms int64) time.Time { return time.UnixMilli(ms).UTC() }

func timeOrZero(ms sql.NullInt64) time.Time {
	if !ms.Valid {
		return time.Time{}
	}
	return timeOf(ms.Int64)
}

// millis rounds up, so that a lease is never too short.
func millis(d time.Duration) int64 { return int64(math.Ceil(float64(d) / float64(time.Millisecond))) }

// signal is a channel that is closed, and replaced, each time that it is sent.
type signal struct{ ch atomic.Pointer[chan struct{}] }

func (s *signal) wait() <-chan struct{} {
	for {
		if ch := s.ch.Load(); ch != nil {
			return *ch
		}
		s.ch.CompareAndSwap(nil, new(make(chan struct{})))
	}
}

func (s *signal) send() {
	if ch := s.ch.Swap(nil); ch != nil {
		close(*ch)
	}
}
