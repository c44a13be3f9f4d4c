package unit

import (
	"context"
	"sync"
	"time"
)

// deadline is a context like that of context.WithTimeout. It starts a timer only if Done is called: many
// handlers only queue commands, and the timers took more than half of the time of such a unit.
type deadline struct {
	context.Context // of the unit
	at              time.Time

	mu    sync.Mutex
	timed context.Context // nil until Done is called
	stop  context.CancelFunc
	err   error // if timed is nil; it stays the same
}

func withDeadline(parent context.Context, after time.Duration) *deadline {
	return &deadline{Context: parent, at: time.Now().Add(after)} //nolint:forbidigo // contexts have the time of this process
}

// end ends the context. It returns the error that the context had before.
func (d *deadline) end() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timed != nil {
		err = d.timed.Err()
		d.stop()
	} else if err = d.untimed(); err == nil {
		d.err = context.Canceled
	}
	return err
}

// untimed returns the error while timed is nil.
func (d *deadline) untimed() error {
	if d.err == nil {
		d.err = d.Context.Err()
	}
	if d.err == nil && !time.Now().Before(d.at) { //nolint:forbidigo // as above
		d.err = context.DeadlineExceeded
	}
	return d.err
}

func (d *deadline) Deadline() (time.Time, bool) {
	if at, has := d.Context.Deadline(); has && at.Before(d.at) {
		return at, true
	}
	return d.at, true
}

var closed = make(chan struct{})

func init() { close(closed) }

func (d *deadline) Done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timed == nil {
		if d.untimed() != nil {
			return closed
		}
		d.timed, d.stop = context.WithDeadline(d.Context, d.at)
	}
	return d.timed.Done()
}

func (d *deadline) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timed != nil {
		return d.timed.Err()
	}
	return d.untimed()
}

// Value returns that of timed if there is one, so that contexts derived from this one end with it
// without goroutines of their own.
func (d *deadline) Value(key any) any {
	d.mu.Lock()
	of := d.timed
	d.mu.Unlock()
	if of == nil {
		of = d.Context
	}
	return of.Value(key)
}
