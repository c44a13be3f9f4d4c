package main

import (
	"maps"
	"sync"
)

// ledger is the account of all deliveries, kept outside of the processes that make them. It knows nothing of
// markers, tables or events: only of message ids, and of what was written down about them.
type ledger struct {
	mu sync.Mutex
	counts
	seen, acked map[string]bool
	open        map[place]*delivery // of the workers that live
	claims      map[place]bool      // entries that a relay has claimed and not begun to mark
	published   int                 // entries that one has
}

// place is a delivery, or an entry, and the worker that has it.
type place struct {
	worker string
	n      int64
}

// counts are what the ledger comes to.
type counts struct {
	Deliveries int // messages handed to a runner
	Duplicates int // those among them that had been handed to one before
	Injected   int // those that the repeater made
	Concurrent int // those whose unit of work was open at the same moment as another one of the same message
}

type delivery struct {
	worker     string
	message    string
	units      map[string]bool // the projectors whose unit of work is open
	handled    bool            // some handler has started
	concurrent bool
}

func newLedger() *ledger {
	return &ledger{seen: map[string]bool{}, acked: map[string]bool{}, open: map[place]*delivery{}, claims: map[place]bool{}}
}

// enter writes down a step of a worker.
func (l *ledger) enter(worker string, s step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := place{worker, s.delivery}
	switch s.kind {
	case received:
		l.receive(at, s)
		return
	case claimed:
		l.claims[at] = true
		return
	case marking:
		if l.claims[at] {
			delete(l.claims, at)
			l.published++
		}
		return
	}
	d := l.open[at]
	if d == nil {
		return // a worker that lies about its deliveries proves nothing: nothing is counted
	}
	switch s.kind {
	case begun:
		l.overlap(d, s.what)
		d.units[s.what] = true
	case running:
		d.handled = true
	case ended:
		delete(d.units, s.what)
	case acking:
		l.acked[d.message] = true
		delete(l.open, at)
	}
}

func (l *ledger) receive(at place, s step) {
	l.open[at] = &delivery{worker: at.worker, message: s.what, units: map[string]bool{}}
	l.Deliveries++
	if l.seen[s.what] {
		l.Duplicates++
	}
	l.seen[s.what] = true
	if s.copy != firstCopy {
		l.Injected++
	}
}

// overlap counts d if another delivery of the same message has a unit open at the same projector. It must be
// of the same worker: what two of them write down comes in no common order.
func (l *ledger) overlap(d *delivery, projector string) {
	if d.concurrent {
		return
	}
	for _, other := range l.open {
		if other != d && other.worker == d.worker && other.message == d.message && other.units[projector] {
			d.concurrent = true
			l.Concurrent++
			return
		}
	}
}

// underway tells whether a worker is between some handler's start and the ack of its message.
func (l *ledger) underway(worker string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at, d := range l.open {
		if at.worker == worker && d.handled {
			return true
		}
	}
	return false
}

// relaying tells whether a worker is between the claim of some entry and its mark.
func (l *ledger) relaying(worker string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := range l.claims {
		if at.worker == worker {
			return true
		}
	}
	return false
}

// died closes the account of a worker: its deliveries will not be acked, nor its entries marked.
func (l *ledger) died(worker string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.open, func(at place, _ *delivery) bool { return at.worker == worker })
	maps.DeleteFunc(l.claims, func(at place, _ bool) bool { return at.worker == worker })
}

// publishedEntries is how many entries have been published at least once.
func (l *ledger) publishedEntries() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.published
}

// ackedMessages is how many messages have been acked at least once.
func (l *ledger) ackedMessages() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acked)
}

func (l *ledger) total() counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts
}
