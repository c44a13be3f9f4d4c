package eventstore

import (
	"context"
	"sync"
)

// queue lets those in that give the same name one after another.
type queue struct {
	mu    sync.Mutex
	turns map[string]*turn
}

// turn is of size 1: whoever has put something in it has it.
type turn struct {
	taken chan struct{}
	users int // those that have it or wait for it
}

// enter waits for its turn; not ok: until the end of ctx.
func (q *queue) enter(ctx context.Context, name string) (leave func(), ok bool) {
	q.mu.Lock()
	t := q.turns[name]
	if t == nil {
		if q.turns == nil {
			q.turns = map[string]*turn{}
		}
		t = &turn{taken: make(chan struct{}, 1)}
		q.turns[name] = t
	}
	t.users++
	q.mu.Unlock()
	select {
	case t.taken <- struct{}{}:
		return func() { <-t.taken; q.forget(name, t) }, true
	case <-ctx.Done():
		q.forget(name, t)
		return nil, false
	}
}

func (q *queue) forget(name string, t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(q.turns, name)
	}
}
