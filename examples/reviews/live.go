package main

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

const (
	liveEvery     = 250 * time.Millisecond // how often an open page is rendered again
	liveHeartbeat = 15 * time.Second       // heartbeat that detects a dead connection
	liveLimit     = 10 * time.Second       // to write one event
	maxListeners  = 500                    // connections; browsers over the limit retry
	liveRender    = 5 * time.Second        // to render one page
	maxRenders    = 2                      // at the same time, for all pages: requests have priority
)

// live sends pages their changes as server-sent events. Each event is the whole live part of a
// page, so a page is correct after one event, even if it missed others. Connections to the same
// page share its reads of the database, which see the writes of all processes.
type live struct {
	render      func(context.Context, pageKey) ([]byte, error)
	done        <-chan struct{} // closed when the service stops
	renderSlots chan struct{}

	mu            sync.Mutex
	listeners     int
	subscriptions map[pageKey]*subscription
}

// subscription is one page and its listeners.
type subscription struct {
	stop      context.CancelFunc
	listeners int
	event     []byte        // the last event; nil before the first
	changed   chan struct{} // closed when event is replaced
}

func newLive(done <-chan struct{}, render func(context.Context, pageKey) ([]byte, error)) *live {
	return &live{render: render, done: done, renderSlots: make(chan struct{}, maxRenders), subscriptions: map[pageKey]*subscription{}}
}

func (l *live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream")
		return
	}
	key := pageKeyOf(r.URL.Query())
	sub := l.join(key)
	if sub == nil {
		answerError(w, r, &httpError{Status: http.StatusServiceUnavailable, Code: "too_many", Message: "too many live pages are open: try again later"})
		return
	}
	defer l.leave(key, sub)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	conn := http.NewResponseController(w)
	send := func(event []byte) bool {
		_ = conn.SetWriteDeadline(time.Now().Add(liveLimit)) // a wrapped writer may have no deadline
		_, err := w.Write(event)
		return err == nil && conn.Flush() == nil
	}
	if !send([]byte("retry: 1000\n\n")) {
		return
	}
	heartbeat := time.NewTicker(liveHeartbeat)
	defer heartbeat.Stop()
	for seen := (chan struct{})(nil); ; {
		event, changed := l.last(sub)
		if changed != seen && event != nil && !send(event) {
			return
		}
		seen = changed
		select {
		case <-changed:
		case <-heartbeat.C:
			if !send([]byte(": heartbeat\n\n")) {
				return
			}
		case <-r.Context().Done():
			return
		case <-l.done:
			return
		}
	}
}

func (l *live) last(sub *subscription) (event []byte, changed chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return sub.event, sub.changed
}

// join adds a listener to the subscription of a page. It returns nil if there are too many
// listeners.
func (l *live) join(key pageKey) *subscription {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listeners >= maxListeners {
		return nil
	}
	l.listeners++
	sub := l.subscriptions[key]
	if sub == nil {
		ctx, stop := context.WithCancel(context.Background())
		sub = &subscription{stop: stop, changed: make(chan struct{})}
		l.subscriptions[key] = sub
		go l.watch(ctx, key, sub)
	}
	sub.listeners++
	return sub
}

func (l *live) leave(key pageKey, sub *subscription) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners--
	if sub.listeners--; sub.listeners == 0 {
		sub.stop()
		delete(l.subscriptions, key)
	}
}

// watch renders a page at intervals and notifies the listeners of changes.
func (l *live) watch(ctx context.Context, key pageKey, sub *subscription) {
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		l.renderSlots <- struct{}{}
		limited, cancel := context.WithTimeout(ctx, liveRender)
		html, err := l.render(limited, key)
		cancel()
		<-l.renderSlots
		event := sse("page", html)
		if err != nil {
			event = sse("trouble", nil)
			if ctx.Err() == nil {
				slog.Debug("render page failed", "err", err)
			}
		}
		l.mu.Lock()
		if !bytes.Equal(event, sub.event) && ctx.Err() == nil {
			sub.event = event
			close(sub.changed)
			sub.changed = make(chan struct{})
		}
		l.mu.Unlock()
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// sse encodes a server-sent event: each line of data becomes a field.
func sse(name string, data []byte) []byte {
	var b bytes.Buffer
	b.WriteString("event: " + name + "\n")
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		b.WriteString("data: ")
		b.Write(bytes.ReplaceAll(line, []byte("\r"), []byte(" ")))
		b.WriteString("\n")
	}
	b.WriteString("\n")
	return b.Bytes()
}
