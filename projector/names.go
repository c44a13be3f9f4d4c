package projector

import (
	"context"
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
	under   map[nameKey]int // how many here are at it
	done    []Attempt       // named once, and no longer under way: not told yet
	alive   time.Time       // until when the journal takes the runner for alive
}

type nameKey struct{ handler, message string }

// naming is one statement's work.
type naming struct {
	attempts []Attempt
	verdicts []Verdict
	errs     []error
	ran      chan struct{}
}

func (a Attempt) name() nameKey { return nameKey{a.Handler, a.MessageID} }

// begin gives the verdict on a, which is named and under way if it is clear: then end must follow.
func (n *names) begin(ctx context.Context, a Attempt) (Verdict, error) {
	n.mu.Lock()
	if n.waiting == nil {
		n.waiting = &naming{ran: make(chan struct{})}
	}
	c, i := n.waiting, len(n.waiting.attempts)
	c.attempts, c.verdicts, c.errs = append(c.attempts, a), append(c.verdicts, Held), append(c.errs, nil)
	n.under[a.name()]++
	n.mu.Unlock()
	select {
	case n.turn <- struct{}{}:
		n.run(ctx, c)
		<-n.turn
	case <-c.ran:
	}
	if c.errs[i] != nil {
		n.leave(a, true) // it may be named
		return Held, c.errs[i]
	}
	if c.verdicts[i] != Clear {
		n.leave(a, false)
	}
	return c.verdicts[i], nil
}

// end tells that a, which was clear, is no longer under way; named tells whether the journal has yet to know.
func (n *names) end(a Attempt, named bool) { n.leave(a, named) }

func (n *names) leave(a Attempt, named bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.under[a.name()]--; n.under[a.name()] > 0 {
		return
	}
	delete(n.under, a.name())
	if named {
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
	verdicts, err := n.tell(ctx, c.attempts)
	if err == nil {
		copy(c.verdicts, verdicts)
		return
	}
	for i := range c.attempts {
		if c.errs[i] = err; len(c.attempts) > 1 && ClassOf(err) == PermanentClass { // it is the fault of one of them
			if verdicts, c.errs[i] = n.tell(ctx, c.attempts[i:i+1]); c.errs[i] == nil {
				c.verdicts[i] = verdicts[0]
			}
		}
	}
}

// tell names attempts, and takes back what is done. Whoever calls it has the turn.
func (n *names) tell(ctx context.Context, attempts []Attempt) ([]Verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	if err := n.live(ctx, n.lease/2); err != nil {
		return nil, err
	}
	done := n.takeDone()
	verdicts, err := n.journal.Begin(ctx, n.runner, attempts, done)
	if err != nil {
		err = away(err)
		n.mu.Lock()
		n.done = append(n.done, done...)
		n.mu.Unlock()
	}
	return verdicts, err
}

// away makes what is not known to be anybody's fault the world's: a journal's errors say nothing against a message.
func away(err error) error {
	if ClassOf(err) == UnknownClass {
		return &Error{Class: Transient, Code: codeOf(err), Err: err}
	}
	return err
}

// takeDone is what may be taken back: nobody here is at it again.
func (n *names) takeDone() (done []Attempt) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.done {
		if n.under[a.name()] == 0 {
			done = append(done, a)
		}
	}
	n.done = nil
	return done
}

// live sees to it that the journal takes the runner for alive for at least this long. Whoever calls it has the turn.
func (n *names) live(ctx context.Context, left time.Duration) error {
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
	if err = n.live(ctx, n.lease/2); err == nil {
		n.mu.Lock()
		n.under[a.name()]++
		n.mu.Unlock()
		attempts, alive, err = n.journal.BeginAlone(ctx, n.runner, a, limit)
		if named = err == nil && (limit < 0 || attempts+alive < limit); !named {
			n.leave(a, err != nil)
		}
	}
	if err != nil {
		err = away(err)
	}
	return attempts, alive, named, err
}

// beat keeps the runner alive while something is under way, and takes back the last names once nothing is.
func (n *names) beat(ctx context.Context) {
	n.mu.Lock()
	under, done := len(n.under), len(n.done)
	n.mu.Unlock()
	select {
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
	case <-ctx.Done():
		return
	}
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	switch { // an error is met again, and reported, by who begins next
	case under > 0:
		_ = n.live(ctx, n.lease*2/3)
	case done > 0:
		_, _ = n.tell(ctx, nil)
	}
}

// stop tells that the runner has ended, if anything may be named.
func (n *names) stop(ctx context.Context) {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	n.mu.Lock()
	said := !n.alive.IsZero() && len(n.under) == 0 // else it lives on for as long as its lease
	n.mu.Unlock()
	if said {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.timeout)
		defer cancel()
		_ = n.journal.Alive(ctx, n.runner, 0) // unsaid, its lease ends by itself
	}
}
