package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"
)

// grace is what a handler has to return after its context has ended, before it is left to itself.
const grace = 2 * time.Second

// tries are the attempts of one delivery at one handler.
type tries struct {
	*delivery
	handler  *bound
	attempt  Attempt
	attempts int             // counted ones, by any process, as far as is known
	stuck    <-chan struct{} // an attempt that has not returned: closed when it does
	named    bool            // the last one has failed, and is still named: count, park or release follows
}

// count counts the last one.
func (t *tries) count() error {
	named := t.named
	t.named = false
	n, spent, err := t.names.count(context.WithoutCancel(t.msg.Context()), t.attempt, named, t.cfg.Retry.Attempts)
	if err == nil {
		t.attempts, t.named = n, spent
	}
	return err
}

// park parks the message, after so many attempts, and with it the last one's name goes. Where it cannot be, since the runner stops,
// the name stays: it is counted as that of a dead runner.
func (t *tries) park(attempts int, cause error) bool {
	if t.named {
		t.names.park(t.attempt)
	}
	parked, acked := t.delivery.park(t.handler, attempts, cause)
	if !parked {
		t.named = false
	}
	t.release()
	return acked
}

// release is for the last one where it does not count.
func (t *tries) release() {
	if t.named {
		t.named = false
		t.names.end(t.attempt, true)
	}
}

// once brings the message through the handler a single time, if it may: Clear says that it was tried, with what error; Suspect
// that it has ended too many processes to be tried again, as an error. replay is the parked message, if it is one.
func (t *tries) once(replay *Replay) (Verdict, error) {
	if t.stuck != nil {
		if err := t.await(); err != nil {
			return Clear, err
		}
	}
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, t.cfg.Lease/20) {
		t.apart.RLock()
		v, err := t.names.begin(t.hard, t.attempt)
		if err == nil && v == Clear {
			defer t.apart.RUnlock()
			return Clear, t.run(replay)
		}
		t.apart.RUnlock()
		if err != nil || v != Suspect {
			return v, err
		}
		if v, tried, err := t.suspect(replay); tried {
			return v, err
		}
		if rest(t.ctx, wait); t.ctx.Err() != nil {
			return Clear, &Error{Class: Shutdown, Err: t.ctx.Err()}
		}
	}
}

// suspect is once for a message that another runner has named, if it can be now. One that lives may well have it too,
// delivered twice: then it runs like any other. Else it runs alone; and while it cannot be told how many processes it has
// ended, because they may live, it has to wait.
func (t *tries) suspect(replay *Replay) (v Verdict, tried bool, err error) {
	limit := t.cfg.Retry.Attempts
	if limit == 1 {
		limit = 2 // one end of a process may be its neighbour's doing
	}
	attempts, alive, _, err := t.names.beginAlone(t.hard, t.attempt, 0) // to ask
	switch {
	case err != nil:
		return Clear, true, err
	case limit >= 0 && attempts >= limit:
		t.attempts = attempts
		return Suspect, true, &Error{Class: UnknownClass, Code: "vanished", Err: fmt.Errorf("of %d attempts, one at least ended with its process", attempts)}
	case limit >= 0 && attempts+alive >= limit:
		return Clear, false, nil
	case attempts == 0 && alive == 1:
		t.apart.RLock()
		defer t.apart.RUnlock()
	default:
		t.apart.Lock()
		defer t.apart.Unlock()
		// It may have been parked, or skipped, while this waited.
		if v, err := t.names.begin(t.hard, t.attempt); err != nil || v != Suspect {
			if err == nil && v == Clear {
				err = t.run(replay)
			}
			return v, true, err
		}
	}
	attempts, _, named, err := t.names.beginAlone(t.hard, t.attempt, limit)
	if err != nil || !named {
		return Clear, err != nil, err
	}
	t.attempts = max(attempts, 1) // there may be some to forget
	return Clear, true, t.run(replay)
}

// await gives an attempt that went on after its end the time of another, which counts like one: to run a second beside it
// would only take a further goroutine.
func (t *tries) await() error {
	limit := time.NewTimer(t.cfg.Timeout)
	defer limit.Stop()
	select {
	case <-t.stuck:
		t.stuck = nil
		return nil
	case <-t.ctx.Done():
		return &Error{Class: Shutdown, Err: t.ctx.Err()}
	case <-limit.C:
		return errStuck
	}
}

var (
	errStuck  = &Error{Class: UnknownClass, Code: "stuck", Err: errors.New("the handler has not returned after its deadline")}
	errGoexit = &Error{Class: UnknownClass, Code: "goexit", Err: errors.New("the handler called runtime.Goexit")}
)

// run runs the handler's unit of work once, in a goroutine of its own, so that a handler that panics or
// calls runtime.Goexit ends its own attempt and nothing else, and one that never returns is left behind. Its context
// knows the message's values but not the end of the message's context, which some subscribers cancel at once when
// they close.
func (t *tries) run(replay *Replay) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.msg.Context()))
	defer context.AfterFunc(t.hard, cancel)()
	limit := newDeadline(t.cfg.Timeout, cancel)
	w := Work{Projector: t.member.name, Done: []Attempt{t.attempt}, Runner: t.names.runner}
	if t.attempts > 0 {
		w.Forget = []Attempt{t.attempt}
	}
	if replay != nil {
		w.Replay = []Replay{*replay}
	}
	told := t.cfg.Observer.Handled
	var begin time.Time
	if told != nil {
		begin = t.cfg.Clock()
	}
	skipped, ended, err := false, false, error(errGoexit)
	var over atomic.Bool // it has ended in time, or was left to itself
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if !over.CompareAndSwap(false, true) {
				t.names.end(t.attempt, err != nil)
			}
		}()
		defer limit.stop()
		defer cancel()
		defer func() {
			if p := recover(); p != nil {
				err = &Error{Class: UnknownClass, Code: "panic", Err: fmt.Errorf("panic: %v", p)}
			}
		}()
		skipped, err = t.handler.unit(ctx, t.raw, w, limit)
		ended = ctx.Err() != nil
		if err != nil && t.cfg.Classify != nil && ClassOf(err) == UnknownClass {
			err = &Error{Class: t.cfg.Classify(err), Code: codeOf(err), Err: err}
		}
	}()
	if !returns(ctx, done) && over.CompareAndSwap(false, true) {
		t.stuck = done
		t.tell(told, false, begin, errStuck)
		return errStuck
	}
	<-done
	if t.named = err != nil; !t.named {
		t.names.end(t.attempt, false)
	}
	if err != nil && ended && t.hard.Err() == nil && !limit.began() && !tookTooLong(err) {
		err = &Error{Class: Transient, Code: "begin", Err: fmt.Errorf("not begun, or not committed, in %s: %w", t.cfg.Timeout, err)}
	}
	err = late(t.hard, err)
	t.tell(told, skipped, begin, err)
	if t.handler.noop && err == nil && t.cfg.Observer.Unmarked != nil {
		t.cfg.Observer.Unmarked(t.handler.name)
	}
	return err
}

// late makes shutdown an error like any other where what it should come from has not ended: the unit met its own deadline.
func late(stops context.Context, err error) error {
	if ClassOf(err) == Shutdown && stops.Err() == nil {
		return &Error{Class: UnknownClass, Code: cmp.Or(codeOf(err), DeadlineCode), Err: err}
	}
	return err
}

// returns waits until done is closed, and after the end of ctx no longer than its grace.
func returns(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	last := time.NewTimer(grace)
	defer last.Stop()
	select {
	case <-done:
		return true
	case <-last.C:
		return false
	}
}

// tell tells the observer of a unit.
func (t *tries) tell(told func(string, bool, time.Duration, time.Duration, error), skipped bool, begin time.Time, err error) {
	if told == nil {
		return
	}
	now := t.cfg.Clock()
	var waited time.Duration
	if !t.raw.RecordedAt.IsZero() {
		waited = now.Sub(t.raw.RecordedAt)
	}
	told(t.handler.name, skipped, waited, now.Sub(begin), err)
}

// deadline limits each part of a unit of work by itself: waiting for the transaction, the handler, the commit.
// So a handler that had to wait for its turn has all of its own time, and a wait is never held against it.
type deadline struct {
	each  time.Duration
	timer *time.Timer // to the end of the unit's context
	begun atomic.Bool // the handler runs, or took too long
}

func newDeadline(each time.Duration, end func()) *deadline {
	return &deadline{each: each, timer: time.AfterFunc(each, end)}
}

// handler is the handler's context. One that does not heed its end meets the end of the whole unit later.
func (l *deadline) handler(ctx context.Context) (context.Context, func()) {
	l.begun.Store(true)
	l.timer.Reset(l.each + min(l.each, math.MaxInt64-l.each))
	inner, cancel := context.WithTimeout(ctx, l.each)
	return inner, func() {
		l.begun.Store(inner.Err() != nil) // what comes after a handler that returned in time is not its fault
		cancel()
		l.timer.Reset(l.each)
	}
}

func (l *deadline) began() bool { return l.begun.Load() }

func (l *deadline) stop() { l.timer.Stop() }
