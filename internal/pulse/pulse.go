// Package pulse records whether the loops of a service move.
package pulse

import (
	"sync"
	"sync/atomic"
	"time"
)

// Loops are the loops of a service. The zero value has none.
type Loops struct {
	mu  sync.Mutex
	all map[*Loop]string // the names; several loops may have the same one
}

// Loop is a loop, or a call that may not return. Any goroutine may call its methods. Those of a nil
// Loop do nothing.
type Loop struct {
	due atomic.Int64 // when it must move next, in Unix nanoseconds; 0: it waits for work
}

// Add adds a loop that waits for work.
func (l *Loops) Add(name string) *Loop {
	one := &Loop{}
	l.put(one, name)
	return one
}

// AddStuck adds a call that should have returned by now. ended reports whether it has: then it is not
// added. Call Remove after ended reports true.
func (l *Loops) AddStuck(call *Loop, name string, now time.Time, ended func() bool) {
	call.Within(now, 0)
	l.put(call, name)
	if ended() {
		l.Remove(call)
	}
}

func (l *Loops) put(one *Loop, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = map[*Loop]string{}
	}
	l.all[one] = name
}

// Remove removes a loop. It may have been removed before, or not been added.
func (l *Loops) Remove(one *Loop) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, one)
}

// End removes all loops. After an error, it adds one that is late from now on.
func (l *Loops) End(now time.Time, name string, err error) {
	l.mu.Lock()
	clear(l.all)
	l.mu.Unlock()
	if err != nil {
		l.Add(name).Within(now, 0)
	}
}

// Within says that the loop moves now, and that it will move again within d.
func (o *Loop) Within(now time.Time, d time.Duration) {
	if o != nil {
		o.due.Store(now.Add(d).UnixNano())
	}
}

// Rest says that the loop waits for work, for any time.
func (o *Loop) Rest() {
	if o != nil {
		o.due.Store(0)
	}
}

// Late returns for how long each loop should have moved, by name: zero if it is not late. Of loops
// with the same name, it returns the greatest.
func (l *Loops) Late(now time.Time) map[string]time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	late := make(map[string]time.Duration, len(l.all))
	for one, name := range l.all {
		d := time.Duration(0)
		if due := one.due.Load(); due > 0 {
			d = now.Sub(time.Unix(0, due))
		}
		late[name] = max(late[name], d)
	}
	return late
}
