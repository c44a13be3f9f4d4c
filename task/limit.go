package task

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// grace is how long a handler may take to return after its context has ended.
const grace = 2 * time.Second

// limit ends the context of a handler that takes too long. The time between two calls of start or
// pause counts, not that of the whole run.
type limit struct {
	timeout time.Duration
	timer   *time.Timer
	handler atomic.Bool   // the time is that of the handler, not of the database
	stuck   chan struct{} // closed if the handler does not return
	once    sync.Once     // closes stuck
}

// newLimit returns a limit that has started.
func newLimit(timeout time.Duration, cancel context.CancelCauseFunc) *limit {
	l := &limit{timeout: timeout, stuck: make(chan struct{})}
	l.handler.Store(true)
	ended := atomic.Bool{}
	l.timer = time.AfterFunc(timeout, func() {
		if !ended.CompareAndSwap(false, true) {
			return
		}
		if l.handler.Load() {
			cancel(errDeadline)
		} else {
			cancel(context.Canceled)
		}
		time.AfterFunc(grace, l.abandon)
	})
	return l
}

// abandon ends the wait for the handler.
func (l *limit) abandon() { l.once.Do(func() { close(l.stuck) }) }

// start gives the handler the whole timeout from now on.
func (l *limit) start() {
	l.handler.Store(true)
	l.timer.Reset(l.timeout)
}

// database gives the database the whole timeout from now on.
func (l *limit) database() {
	l.handler.Store(false)
	l.timer.Reset(l.timeout)
}

// pause stops the time.
func (l *limit) pause() { l.timer.Stop() }

// now measures durations.
func now() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times
