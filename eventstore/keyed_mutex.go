package eventstore

import (
	"context"
	"sync"
)

// keyedMutex has one mutex per name in use.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*countedLock
}

// countedLock is locked while its channel, of size 1, is full.
type countedLock struct {
	locked chan struct{}
	users  int // goroutines that hold it or wait for it
}

// lock locks name. It reports false if ctx ends first.
func (m *keyedMutex) lock(ctx context.Context, name string) (unlock func(), ok bool) {
	m.mu.Lock()
	l := m.locks[name]
	if l == nil {
		if m.locks == nil {
			m.locks = map[string]*countedLock{}
		}
		l = &countedLock{locked: make(chan struct{}, 1)}
		m.locks[name] = l
	}
	l.users++
	m.mu.Unlock()
	select {
	case l.locked <- struct{}{}:
		return func() { <-l.locked; m.forget(name, l) }, true
	case <-ctx.Done():
		m.forget(name, l)
		return nil, false
	}
}

func (m *keyedMutex) forget(name string, l *countedLock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(m.locks, name)
	}
}
