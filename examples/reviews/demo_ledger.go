package main

import (
	"maps"
	"sync"
)

// ledger records all deliveries, outside the processes that make them. It uses only message ids and
// the steps in the trace: no markers, tables or events.
type ledger struct {
	mu sync.Mutex
	counts
	seen, acked map[string]bool
	open        map[itemKey]*delivery // deliveries of the running workers
	claims      map[itemKey]bool      // entries that a relay has claimed and not yet marked
	published   int                   // entries that a relay has begun to mark
}

// itemKey identifies a delivery or an outbox entry of a worker.
type itemKey struct {
	worker string
	n      int64
}

// counts are the totals of the ledger.
type counts struct {
	Deliveries int // messages handed to a runner
	Duplicates int // deliveries of a message that was handed to a runner before
	Injected   int // deliveries of copies made by the repeater
	Concurrent int // deliveries whose unit of work overlapped another one of the same message
}

type delivery struct {
	worker     string
	message    string
	units      map[string]bool // the projectors whose unit of work is open
	handled    bool            // a handler has started
	concurrent bool
}

func newLedger() *ledger {
	return &ledger{seen: map[string]bool{}, acked: map[string]bool{}, open: map[itemKey]*delivery{}, claims: map[itemKey]bool{}}
}

// record records a step of a worker.
func (l *ledger) record(worker string, s step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := itemKey{worker, s.delivery}
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
		return // a step of an unknown delivery is not counted
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

func (l *ledger) receive(at itemKey, s step) {
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

// overlap counts d as concurrent if another delivery of the same message has an open unit of the
// same projector. Only deliveries of one worker are compared: the traces of two workers have no
// common order.
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

// inFlight reports whether a worker has started a handler and not yet acked its message.
func (l *ledger) inFlight(worker string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at, d := range l.open {
		if at.worker == worker && d.handled {
			return true
		}
	}
	return false
}

// hasClaim reports whether a worker has claimed an entry and not yet marked it.
func (l *ledger) hasClaim(worker string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := range l.claims {
		if at.worker == worker {
			return true
		}
	}
	return false
}

// workerDied removes the open deliveries and claims of a worker.
func (l *ledger) workerDied(worker string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.open, func(at itemKey, _ *delivery) bool { return at.worker == worker })
	maps.DeleteFunc(l.claims, func(at itemKey, _ bool) bool { return at.worker == worker })
}

// publishedEntries returns how many entries have been published at least once.
func (l *ledger) publishedEntries() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.published
}

// ackedMessages returns how many messages have been acked at least once.
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
