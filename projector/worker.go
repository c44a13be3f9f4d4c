package projector

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/provider"
)

// worker runs units for some lanes of a projector, one at a time.
type worker struct {
	*projection
	number     int
	in         chan *inbound   // deliveries, at most those of the next unit
	due        chan []*inbound // parked messages that are due
	busy       atomic.Bool     // it has due messages
	batch      int             // the most messages of a unit
	size       int             // the most messages of the next unit
	failed     int             // messages set aside since one was applied
	brake      brake
	hasTurn    bool           // it holds the lease of inTurn
	fenced     bool           // a unit of a reader failed because another reader has taken over
	seen       map[string]int // used by collect
	background chan func()    // functions for the background goroutine; see unit.transact
	loop       *pulse.Loop    // nil: the worker does not run
}

// run applies messages until ctx ends. Messages that are not applied by then are not acked, so
// they are redelivered.
func (w *worker) run(ctx, hard context.Context) {
	defer w.endBackground()
	defer w.beginLoop()()
	for ctx.Err() == nil {
		w.loop.Rest()
		select {
		case <-ctx.Done():
		case rows := <-w.due:
			if w.replay(ctx, hard, rows) {
				w.runner.scanNow() // for the messages behind them
			}
			w.busy.Store(false)
		case m := <-w.in:
			w.backOff(ctx)
			w.awaitResume(ctx)
			w.apply(ctx, hard, w.leave(ctx, w.locate(ctx, w.collect(m))))
		}
	}
}

// awaitResume waits while an operator has paused the projector, or until ctx ends.
func (w *worker) awaitResume(ctx context.Context) {
	for w.isPaused() && ctx.Err() == nil {
		w.loop.Rest()
		wait(ctx, pausedLook)
	}
}

// pausedLook is the interval between two looks at whether a paused projector was resumed.
const pausedLook = 100 * time.Millisecond

// beginLoop begins to record whether the worker moves, until the function that it returns is called.
func (w *worker) beginLoop() (end func()) {
	w.loop = w.runner.loops.Add("projector " + w.name)
	return func() {
		w.runner.brakes.remove(w)
		w.runner.loops.Remove(w.loop)
	}
}

// generation returns the generation that the units of the worker belong to.
func (w *worker) generation() *generation {
	if w.isReader() {
		return w.reader.serving
	}
	return w.current.Load()
}

func (w *worker) build() provider.Build { return w.generation().Build }

// isReader reports whether the worker is that of the reader of the log.
func (w *worker) isReader() bool { return w.reader != nil && w.reader.worker == w }

// collect returns m and the messages that have arrived since. So a unit has one message under a
// low load, and many messages share a commit under a high load. A message that was delivered
// twice is in the unit once.
func (w *worker) collect(m *inbound) []*inbound {
	clear(w.seen)
	msgs := make([]*inbound, 0, min(w.batch, 1+len(w.in)))
	for {
		if i, twice := w.seen[m.id]; twice && m.id != "" {
			msgs[i].duplicates = append(msgs[i].duplicates, m.received)
		} else {
			w.seen[m.id] = len(msgs)
			msgs = append(msgs, m)
		}
		if len(msgs) == w.batch {
			return msgs
		}
		select {
		case m = <-w.in:
		default:
			return msgs
		}
	}
}

// apply runs messages in units until each is applied or set aside. A unit that fails is rolled
// back, and its messages run in new units: those before the message that failed, that message
// alone, then the rest, beginning with one message and doubling. Only a message that fails alone,
// or whose handler does not return, is set aside. It reports whether the state of any parked message changed.
func (w *worker) apply(ctx, hard context.Context, msgs []*inbound) (progress bool) {
	var culprit *inbound
	pause := closingPause
	for tries := 0; len(msgs) > 0 && ctx.Err() == nil; {
		// The part ends before the message that made the last unit fail, or is that message alone.
		part := msgs[:min(len(msgs), w.size)]
		if r := w.reader; w.isReader() && r.suspects > 0 {
			part = part[:min(len(part), suspectBatch)]
		}
		if i := slices.Index(part, culprit); i >= 0 {
			part = part[:max(i, 1)]
		}
		alone := part[0] == culprit
		began := w.runner.cfg.Clock()
		u := w.newUnit(part)
		err := u.attempt(hard, false)
		if observe := w.runner.cfg.Observer.Unit; observe != nil {
			observe(w.name, len(part), w.runner.cfg.Clock().Sub(began), err)
		}
		switch at := u.culprit(err); {
		case err == nil && u.left && !w.mayLeave(ctx, u):
			w.runner.followNow()
			wait(ctx, closingPause)
			msgs = w.leave(ctx, msgs)
		case err == nil:
			w.finish(u)
			progress = progress || slices.Contains(u.live, true)
			w.grow(w.runner.cfg.Clock().Sub(began), alone)
			w.catchUp(ctx, hard, u.behind)
			pause = closingPause
			if msgs, tries = msgs[len(part):], 0; len(msgs) > 0 && msgs[0].parked == nil {
				w.backOff(ctx)
			}
		case hard.Err() != nil:
			return progress
		case errors.Is(err, provider.ErrFenced): // only units of a reader
			w.fenced = true
			return progress
		case errors.Is(err, provider.ErrEnded):
			w.fenced = true
			w.runner.followNow()
			if w.isReader() || part[0].parked != nil {
				return progress
			}
			wait(ctx, pause)
			if pause = min(2*pause, 20*closingPause); !w.generation().isLive() {
				msgs = w.leave(ctx, msgs)
			}
		case provider.CodeOf(err) == provider.CodeClosing:
			wait(ctx, pause)
			pause = min(2*pause, 20*closingPause)
		case provider.ClassOf(err) == ClassTransient || provider.ClassOf(err) == ClassAmbiguous ||
			part[0].aside != nil && len(part) == 1:
			tries++
			w.backOffUnit(ctx, len(part), tries, err)
		case len(part) == 1 || at >= 0 && (errors.Is(err, errStuck) || provider.CodeOf(err) == provider.CodePartly || isOnly(err)):
			part[max(at, 0)].setAside(u, err, 1)
			if isOnly(err) {
				msgs = append(w.finishOthers(u, at), msgs[len(part):]...)
			}
		case at >= 0:
			culprit = part[at]
		default:
			w.size = len(part) / 2
		}
	}
	return progress
}

// isOnly reports whether a message has failed, and the other messages of its unit were applied.
func isOnly(err error) bool {
	e, ok := errors.AsType[*provider.MessageError](err)
	return ok && e.Others
}

// finishOthers finishes the messages of a unit that were applied although the unit failed, because the
// store cannot undo them. It returns the others: the one that failed, and those to set aside.
func (w *worker) finishOthers(u *unit, failed int) (rest []*inbound) {
	done := &unit{worker: w, intent: u.intent, ran: u.ran, reports: u.reports}
	for i, m := range u.msgs {
		if i == failed || u.parked[i] != nil {
			rest = append(rest, m)
		} else {
			done.msgs, done.parked = append(done.msgs, m), append(done.parked, nil)
		}
	}
	w.finish(done)
	return rest
}

// suspectBatch is the most events of a unit that may have been in flight when a reader crashed. If
// this one crashes too, each of them is a suspect: it runs alone, and its stream waits for it.
const suspectBatch = 100

// closingPause is how long a delivery waits before it is tried again, while the reader of the log
// applies the last events before the projector goes live.
const closingPause = 10 * time.Millisecond

// grow sets the size of the next unit, given how long the last one took.
func (w *worker) grow(took time.Duration, alone bool) {
	switch {
	case alone:
		w.size = 1
	case took > time.Second:
		w.size = max(w.size/2, 1)
	case took < time.Second/2:
		w.size = min(2*w.size, w.batch)
	}
}

// serialTime is how long units of several messages run one at a time after a deadlock.
const serialTime = time.Minute

// backOffUnit waits before a unit of n messages is tried again, after an error that was not the
// fault of a message. A transient error halves the unit.
func (w *worker) backOffUnit(ctx context.Context, n, tries int, err error) {
	if provider.ClassOf(err) == ClassTransient {
		w.size = max(n/2, 1)
	}
	if provider.CodeOf(err) == provider.CodeDeadlock {
		w.serial.Store(w.runner.cfg.Clock().Add(serialTime).UnixNano())
	}
	cfg := &w.runner.cfg
	delay, _ := cfg.Retry.Delay(tries) // cannot fail: tries ≥ 1, and the schedule is checked
	if cfg.Observer.Retried != nil {
		cfg.Observer.Retried(w.name, provider.ClassOf(err), delay)
	}
	w.runner.report(slog.LevelWarn, "unit failed", err,
		"projector", w.name, "messages", n, "tries", tries, "again_in", delay)
	w.loop.Rest()
	wait(ctx, delay)
}

// setAside makes the next unit of m set m aside, after this number of attempts.
func (m *inbound) setAside(u *unit, cause error, attempts int) {
	m.aside = &aside{cause: cause, attempts: attempts}
	if h := u.handler.Load(); h != nil {
		m.aside.handler = h.Name
	} else if len(m.handlers) == 1 {
		m.aside.handler = m.handlers[0].Name
	}
}

// finish acks and reports the messages of a committed unit.
func (w *worker) finish(u *unit) {
	cfg := &w.runner.cfg
	for _, report := range u.reports {
		report()
	}
	if u.ran {
		w.failed = 0
		w.applied.Add(1)
	}
	if w.reader != nil {
		w.reader.committed(u)
	}
	for i, m := range u.msgs {
		switch row := u.parked[i]; {
		case row != nil:
			w.reportParked(m, row)
		case m.parked != nil && u.live[i] && cfg.Observer.Replayed != nil:
			cfg.Observer.Replayed(w.name)
		}
		if m.parked == nil {
			m.done()
			for _, duplicate := range m.duplicates {
				duplicate.done()
			}
		}
	}
}

// reportParked reports a message that was set aside.
func (w *worker) reportParked(m *inbound, row *provider.Aside) {
	cfg := &w.runner.cfg
	if cfg.Observer.Parked != nil {
		cfg.Observer.Parked(w.name, row.Parked.Handler, row.Parked.Class, row.Parked.Code)
	}
	if row.After >= 0 && row.Parked.Class != ClassHeld {
		time.AfterFunc(row.After, w.runner.scanNow)
	}
	if m.aside == nil { // it waits behind another one, or is suspect
		w.report(slog.LevelDebug, "parked", m, &Error{Class: row.Parked.Class, Code: row.Parked.Code}, row.Parked.Attempts)
		return
	}
	if cfg.Observer.Handled != nil && m.aside.handler != "" {
		cfg.Observer.Handled(m.aside.handler, false, m.waited(cfg.Clock()), 0, m.aside.cause)
	}
	what := "parked"
	if row.After < 0 {
		what = "stuck"
	}
	w.report(slog.LevelWarn, what, m, m.aside.cause, row.Parked.Attempts)
	if m.parked == nil {
		w.failed++
		w.brake.count(m.aside, w.applied.Load())
	}
	if row.After < 0 && w.opts.Parking == Halt {
		err := w.runner.halted(context.WithoutCancel(m.msg.Context()))
		if err != nil { // nil if an operator has already skipped it
			w.runner.end(err)
		}
	}
}

// waited returns the time since the event was recorded.
func (m *inbound) waited(now time.Time) time.Duration {
	if m.raw.RecordedAt.IsZero() {
		return 0
	}
	return now.Sub(m.raw.RecordedAt)
}

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
