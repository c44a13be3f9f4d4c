package projector

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// unit is one transaction over messages of a worker.
type unit struct {
	*worker
	msgs    []*inbound
	intent  provider.Unit
	timer   *time.Timer                      // ends it; see run
	over    atomic.Bool                      // a handler is running, or took too long
	at      atomic.Int64                     // index of the message whose handler runs; -1: none
	handler atomic.Pointer[provider.Handler] // the running handler; nil: none
	stuck   pulse.Loop                       // added if the unit does not return in time

	// Results of the last run of the handlers.
	ran     bool       // a handler ran
	applied []*inbound // messages whose handlers ran
	live    []bool     // by message: a parked message that is unchanged
	output  []outbox.Message
	parked  []*provider.Aside // by message; nil: not set aside
	left    bool              // deliveries were left to the reader of the log
	behind  []provider.Lane   // lanes of deliveries that were parked behind others
	reports []func()          // observer calls to make after the commit
	batches []*batch          // events that handlers of OnBatch have not got yet
	begin   func(message int) // Found.Begin
	waiting []provider.Lane   // lanes of messages that a unit with Switch would have parked
	setup   string            // the handler without events that it runs first
	suffix  string            // of the tables; see Table
	values  context.Context   // that the observer adds to the contexts of handlers; nil: none
}

func (w *worker) newUnit(msgs []*inbound) *unit {
	g := w.generation()
	intent := provider.Unit{Projector: w.name, Generation: g.Generation, Messages: messagesOf(msgs), Timeout: w.runner.cfg.Timeout}
	// Output of a message that is applied already must not be sent again.
	intent.Once = w.emits && !w.keeps.Atomic
	u := &unit{worker: w, msgs: msgs, intent: intent, suffix: g.Suffix}
	u.at.Store(-1)
	if w.isReader() {
		w.reader.prepare(u)
	}
	return u
}

func messagesOf(msgs []*inbound) []provider.Message {
	all := make([]provider.Message, len(msgs))
	for i, m := range msgs {
		all[i] = provider.Message{
			ID: m.id, Lane: m.lane, Handlers: m.handlers, Mark: m.mark, Position: m.position, Parked: m.parked,
		}
	}
	return all
}

// attempt runs the unit. If alone is set, the caller has locked the process.
func (u *unit) attempt(hard context.Context, alone bool) (err error) {
	if observe := u.runner.cfg.Observer.Processing; observe != nil && len(u.msgs) > 0 {
		raws := make([]eventstore.Raw, len(u.msgs))
		for i, m := range u.msgs {
			raws[i] = m.raw
		}
		var ended func(error)
		if u.values, ended = observe(u.name, raws); ended != nil {
			defer func() { ended(err) }()
		}
	}
	u.loop.Rest() // the wait for other units
	until := u.serial.Load()
	u.intent.Serial = until > 0 && len(u.msgs) > 1 && u.runner.cfg.Clock().UnixNano() < until
	if !alone {
		u.runner.process.RLock()
		defer u.runner.process.RUnlock()
		if u.intent.DryRun == nil && u.isSuspicious() {
			u.intent.Careful = &provider.Worker{Runner: u.runner.id, Number: u.number}
			if err := u.recordInFlight(hard, *u.intent.Careful, u.msgs); err != nil {
				return err
			}
		}
	}
	return u.transact(hard)
}

// isSuspicious reports whether one of the messages may have been in flight when a process crashed.
func (u *unit) isSuspicious() bool {
	if u.intent.Advance != nil {
		return u.reader.suspects > 0 || u.runner.cfg.Careful
	}
	return u.runner.suspicious(u.msgs)
}

// transact runs the unit in the background goroutine. So a handler that panics or calls
// runtime.Goexit ends only its unit, and the worker continues without a handler that does not
// return.
func (u *unit) transact(hard context.Context) error {
	ctx, cancel := context.WithCancel(hard)
	if u.values != nil {
		ctx = handlerContext{ctx, u.values}
	}
	u.timer = time.AfterFunc(u.limit(), cancel)
	u.loop.Within(u.runner.cfg.Clock(), sum(u.limit(), grace))
	ended, err := false, error(errGoexit)
	done := make(chan struct{})
	u.inBackground(func() {
		defer u.runner.loops.Remove(&u.stuck)
		defer close(done)
		defer cancel()
		defer u.timer.Stop()
		defer func() {
			if p := recover(); p != nil {
				err = &Error{Class: ClassUnknown, Code: codePanic, Err: &panicError{p, debug.Stack()}}
			}
		}()
		err = u.do(ctx, u.intent, u.handle)
		ended = ctx.Err() != nil
	})
	if !returns(ctx, done) {
		u.endBackground()
		name, err := "store of "+u.name, error(errBegin) // the store does not reply
		if h := u.handler.Load(); h != nil {
			name, err = "handler "+h.Name, errStuck
		}
		u.runner.loops.AddStuck(&u.stuck, name, u.runner.cfg.Clock(), func() bool {
			select {
			case <-done:
				return true
			default:
				return false
			}
		})
		return err
	}
	if err == errGoexit { //nolint:errorlint // it is never wrapped
		u.endBackground()
	}
	if err == nil {
		return nil
	}
	handlerDeadline := provider.ClassOf(err) == ClassUnknown && provider.CodeOf(err) == provider.CodeDeadline
	if ended && hard.Err() == nil && !u.over.Load() && !handlerDeadline {
		err = fmt.Errorf("the unit did not begin or commit within %s: %w", u.runner.cfg.Timeout, err)
		return &Error{Class: ClassTransient, Code: "begin", Err: err}
	}
	return u.classified(err)
}

// compareTime is how long the comparison of whole tables may take.
const compareTime = 24 * time.Hour

// setupTime is how long OnCreate, and emptying a read model, may take.
const setupTime = 10 * time.Minute

// limit returns how long the opening and the commit of the unit may take, each.
func (u *unit) limit() time.Duration {
	switch s := u.intent.Switch; {
	case s != nil && s.Snapshot && s.Compare != nil: // no unit waits for it
		return max(compareTime, u.runner.cfg.Timeout)
	case s != nil && (u.setup != "" || len(s.Reset) > 0): // OnReset may delete many rows
		return max(setupTime, u.runner.cfg.Timeout)
	}
	return u.runner.cfg.Timeout
}

// inBackground runs f in the worker's background goroutine. All units share it: a new goroutine
// per unit grows its stack each time, which took a tenth of the CPU time.
func (w *worker) inBackground(f func()) {
	if w.background == nil {
		w.background = make(chan func())
		go func(jobs <-chan func()) {
			for f := range jobs {
				f()
			}
		}(w.background)
	}
	w.background <- f
}

// endBackground ends the background goroutine after its current function returns.
func (w *worker) endBackground() {
	if w.background != nil {
		close(w.background)
		w.background = nil
	}
}

// classified returns err with the class that RunnerConfig.Classify chooses, and ClassUnknown
// instead of a class that a handler's error cannot have.
func (u *unit) classified(err error) error {
	was, code := provider.ClassOf(err), provider.CodeOf(err)
	class := was
	if class == ClassUnknown && u.runner.cfg.Classify != nil {
		class = u.runner.cfg.Classify(err)
	}
	if class == ClassShutdown { // the runner has not stopped: the timeout of the unit ended it
		class, code = ClassUnknown, provider.CodeDeadline
	} else if class < ClassUnknown || class > ClassAmbiguous {
		class = ClassUnknown
	}
	if class == was {
		return err
	}
	return &Error{Class: class, Code: code, Err: err}
}

// handle runs the handlers, and returns their output and the messages to set aside. It may run
// again for the same unit.
func (u *unit) handle(ctx context.Context, call caller, found provider.Found) (c provider.Closing, err error) {
	u.ran, u.left, u.live, u.behind, u.reports, u.applied = false, false, found.Live, nil, nil, nil
	u.batches, u.begin = nil, found.Begin
	u.parked = make([]*provider.Aside, len(u.msgs))
	if u.setup != "" {
		u.timer.Reset(u.limit())
		crash.Point("handler: before")
		s := scope{suffix: u.suffix}
		if u.setup == created {
			s.long = &atomic.Pointer[string]{}
		}
		_, failed := call(context.WithValue(ctx, scopeKey{}, s), u.setup, nil, nil)
		crash.Point("handler: after")
		if s.long != nil && s.long.Load() != nil {
			failed = &Error{Class: ClassPermanent, Code: "invalid", Err: checkSuffixed(*s.long.Load())}
		}
		if failed != nil {
			return c, failed
		}
	}
	stopped := map[provider.Lane]bool{} // lanes in which this unit has set a message aside
	for i, m := range u.msgs {
		var row *provider.Aside
		switch {
		case m.parked != nil && !found.Live[i]: // it has changed since it was listed
		case found.Left != nil && found.Left[i]:
			u.left = true
			if m.aside != nil && len(m.handlers) == 0 { // the reader does not read its type
				row = u.failure(i, m, found.Fresh[i])
				row.Parked.Lane = provider.LaneOfMessage(m.id) // earlier events of its stream follow
			}
		case m.parked == nil && len(m.handlers) > 0 && !slices.Contains(found.Fresh[i], true):
			for j := range m.handlers {
				u.note(m, j, true, 0)
			}
		case m.skipped:
		case found.Partly != nil && found.Partly[i]: // it must not wait: what waits is applied again
			m.aside = &aside{cause: errPartly, attempts: 1}
			row = u.failure(i, m, found.Fresh[i])
		case m.parked == nil && found.Held[i] || stopped[m.lane]:
			row = u.row(i, found.Fresh[i], ClassHeld, "")
			if m.parked == nil && !stopped[m.lane] {
				u.behind = append(u.behind, m.lane)
			}
		case found.Suspect != nil && found.Suspect[i]:
			row = u.row(i, found.Fresh[i], ClassUnknown, codeCrashed)
			if m.parked != nil && m.parked.Class != ClassHeld {
				row.Parked.Attempts-- // it was counted, but has not run
			}
			row.Parked.Attempts = max(row.Parked.Attempts, 1)
		case m.aside != nil:
			row = u.failure(i, m, found.Fresh[i])
		default:
			if err := u.decode(ctx, i, m, found.Fresh[i]); err != nil {
				return c, err
			}
			if m.aside != nil {
				row = u.failure(i, m, found.Fresh[i])
				break
			}
			found.Begin(i)
			out, err := u.run(ctx, call, i, m, found.Fresh[i])
			if err != nil {
				return c, err
			}
			c.Output = append(c.Output, out...)
			if slices.Contains(found.Fresh[i], true) {
				u.applied = append(u.applied, m)
			}
		}
		if row != nil {
			stopped[m.lane] = true
			u.parked[i] = row
			c.Park = append(c.Park, *row)
		}
	}
	if err := u.flush(ctx, call); err != nil {
		return c, err
	}
	if u.intent.Switch != nil && len(c.Park) > 0 {
		for i := range c.Park {
			u.waiting = append(u.waiting, c.Park[i].Parked.Lane)
		}
		return c, errParks
	}
	u.output = c.Output
	return c, nil
}

// decode decodes the event of message i before its handlers run. If that fails, the message is to be set aside. None of
// its handlers has run, so the unit goes on.
func (u *unit) decode(ctx context.Context, i int, m *inbound, fresh []bool) error {
	first := slices.Index(fresh, true)
	if first < 0 || m.decoding.state.Load() == isDecoded {
		return nil
	}
	each := u.runner.cfg.Timeout
	if !u.timer.Reset(sum(each, each)) {
		return errBegin
	}
	u.at.Store(int64(i)) // a decoder that panics or does not return is the fault of the message
	u.handler.Store(&m.handlers[first])
	u.over.Store(true)
	var err error
	if d := &m.decoding; d.state.CompareAndSwap(notDecoded, isDecoding) || d.state.CompareAndSwap(isUsed, isDecoding) {
		err = m.decode(u.types)
	} else {
		_, err = eventstore.Decode[any](u.types, m.raw)
	}
	u.over.Store(ctx.Err() != nil)
	u.timer.Reset(u.limit())
	if ctx.Err() != nil { // the worker may have given this unit up
		return ctx.Err()
	}
	if err != nil {
		m.aside = &aside{cause: undecodable(err), handler: m.handlers[first].Name, attempts: 1}
		if m.parked != nil {
			m.aside.attempts = max(m.parked.Attempts, 1)
		}
	}
	u.at.Store(-1)
	u.handler.Store(nil)
	return nil
}

// errParks: a unit with Switch has messages that it would set aside.
var errParks = errors.New("messages of the last step are parked")

// run runs the handlers of a message that have not applied it yet. Handlers of OnBatch run later.
func (u *unit) run(ctx context.Context, call caller, i int, m *inbound, fresh []bool) (out []outbox.Message, err error) {
	u.at.Store(int64(i))
	for j := range m.handlers {
		if !fresh[j] {
			u.note(m, j, true, 0)
			continue
		}
		if err := u.flushBefore(ctx, call, i, m, &m.handlers[j]); err != nil {
			return nil, err
		}
		if take := u.takes[m.handlers[j].Name]; take != nil {
			if err := u.collect(ctx, i, m, j, take); err != nil {
				return nil, err
			}
			continue
		}
		parent := ctx
		if values := m.msg.Context(); values != context.Background() {
			parent = handlerContext{ctx, context.WithoutCancel(values)}
			if u.values != nil {
				parent = handlerContext{parent, u.values}
			}
		}
		some, took, err := u.call(withCause(parent, m.raw), call, &m.handlers[j], m.replayed, m, nil)
		if err != nil {
			return nil, err
		}
		u.note(m, j, false, took)
		out = append(out, some...)
	}
	u.at.Store(-1)
	u.handler.Store(nil)
	return out, nil
}

// call runs one handler, and returns how long it took.
//
// The opening, each handler, and the commit have separate timeouts. So the time that a unit waits
// for others does not count for a handler.
func (u *unit) call(
	ctx context.Context, call caller, h *provider.Handler, replayed bool, m *inbound, events []any,
) (out []outbox.Message, took time.Duration, err error) {
	each, began := u.runner.cfg.Timeout, u.runner.cfg.Clock()
	if !u.timer.Reset(sum(each, each)) { // ends the unit if the handler ignores its context
		return nil, 0, errBegin
	}
	u.loop.Within(began, sum(sum(each, each), grace))
	u.ran = true
	u.handler.Store(h)
	u.over.Store(true)
	crash.Point("handler: before")
	if s := (scope{suffix: u.suffix, replayed: replayed}); s != (scope{}) {
		ctx = context.WithValue(ctx, scopeKey{}, s)
	}
	limited := withDeadline(ctx, each)
	out, err = call(limited, h.Name, m, events)
	u.over.Store(limited.end() != nil) // a handler that returned in time is not at fault
	u.timer.Reset(u.limit())
	crash.Point("handler: after")
	return out, u.runner.cfg.Clock().Sub(began), err
}

// note records for the observer that a handler has applied a message, now or before.
func (u *unit) note(m *inbound, handler int, before bool, took time.Duration) {
	cfg, name := &u.runner.cfg, m.handlers[handler].Name
	if cfg.Observer.Handled != nil {
		u.reports = append(u.reports, func() {
			cfg.Observer.Handled(name, before, m.waited(cfg.Clock()), took, nil)
		})
	}
	if cfg.Observer.Unmarked != nil && !before && u.opts.Markers && !u.marks {
		u.reports = append(u.reports, func() { cfg.Observer.Unmarked(name) })
	}
}

// failure returns the row of a message that has failed alone.
func (u *unit) failure(i int, m *inbound, fresh []bool) *provider.Aside {
	row := u.row(i, fresh, provider.ClassOf(m.aside.cause), provider.CodeOf(m.aside.cause))
	p, retry := &row.Parked, u.runner.cfg.Retry
	p.Attempts, p.Handler, p.Error, row.After = m.aside.attempts, m.aside.handler, textOf(m.aside.cause), -1
	if p.Class == ClassTransient && m.parked != nil && m.parked.Code == codeCrashed {
		p.Code = codeCrashed // the next attempt runs alone too
	}
	switch {
	case p.Class == ClassTransient: // not counted: it waits as long again as it has been parked
		row.After = min(max(u.runner.cfg.Clock().Sub(p.At), retry.Base), retry.Max)
	case p.Class == ClassUnknown && !retry.Exhausted(p.Attempts):
		row.After, _ = retry.Delay(max(p.Attempts, 1))
	}
	return row
}

// row returns the row of a message that is set aside.
func (u *unit) row(i int, fresh []bool, class Class, code string) *provider.Aside {
	m := u.msgs[i]
	row := Parked{
		Projector: u.name, Generation: u.intent.Generation, MessageID: m.id, Topic: m.topic, Key: m.key, Lane: m.lane,
		Type: m.raw.Type, Payload: m.msg.Payload, Headers: m.headers(),
	}
	switch {
	case m.parked != nil:
		row = *m.parked
	case m.replayed:
		row.Headers[headerReplayed] = "true" // the map belongs to the row: deliveries are not replayed
	}
	row.Class, row.Code, row.Version = class, code, u.runner.cfg.Version
	named := len(row.Handlers) > 0
	for j, h := range m.handlers {
		if !named && fresh[j] { // the unit writes its marker, so only this field lists it
			row.Handlers = append(row.Handlers, h.Name)
		}
	}
	return &provider.Aside{Message: i, Parked: row}
}

// culprit returns the index of the message that made the unit fail with err, or -1.
func (u *unit) culprit(err error) int {
	if e, ok := errors.AsType[*provider.MessageError](err); ok {
		return e.Message
	}
	return int(u.at.Load())
}

// grace is how long the worker waits for a handler to return after its context has ended.
const grace = 2 * time.Second

// returns reports whether done is closed before the grace after the end of ctx is over.
func returns(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	case <-time.After(grace):
		return false
	}
}

// sum returns a + b, or the longest duration if that overflows.
func sum(a, b time.Duration) time.Duration { return a + min(b, math.MaxInt64-a) }
