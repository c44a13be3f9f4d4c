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

	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

// unit is a write transaction that holds the write lock.
type unit struct {
	session
	news
	db         *Provider
	committing atomic.Bool
	// the transaction was rolled back: another one may be open on its connection
	rolledBack atomic.Bool
	// the message whose handlers run, or ran at the rollback; -1 if none
	message atomic.Int64
	unlock  func() // releases the write lock
}

// Pauses between two tries to take the file's lock. A commit takes about as long as the shortest one.
const (
	pauseMin = 100 * time.Microsecond
	pauseMax = 4 * time.Millisecond
)

// insideKey is the key of the open unit of a file in the context of its function.
type insideKey struct{ db *Provider }

func (u *unit) inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, insideKey{u.db}, u)
}

// notInside returns provider.ErrInTransaction if ctx is that of an open unit.
func (d *Provider) notInside(ctx context.Context) error {
	if u, ok := ctx.Value(insideKey{d}).(*unit); ok && d.current.Load() == u {
		return provider.ErrInTransaction
	}
	return nil
}

// begin waits for the write lock of this process, in the order of arrival, and then for the lock
// of the file, until wait ends. It has no connection while it waits for the first.
func (d *Provider) begin(ctx, wait context.Context) (*unit, error) {
	if err := d.notInside(ctx); err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	select {
	case d.lock <- struct{}{}:
	case <-wait.Done():
		return nil, inStep(beginning, fmt.Errorf("wait for the write lock: %w", wait.Err()))
	}
	u := &unit{db: d, session: session{pool: d.write}}
	u.message.Store(-1)
	u.unlock = sync.OnceFunc(func() {
		d.current.CompareAndSwap(u, nil)
		<-d.lock
	})
	err := retryBusy(wait, func() error {
		err := d.write.warmUp(ctx)
		if err == nil {
			u.tx, err = d.write.db.BeginTx(ctx, nil)
		}
		return err
	})
	if err != nil {
		u.unlock()
		return nil, inStep(beginning, err)
	}
	d.current.Store(u)
	return u, nil
}

// retryBusy runs fn again while the database is busy, until ctx ends.
func retryBusy(ctx context.Context, fn func() error) error {
	for pause := (pauses.Doubling{First: pauseMin, Longest: pauseMax}); ; {
		err := fn()
		if !isBusy(err) {
			return err
		}
		d := pause.Next()
		if pauses.Wait(ctx, d/2+rand.N(d), nil); ctx.Err() != nil {
			return fmt.Errorf("the database is busy: %w", ctx.Err())
		}
	}
}

// writeTx runs fn in a write transaction and commits it. If ctx ends, the transaction is rolled
// back and the write lock released, even if fn has not returned. If fn panics or calls
// runtime.Goexit, nothing is committed.
func (d *Provider) writeTx(ctx context.Context, fn func(u *unit) error) error {
	return d.writeTxWithin(ctx, ctx, fn)
}

// writeTxWithin is writeTx that waits for other writers until wait ends.
func (d *Provider) writeTxWithin(ctx, wait context.Context, fn func(u *unit) error) error {
	u, err := d.begin(ctx, wait)
	if err != nil {
		return err
	}
	defer u.unlock()
	// after a commit, Rollback returns an error and changes nothing
	defer func() { _ = u.tx.Rollback() }()
	stop := context.AfterFunc(ctx, u.unlock)
	defer stop()
	if err = fn(u); err == nil {
		if !stop() {
			return ctx.Err()
		}
		u.committing.Store(true)
		err = inStep(committing, u.tx.Commit())
		u.committing.Store(false)
		if err == nil {
			d.signal(u.news)
		}
	}
	// After database/sql has rolled a transaction back, an error may only say that the
	// transaction is done or a statement is closed.
	if err != nil && ctx.Err() != nil && !errors.Is(err, ctx.Err()) && !isAmbiguous(err) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// news is what a transaction added.
type news struct {
	entries bool // of the outbox
	events  bool
	tasks   bool // that may be due
}

func (n *news) add(o news) {
	n.entries, n.events, n.tasks = n.entries || o.entries, n.events || o.events, n.tasks || o.tasks
}

// signal signals a commit to relays, to readers of the log, and to workers of tasks.
func (d *Provider) signal(n news) {
	if n.entries {
		d.added.send()
	}
	if n.events {
		d.appends.send()
	}
	if n.tasks {
		d.due.send()
	}
}

// clock is SQLite's clock in milliseconds. It does not change while a statement runs.
const clock = `cast(round(unixepoch('subsec') * 1000) as integer)`

func timeOf(ms int64) time.Time { return time.UnixMilli(ms).UTC() }

// storedMillis is a time that is stored in milliseconds; null is the zero time.
type storedMillis time.Time

// Scan implements sql.Scanner.
func (t *storedMillis) Scan(stored any) error {
	if ms, ok := stored.(int64); ok { // as nearly always
		*t = storedMillis(timeOf(ms))
		return nil
	}
	var ms sql.NullInt64
	err := ms.Scan(stored)
	if *t = (storedMillis{}); ms.Valid {
		*t = storedMillis(timeOf(ms.Int64))
	}
	return err
}

// scanTime returns where a column with a time goes.
func scanTime(to *time.Time) *storedMillis { return (*storedMillis)(to) }

// millis rounds up, so that a lease is never too short.
func millis(d time.Duration) int64 { return int64(math.Ceil(float64(d) / float64(time.Millisecond))) }

// signal is a channel that each send closes and replaces.
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
