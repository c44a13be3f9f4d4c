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
	liveEvery  = 250 * time.Millisecond // how often a page that somebody looks at is rendered anew
	liveBeat   = 15 * time.Second       // a sign of life, so that a dead connection is noticed
	liveLimit  = 10 * time.Second       // for one event to get through
	listeners  = 500                    // connections; browsers come again where there are too many
	liveRender = 5 * time.Second
	renderers  = 2 // at the same moment, however many spots are looked at: requests come first
)

// live tells pages when they have changed, as server-sent events: each event is the whole live part, so that a
// page is right again with the first one, whatever it missed. Pages that show the same spot share one look at
// the database, which sees what any process has written.
type live struct {
	render func(context.Context, spot) ([]byte, error)
	done   <-chan struct{} // closed when the service stops
	turns  chan struct{}

	mu        sync.Mutex
	listeners int
	feeds     map[spot]*feed
}

// feed is one spot for those who look at it.
type feed struct {
	stop      context.CancelFunc
	listeners int
	event     []byte        // the last one; nil before the first
	changed   chan struct{} // closed when event is replaced
}

func newLive(done <-chan struct{}, render func(context.Context, spot) ([]byte, error)) *live {
	return &live{render: render, done: done, turns: make(chan struct{}, renderers), feeds: map[spot]*feed{}}
}

func (l *live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream")
		return
	}
	at := spotOf(r.URL.Query())
	f := l.join(at)
	if f == nil {
		answerError(w, r, &httpError{Status: http.StatusServiceUnavailable, Code: "too_many", Message: "too many pages are open"})
		return
	}
	defer l.leave(at, f)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	conn := http.NewResponseController(w)
	send := func(event []byte) bool {
		_ = conn.SetWriteDeadline(time.Now().Add(liveLimit)) // where a wrapper has no deadline there is none
		_, err := w.Write(event)
		return err == nil && conn.Flush() == nil
	}
	if !send([]byte("retry: 1000\n\n")) {
		return
	}
	beat := time.NewTicker(liveBeat)
	defer beat.Stop()
	for seen := (chan struct{})(nil); ; {
		event, changed := l.last(f)
		if changed != seen && event != nil && !send(event) {
			return
		}
		seen = changed
		select {
		case <-changed:
		case <-beat.C:
			if !send([]byte(": still here\n\n")) {
				return
			}
		case <-r.Context().Done():
			return
		case <-l.done:
			return
		}
	}
}

func (l *live) last(f *feed) (event []byte, changed chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return f.event, f.changed
}

// join returns the feed of a spot, nil where there are too many listeners.
func (l *live) join(at spot) *feed {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listeners >= listeners {
		return nil
	}
	l.listeners++
	f := l.feeds[at]
	if f == nil {
		ctx, stop := context.WithCancel(context.Background())
		f = &feed{stop: stop, changed: make(chan struct{})}
		l.feeds[at] = f
		go l.watch(ctx, at, f)
	}
	f.listeners++
	return f
}

func (l *live) leave(at spot, f *feed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners--
	if f.listeners--; f.listeners == 0 {
		f.stop()
		delete(l.feeds, at)
	}
}

// watch renders a spot again and again, and tells when it has changed.
func (l *live) watch(ctx context.Context, at spot, f *feed) {
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		l.turns <- struct{}{}
		limited, cancel := context.WithTimeout(ctx, liveRender)
		html, err := l.render(limited, at)
		cancel()
		<-l.turns
		event := sse("page", html)
		if err != nil {
			event = sse("trouble", nil)
			if ctx.Err() == nil {
				slog.Debug("render a page", "err", err)
			}
		}
		l.mu.Lock()
		if !bytes.Equal(event, f.event) && ctx.Err() == nil {
			f.event = event
			close(f.changed)
			f.changed = make(chan struct{})
		}
		l.mu.Unlock()
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// sse is a server-sent event: each line of its data has a field of its own.
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
