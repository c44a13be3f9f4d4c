package task

import (
	"context"
	"sync"
	"time"
)

// grace is how long a handler may take to return after its context has ended.
const grace = 2 * time.Second

// limit ends the context of a handler that takes too long. The time between two calls of start or
// pause counts, not that of the whole run.
type limit struct {
	timeout time.Duration
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	stuck   chan struct{} // closed if the handler does not return
	once    sync.Once     // closes stuck

	mu      sync.Mutex
	due     time.Time // zero while paused
	handler bool      // the time is that of the handler, not of the database
	ended   bool
}

func newLimit(timeout time.Duration, cancel context.CancelCauseFunc) *limit {
	l := &limit{timeout: timeout, cancel: cancel, stuck: make(chan struct{}), handler: true, due: now().Add(timeout)}
	l.timer = time.AfterFunc(timeout, l.end)
	return l
}

// end ends the context, unless the limit was paused or started again while its timer fired.
func (l *limit) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.due.IsZero() || now().Before(l.due) {
		return
	}
	l.ended = true
	if l.handler {
		l.cancel(errDeadline)
	} else {
		l.cancel(context.Canceled)
	}
	time.AfterFunc(grace, l.abandon)
}

func (l *limit) abandon() { l.once.Do(func() { close(l.stuck) }) }

// start gives the handler the whole timeout from now on.
func (l *limit) start() { l.again(true) }

// database gives the database the whole timeout from now on.
func (l *limit) database() { l.again(false) }

func (l *limit) again(handler bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.handler, l.due = handler, now().Add(l.timeout)
	l.timer.Reset(l.timeout)
}

// pause stops the time. The context does not end after it has returned.
func (l *limit) pause() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Time{}
	l.timer.Stop()
}

// now measures durations.
func now() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times
