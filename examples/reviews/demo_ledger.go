package main

import "sync"

// ledger is the account of all deliveries, kept outside of the processes that make them. It knows nothing of
// markers, tables or events: only of message ids, and of what was written down about them.
type ledger struct {
	mu sync.Mutex
	counts
	seen, acked map[string]bool
	open        map[int64]*delivery // of the worker that lives
}

// counts are what the ledger comes to.
type counts struct {
	Deliveries int // messages handed to a runner
	Duplicates int // those among them that had been handed to one before
	Injected   int // those that the repeater made
	Concurrent int // those whose unit of work was open at the same moment as another one of the same message
}

type delivery struct {
	message    string
	units      map[string]bool // the projectors whose unit of work is open
	handled    bool            // some handler has started
	concurrent bool
}

func newLedger() *ledger {
	return &ledger{seen: map[string]bool{}, acked: map[string]bool{}, open: map[int64]*delivery{}}
}

// enter writes a step down.
func (l *ledger) enter(s step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.kind == received {
		l.receive(s)
		return
	}
	d := l.open[s.delivery]
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
		delete(l.open, s.delivery)
	}
}

func (l *ledger) receive(s step) {
	l.open[s.delivery] = &delivery{message: s.what, units: map[string]bool{}}
	l.Deliveries++
	if l.seen[s.what] {
		l.Duplicates++
	}
	l.seen[s.what] = true
	if s.copy != firstCopy {
		l.Injected++
	}
}

// overlap counts d if another delivery of the same message has a unit open at the same projector.
func (l *ledger) overlap(d *delivery, projector string) {
	if d.concurrent {
		return
	}
	for _, other := range l.open {
		if other != d && other.message == d.message && other.units[projector] {
			d.concurrent = true
			l.Concurrent++
			return
		}
	}
}

// underway tells whether the worker is between some handler's start and the ack of its message.
func (l *ledger) underway() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.open {
		if d.handled {
			return true
		}
	}
	return false
}

// died closes the account of a worker: its deliveries will not be acked.
func (l *ledger) died() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.open)
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
