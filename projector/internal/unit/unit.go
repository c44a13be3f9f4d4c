// Package unit runs units of work: it decides what becomes of each message, and runs the handlers of those
// that are to run, in one transaction.
package unit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Unit is what a worker is asked to run.
type Unit struct {
	Intent   provider.Unit
	Messages []*model.Message
	Setup    string // the handler without events that it runs first
	Suffix   string // of the tables
	Alone    bool   // the caller has locked the process
	Suspect  bool   // its events may have been in flight when a reader crashed
}

// Done is what the last run of the handlers did. After an error only Unit, At, Handler and Parks are
// set, unless the store cannot undo a unit.
type Done struct {
	Unit    *Unit
	Ran     bool              // a handler ran
	Applied []*model.Message  // messages whose handlers ran
	First   []*model.Message  // those of them that no handler had applied before
	Fates   []Fate            // by message
	Rows    []*provider.Aside // by message; nil: not set aside
	Output  []outbox.Message
	Left    bool            // deliveries were left to the reader of the log
	Behind  []provider.Lane // lanes of deliveries that were parked behind others
	Reports []func()        // calls of the observer to make after the commit
	Parks   []provider.Lane // lanes of messages that a unit with Switch would have parked
	At      int             // the message at which it failed; -1: none
	Handler string          // that was running
}

// Culprit returns the index of the message that made the unit fail with err, or -1.
func (d *Done) Culprit(err error) int {
	if e, ok := errors.AsType[*provider.MessageError](err); ok {
		return e.Message
	}
	return d.At
}

// Worker runs units, one at a time, in a goroutine that it replaces if a handler does not return.
type Worker struct {
	Host       *model.Host
	Projector  *model.Projector
	Number     int // in the runner
	Group      *Group
	Crashes    *Crashes
	Loop       *pulse.Loop // nil: it does not run
	background chan func() // functions for the background goroutine; see transact
}

// Group is what the workers of one generation share.
type Group struct {
	Applied atomic.Int64 // committed units in which a handler ran
	Serial  atomic.Int64 // larger units run one at a time until then; Unix nanoseconds
}

// attempt is a unit that is running.
type attempt struct {
	*Worker
	unit    *Unit
	done    *Done
	timer   *time.Timer                      // ends it; see call
	over    atomic.Bool                      // a handler is running, or took too long
	at      atomic.Int64                     // index of the message whose handler runs; -1: none
	handler atomic.Pointer[provider.Handler] // the running handler; nil: none
	stuck   pulse.Loop                       // added if the unit does not return in time
	batches []*batch                         // events that handlers of OnBatch have not got yet
	begin   func(message int)                // Found.Begin
	values  context.Context                  // that the observer adds to the contexts of handlers; nil: none
}

// Of returns a unit of messages in a generation.
func (w *Worker) Of(b provider.Build, suffix string, msgs []*model.Message) *Unit {
	return &Unit{Messages: msgs, Suffix: suffix, Intent: provider.Unit{
		Projector: b.Projector, Generation: b.Generation, Messages: model.UnitOf(msgs), Timeout: w.Host.Timeout,
		// Output of a message that is applied already must not be sent again.
		Once: w.Projector.Emits && !w.Projector.Keeps.Atomic,
	}}
}

// Run runs a unit once. It records the messages first that may have been in flight when a process
// crashed.
func (w *Worker) Run(hard context.Context, u *Unit) (d *Done, err error) {
	a := w.attempt(u)
	if observe := w.Host.Observer.Processing; observe != nil && len(u.Messages) > 0 {
		raws := make([]eventstore.Raw, len(u.Messages))
		for i, m := range u.Messages {
			raws[i] = m.Raw
		}
		var ended func(error)
		if a.values, ended = observe(w.Projector.Name, raws); ended != nil {
			defer func() { ended(err) }()
		}
	}
	w.Loop.Rest() // the wait for other units
	until := w.Group.Serial.Load()
	u.Intent.Serial = until > 0 && len(u.Messages) > 1 && w.Host.Clock().UnixNano() < until
	if !u.Alone {
		w.Crashes.Process.RLock()
		defer w.Crashes.Process.RUnlock()
		if u.Intent.DryRun == nil && w.Crashes.suspects(u) {
			if err := w.Crashes.record(hard, w.Number, u); err != nil {
				return a.done, err
			}
		}
	}
	return a.transact(hard)
}

// Transact is Run for a unit whose messages, if any, are known inside its transaction only.
func (w *Worker) Transact(hard context.Context, u *Unit) (*Done, error) {
	return w.attempt(u).transact(hard)
}

// Alone runs a unit without messages while no other unit of the projector is open. setup is the handler without
// events that it runs; "": none.
func (w *Worker) Alone(hard context.Context, b provider.Build, suffix, setup string, s provider.Switch) error {
	u := w.Of(b, suffix, nil)
	u.Setup = setup
	u.Intent.Once, u.Intent.Messages, u.Intent.Switch = true, nil, &s
	_, err := w.Transact(hard, u)
	return err
}

func (w *Worker) attempt(u *Unit) *attempt {
	a := &attempt{Worker: w, unit: u, done: &Done{Unit: u, At: -1}}
	a.at.Store(-1)
	return a
}

// transact runs the unit in the background goroutine. So a handler that panics or calls
// runtime.Goexit ends only its unit, and the worker continues without a handler that does not
// return.
func (a *attempt) transact(hard context.Context) (*Done, error) {
	ctx, cancel := context.WithCancel(hard)
	if a.values != nil {
		ctx = handlerContext{ctx, a.values}
	}
	a.timer = time.AfterFunc(a.limit(), cancel)
	a.Loop.Within(a.Host.Clock(), Sum(a.limit(), grace))
	ended, err := false, error(errGoexit)
	done := make(chan struct{})
	a.inBackground(func() {
		defer a.Host.Loops.Remove(&a.stuck)
		defer close(done)
		defer cancel()
		defer a.timer.Stop()
		defer func() {
			if p := recover(); p != nil {
				err = &provider.Error{Class: provider.ClassUnknown, Code: model.CodePanic, Err: &panicError{p, debug.Stack()}}
			}
		}()
		err = a.Projector.Do(ctx, a.unit.Intent, a.handle)
		ended = ctx.Err() != nil
	})
	if !pauses.Returns(ctx, done, grace) {
		return a.abandon(done)
	}
	a.done.At, a.done.Handler = a.place()
	if err == errGoexit { //nolint:errorlint // it is never wrapped
		a.Close()
	}
	if err == nil {
		return a.done, nil
	}
	handlerDeadline := provider.ClassOf(err) == provider.ClassUnknown && provider.CodeOf(err) == provider.CodeDeadline
	if ended && hard.Err() == nil && !a.over.Load() && !handlerDeadline {
		err = fmt.Errorf("the unit did not begin or commit within %s: %w", a.Host.Timeout, err)
		return a.done, &provider.Error{Class: provider.ClassTransient, Code: "begin", Err: err}
	}
	return a.done, a.classified(err)
}

// abandon leaves the background goroutine, and what it has done, to a handler or a store that does not
// return.
func (a *attempt) abandon(done <-chan struct{}) (*Done, error) {
	a.Close()
	d, name, err := &Done{Unit: a.unit}, "store of "+a.Projector.Name, error(errBegin) // the store does not reply
	if d.At, d.Handler = a.place(); d.Handler != "" {
		name, err = "handler "+d.Handler, ErrStuck
	}
	a.Host.Loops.AddStuck(&a.stuck, name, a.Host.Clock(), func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
	return d, err
}

// place returns the message and the handler at which the unit is, or -1 and "".
func (a *attempt) place() (message int, handler string) {
	if h := a.handler.Load(); h != nil {
		handler = h.Name
	}
	return int(a.at.Load()), handler
}

// limit returns how long the opening and the commit of the unit may take, each.
func (a *attempt) limit() time.Duration {
	switch s := a.unit.Intent.Switch; {
	case s != nil && s.Snapshot && s.Compare != nil: // of whole tables, and no unit waits for it
		return max(24*time.Hour, a.Host.Timeout)
	case s != nil && (a.unit.Setup != "" || len(s.Reset) > 0): // OnReset may delete many rows
		return max(10*time.Minute, a.Host.Timeout)
	}
	return a.Host.Timeout
}

// inBackground runs f in the worker's background goroutine. All units share it: a new goroutine
// per unit grows its stack each time, which took a tenth of the CPU time.
func (w *Worker) inBackground(f func()) {
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

// Close ends the background goroutine after its current function returns. The worker can be used again.
func (w *Worker) Close() {
	if w.background != nil {
		close(w.background)
		w.background = nil
	}
}

// classified returns err with the class that RunnerConfig.Classify chooses, and ClassUnknown
// instead of a class that a handler's error cannot have.
func (w *Worker) classified(err error) error {
	was, code := provider.ClassOf(err), provider.CodeOf(err)
	class := was
	if class == provider.ClassUnknown && w.Host.Classify != nil {
		class = w.Host.Classify(err)
	}
	if class == provider.ClassShutdown { // the runner has not stopped: the timeout of the unit ended it
		class, code = provider.ClassUnknown, provider.CodeDeadline
	} else if class < provider.ClassUnknown || class > provider.ClassAmbiguous {
		class = provider.ClassUnknown
	}
	if class == was {
		return err
	}
	return &provider.Error{Class: class, Code: code, Err: err}
}

// grace is how long the worker waits for a handler to return after its context has ended.
const grace = 2 * time.Second

// Sum returns a + b, or the longest duration if that overflows.
func Sum(a, b time.Duration) time.Duration { return a + min(b, math.MaxInt64-a) }

var (
	errBegin  = &provider.Error{Class: provider.ClassTransient, Code: "begin", Err: errors.New("the store did not reply in time")}
	errPartly = &provider.Error{Class: provider.ClassPermanent, Code: provider.CodePartly, Err: errors.New("a part of its writes took effect, and cannot be undone")}
	errGoexit = &provider.Error{Class: provider.ClassUnknown, Code: model.CodeGoexit, Err: errors.New("the handler called runtime.Goexit")}

	// ErrStuck: the handler did not return.
	ErrStuck = &provider.Error{
		Class: provider.ClassPermanent, Code: model.CodeStuck, Err: errors.New("the handler did not return after its timeout, and may still run"),
	}
	// ErrParks: a unit with Switch has messages that it would set aside.
	ErrParks = errors.New("messages of the last step are parked")
)

// handlerContext ends with the unit, and has the values of another context, such as that of the
// message. It does not end with the other one: some subscribers cancel the contexts of all messages
// at once when they close.
type handlerContext struct {
	context.Context
	values context.Context
}

func (c handlerContext) Value(key any) any {
	if v := c.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// panicError is the error of a handler that has panicked. Its text has no stack, so that logs are short.
type panicError struct {
	value any
	stack []byte // of debug.Stack in a deferred function
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// at returns the stack from the function that has panicked on.
func (e *panicError) at() string {
	_, below, found := bytes.Cut(e.stack, []byte("\npanic("))
	if !found {
		return string(e.stack)
	}
	for range 2 { // the rest of this line, and the place of panic
		_, below, _ = bytes.Cut(below, []byte("\n"))
	}
	return string(below)
}

// TextOf returns the text of an error for Parked.Error: with the stack of a panic, and cut to its limit.
func TextOf(err error) string {
	text := err.Error()
	if p, ok := errors.AsType[*panicError](err); ok {
		text += "\n" + p.at()
	}
	if text = strings.ToValidUTF8(text, "\uFFFD"); len(text) > provider.MaxParkedError {
		text = strings.ToValidUTF8(text[:provider.MaxParkedError], "") // without a part of a rune
	}
	return text
}
