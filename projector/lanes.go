package projector

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
)

// lanes runs what one feed delivers: messages of one key one after another, in the order in which they were read,
// and those of different keys at once, up to a bound.
type lanes struct {
	free chan struct{} // a place for each message that may be in flight
	mu   sync.Mutex
	last map[string]chan struct{} // by key: closed when the last message of it that was read is done with
	all  sync.WaitGroup
}

func newLanes(n int) *lanes {
	return &lanes{free: make(chan struct{}, n), last: map[string]chan struct{}{}}
}

// enter takes a place, before a message is read. It returns false when ctx has ended.
func (l *lanes) enter(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case l.free <- struct{}{}:
		return true
	}
}

// leave gives a place back.
func (l *lanes) leave() { <-l.free }

// run runs work in the lane of m, and gives the place back after it.
func (l *lanes) run(m *message.Message, work func()) {
	key := laneOf(m)
	before, done := l.queue(key)
	l.all.Go(func() {
		defer l.leave()
		defer l.unqueue(key, done)
		if before != nil {
			<-before
		}
		work()
	})
}

// queue is the end of what is before in the lane, nil for nothing, and what to close at one's own.
func (l *lanes) queue(key string) (before, done chan struct{}) {
	done = make(chan struct{})
	if key == "" {
		return nil, done // it waits for nobody, and nobody for it
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.last[key]
	l.last[key] = done
	return before, done
}

func (l *lanes) unqueue(key string, done chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last[key] == done {
		delete(l.last, key)
	}
	close(done)
}

// laneOf is a message's ordering key, or its stream where it has none; of one that has neither, nothing.
func laneOf(m *message.Message) string {
	if key := m.Metadata[outbox.HeaderKey]; key != "" {
		return key
	}
	return m.Metadata[outbox.HeaderStream]
}
