package projector

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// names keeps the journal told of what a runner has under way. Attempts that begin while a statement is under way
// share the next one.
type names struct {
	journal Journal
	runner  string
	lease   time.Duration
	timeout time.Duration // of a statement
	clock   func() time.Time

	turn    chan struct{} // of size 1: held by whoever talks to the journal
	mu      sync.Mutex
	waiting *naming
	under   map[nameKey]int  // how many here are at it, or ask whether they may be
	named   map[nameKey]int  // how many of these are at it
	parking map[nameKey]bool // of these, what is about to be parked
	done    []Attempt        // that may be named, and are no longer under way: not told yet

	lives chan struct{} // of size 1: held by whoever looks at alive
	alive time.Time     // until when the journal takes the runner for alive
}

type nameKey struct{ projector, handler, message string }

// naming is one statement's work.
type naming struct {
	attempts []Attempt
	verdicts []Verdict
	err      error
	ran      chan struct{}
}

func (a Attempt) name() nameKey { return nameKey{a.Projector, a.Handler, a.MessageID} }

// begin gives the verdict on a, which is named and under way if it is clear: then end must follow.
func (n *names) begin(ctx context.Context, a Attempt) (Verdict, error) {
	n.mu.Lock()
	if n.parking[a.name()] {
		n.mu.Unlock()
		return Clear, errParking
	}
	if n.named[a.name()] > 0 { // delivered twice to this runner
		n.under[a.name()]++
		n.named[a.name()]++
		n.mu.Unlock()
		return Clear, nil
	}
	if n.waiting == nil {
		n.waiting = &naming{ran: make(chan struct{})}
	}
	c, i := n.waiting, len(n.waiting.attempts)
	c.attempts, c.verdicts = append(c.attempts, a), append(c.verdicts, Held)
	n.under[a.name()]++
	n.mu.Unlock()
	select {
	case n.turn <- struct{}{}:
		n.run(ctx, c)
		<-n.turn
	case <-c.ran:
	}
	v, err := c.verdicts[i], c.err
	n.judged(a, err == nil && v == Clear)
	return v, err
}

var errParking = &lost{&Error{Class: Transient, Code: "parking", Err: errors.New("another delivery of it is about to be parked")}}

// park has other deliveries of a, which is under way, wait for what becomes of it.
func (n *names) park(a Attempt) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.named[a.name()] > 0 {
		n.parking[a.name()] = true
	}
}

// judged tells whether a is under way now.
func (n *names) judged(a Attempt, clear bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.named[a.name()]++; !clear {
		n.leave(a, true) // it may be named: after an error, or since an earlier attempt
	}
}

// end tells that a, which was clear, is no longer under way; named tells whether the journal has yet to know.
func (n *names) end(a Attempt, named bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leave(a, named)
}

// count counts an attempt at a. Where named, it is the one that began here and has ended: the name goes with the count, unless
// somebody else has its row just now, so that it is told once more like others that are done. Where the count is spent, it is still
// named, and under way: end must follow.
func (n *names) count(ctx context.Context, a Attempt, named bool, limit int) (attempts int, spent bool, err error) {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	runner := ""
	if named {
		n.mu.Lock()
		if n.leave(a, true); n.under[a.name()] == 0 { // else another delivery may be named already
			runner = n.runner
		}
		n.mu.Unlock()
	}
	if attempts, err = n.journal.CountAttempt(ctx, runner, a, limit); err != nil {
		return 0, false, away(err)
	}
	if spent = runner != "" && limit >= 0 && attempts >= limit; spent {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.under[a.name()]++
		n.named[a.name()]++
		n.done = slices.DeleteFunc(n.done, func(d Attempt) bool { return d.name() == a.name() })
	}
	return attempts, spent, nil
}

func (n *names) leave(a Attempt, named bool) {
	k := a.name()
	if n.named[k]--; n.named[k] == 0 {
		delete(n.named, k)
		delete(n.parking, k)
	}
	if n.under[k]--; n.under[k] == 0 {
		delete(n.under, k)
	}
	if named && n.named[k] == 0 {
		n.done = append(n.done, a)
	}
}

// run makes the statement of c, unless somebody has.
func (n *names) run(ctx context.Context, c *naming) {
	n.mu.Lock()
	if n.waiting != c {
		n.mu.Unlock()
		return
	}
	n.waiting = nil
	n.mu.Unlock()
	defer close(c.ran)
	if verdicts, err := n.tell(ctx, c.attempts); err != nil {
		c.err = err
	} else {
		c.verdicts = verdicts
	}
}

// tell names attempts, and takes back what is done. Whoever calls it has the turn.
func (n *names) tell(ctx context.Context, attempts []Attempt) ([]Verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	if err := n.live(ctx, n.lease/2); err != nil {
		return nil, err
	}
	done := n.takeDone(attempts)
	verdicts, err := n.journal.Begin(ctx, n.runner, attempts, done)
	if err != nil {
		err = away(err)
		n.mu.Lock()
		n.done = append(n.done, done...)
		n.mu.Unlock()
	}
	return verdicts, err
}

// lost is an error of the journal's: it says nothing against a message.
type lost struct{ err error }

func (l *lost) Error() string { return l.err.Error() }
func (l *lost) Unwrap() error { return l.err }

// away is a journal's error as that of a unit: the world's fault, whatever it is.
func away(err error) error {
	if class := ClassOf(err); class == Transient || class == Shutdown {
		return &lost{err}
	}
	return &lost{&Error{Class: Transient, Code: codeOf(err), Err: err}}
}

// takeDone is what may be taken back: nobody here is at it, but for those who ask for it with the same statement.
func (n *names) takeDone(asked []Attempt) (done []Attempt) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.done) == 0 {
		return nil
	}
	asking := map[nameKey]int{}
	for _, a := range asked {
		asking[a.name()]++
	}
	var later []Attempt
	for _, a := range n.done {
		if n.under[a.name()] == asking[a.name()] {
			done = append(done, a)
		} else {
			later = append(later, a)
		}
	}
	n.done = later
	return done
}

// live sees to it that the journal takes the runner for alive for at least this long.
func (n *names) live(ctx context.Context, left time.Duration) error {
	n.lives <- struct{}{}
	defer func() { <-n.lives }()
	now := n.clock()
	if n.alive.Sub(now) >= left {
		return nil
	}
	if err := n.journal.Alive(ctx, n.runner, n.lease); err != nil {
		return away(err)
	}
	n.alive = now.Add(n.lease)
	return nil
}

// beginAlone is Journal.BeginAlone. Where it is named, end must follow.
func (n *names) beginAlone(ctx context.Context, a Attempt, limit int) (attempts, alive int, named bool, err error) {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	if err := n.live(ctx, n.lease/2); err != nil {
		return 0, 0, false, err
	}
	n.mu.Lock()
	n.under[a.name()]++
	n.mu.Unlock()
	attempts, alive, err = n.journal.BeginAlone(ctx, n.runner, a, limit)
	named = err == nil && (limit < 0 || attempts+alive < limit)
	n.judged(a, named)
	if err != nil {
		err = away(err)
	}
	return attempts, alive, named, err
}

// beat keeps the runner alive while something is under way, and takes names back where no attempt does.
func (n *names) beat(ctx context.Context) {
	n.mu.Lock()
	under, done := len(n.under), len(n.done)
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	if under > 0 { // an error is met again, and reported, by who begins next
		_ = n.live(ctx, n.lease*2/3)
	}
	if done > 0 {
		select {
		case n.turn <- struct{}{}:
			_, _ = n.tell(ctx, nil)
			<-n.turn
		default: // whoever has the turn tells it
		}
	}
}

// keepAlive beats until stop is called, which returns when it has ended.
func (n *names) keepAlive() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var beats sync.WaitGroup
	beats.Go(func() { every(ctx, min(n.lease/3, time.Second), func() { n.beat(ctx) }) })
	return func() {
		cancel()
		beats.Wait()
	}
}

// isUnder tells whether p is under way here, as one that its handler never returned from is.
func (n *names) isUnder(p Parked) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.under[nameKey{p.Projector, p.Handler, p.MessageID}] > 0
}

// stop tells that the runner has ended, unless something is under way still: then it lives on for as long as its lease.
func (n *names) stop(ctx context.Context) {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.timeout)
	defer cancel()
	n.mu.Lock()
	under, done := len(n.under), len(n.done)
	n.mu.Unlock()
	if under > 0 && done > 0 { // what is not under way is nobody's suspect
		_, _ = n.tell(ctx, nil)
	}
	n.lives <- struct{}{}
	defer func() { <-n.lives }()
	if n.alive.IsZero() || under > 0 {
		return
	}
	n.alive = time.Time{}
	_ = n.journal.Alive(ctx, n.runner, 0) // unsaid, its lease ends by itself
}
