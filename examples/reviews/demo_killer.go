package main

import "sync"

// killer decides when to kill a worker. It spreads the kills of a role over the role's work, and
// allows one at a time for each role.
type killer struct {
	planned map[role]int
	due     func(r role, kill, of int) bool // reports whether it is time for this kill; the first is 1

	mu      sync.Mutex
	counted map[role]int  // kills that hit work in flight
	missed  int           // kills that did not
	busy    map[role]bool // whether a kill is not resolved yet
}

func newKiller(planned map[role]int, due func(r role, kill, of int) bool) *killer {
	return &killer{planned: planned, due: due, counted: map[role]int{}, busy: map[role]bool{}}
}

// shouldKill reports whether to kill a worker of this role now. If it returns true, the caller must
// call resolve after the kill.
func (k *killer) shouldKill(r role) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.busy[r] || k.counted[r] >= k.planned[r] || !k.due(r, k.counted[r]+1, k.planned[r]) {
		return false
	}
	k.busy[r] = true
	return true
}

// resolve records whether a kill counts, and returns how many kills count so far.
func (k *killer) resolve(r role, counts bool) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy[r] = false
	if counts {
		k.counted[r]++
	} else {
		k.missed++
	}
	return k.total()
}

func (k *killer) total() (n int) {
	for _, c := range k.counted {
		n += c
	}
	return n
}
