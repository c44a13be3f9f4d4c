// Package apply applies messages, in units, until each of them is applied or set aside.
package apply

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/sent"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Applier applies messages, one unit after another.
type Applier struct {
	Worker *unit.Worker
	Brakes *Brakes
	Turn   *sent.Turn
	Batch  int // the most messages of a unit
	size   int // the most messages of the next unit; 0: Batch
	brake  brake
}

// Owner is whose messages are applied.
type Owner interface {
	// Unit returns a unit of the first messages, of all or of fewer.
	Unit(msgs []*model.Message) *unit.Unit
	// Committed is called after each unit, before its messages are acked. With an error they are not.
	Committed(ctx context.Context, d *unit.Done) error
	// Waiting is called after the ack with lanes in which deliveries were parked behind others.
	Waiting(ctx, hard context.Context, lanes []provider.Lane)
}

// ErrLeft: messages were left to the reader of the log, and perhaps no reader finds them.
var ErrLeft = errors.New("deliveries were left to the reader of another generation")

// Begin begins to record whether the goroutine of the applier moves, until the function that it returns is
// called.
func (a *Applier) Begin() (end func()) {
	h := a.Worker.Host
	a.Worker.Loop = h.Loops.Add("projector " + a.Worker.Projector.Name)
	return func() {
		a.Brakes.remove(a)
		h.Loops.Remove(a.Worker.Loop)
		a.Worker.Close()
	}
}

// Apply runs messages in units until each is applied or set aside. A unit that fails is rolled
// back, and its messages run in new units: those before the message that failed, that message
// alone, then the rest, beginning with one message and doubling. Only a message that fails alone,
// or whose handler does not return, is set aside. The error is that of a context, provider.ErrFenced,
// provider.ErrEnded, or one of the owner. With it, Apply returns the messages that are neither applied nor set aside.
func (a *Applier) Apply(ctx, hard context.Context, msgs []*model.Message, o Owner) (rest []*model.Message, err error) {
	run := &running{owner: o, pause: closingPause}
	for len(msgs) > 0 && ctx.Err() == nil {
		u := o.Unit(run.part(msgs, cmp.Or(a.size, a.Batch)))
		began := a.Worker.Host.Clock()
		d, err := a.Worker.Run(hard, u)
		took := a.Worker.Host.Clock().Sub(began)
		if observe := a.Worker.Host.Observer.Unit; observe != nil {
			observe(a.Worker.Projector.Name, len(u.Messages), took, err)
		}
		v := judge(failure{
			err: err, size: len(u.Messages), at: d.Culprit(err), over: hard.Err() != nil,
			aside: len(u.Messages) == 1 && u.Messages[0].Aside != nil,
		})
		if v == end {
			return msgs, err
		}
		if v != finish {
			msgs = a.retry(ctx, run, v, d, err, msgs)
			continue
		}
		if err := o.Committed(ctx, d); err != nil {
			return msgs, err
		}
		a.Finish(d)
		a.grow(took, u.Messages[0] == run.culprit)
		o.Waiting(ctx, hard, d.Behind)
		run.tries, run.pause = 0, closingPause
		if msgs = msgs[len(u.Messages):]; len(msgs) > 0 && msgs[0].Parked == nil {
			a.BackOff(ctx)
		}
	}
	if len(msgs) > 0 {
		return msgs, ctx.Err()
	}
	return nil, nil
}

// failure is how a unit ended.
type failure struct {
	err  error // nil: it was committed
	size int   // number of its messages
	at   int   // the message that failed; -1: it is not known
	// aside: it was to set its only message aside
	aside bool
	over  bool // the hard context of the runner has ended
}

// verdict is what follows the end of a unit.
type verdict int

const (
	finish   verdict = iota // ack, report, go on
	again                   // the same messages after a backoff
	closing                 // the same messages, once the reader of the log has applied the last events
	halve                   // it is not known which message failed
	split                   // the messages before the one that failed, it alone, the rest
	setAside                // the message that failed
	end                     // the owner decides
)

func judge(f failure) verdict {
	class, code := provider.ClassOf(f.err), provider.CodeOf(f.err)
	switch {
	case f.err == nil:
		return finish
	case f.over, errors.Is(f.err, provider.ErrFenced), errors.Is(f.err, provider.ErrEnded):
		return end
	case code == provider.CodeClosing:
		return closing
	case class == provider.ClassTransient, class == provider.ClassAmbiguous, f.aside:
		return again
	case f.size == 1, f.at >= 0 && (errors.Is(f.err, unit.ErrStuck) || code == provider.CodePartly || isOnly(f.err)):
		return setAside
	case f.at >= 0:
		return split
	}
	return halve
}

// isOnly reports whether a message has failed, and the other messages of its unit were applied.
func isOnly(err error) bool {
	e, ok := errors.AsType[*provider.MessageError](err)
	return ok && e.Others
}

type running struct {
	owner   Owner
	culprit *model.Message // that made the last unit fail
	tries   int
	pause   time.Duration
}

// part returns the messages of the next unit: they end before the culprit, or are the culprit alone.
func (r *running) part(msgs []*model.Message, size int) []*model.Message {
	part := msgs[:min(len(msgs), size)]
	if i := slices.Index(part, r.culprit); i >= 0 {
		part = part[:max(i, 1)]
	}
	return part
}

// retry prepares what follows a unit that has failed. It returns the messages that are left.
func (a *Applier) retry(ctx context.Context, r *running, v verdict, d *unit.Done, err error, msgs []*model.Message) []*model.Message {
	u, at := d.Unit, d.Culprit(err)
	switch v {
	case closing:
		model.Wait(ctx, r.pause)
		r.pause = min(2*r.pause, 20*closingPause)
	case again:
		r.tries++
		a.PauseUnit(ctx, len(u.Messages), r.tries, err)
	case setAside:
		m, attempts := u.Messages[max(at, 0)], 1
		if m.Parked != nil { // it may have failed before it waited for this program
			attempts += m.Parked.Attempts
		}
		SetAside(m, d, err, attempts)
		if isOnly(err) {
			msgs = append(a.finishOthers(ctx, r.owner, d, at), msgs[len(u.Messages):]...)
		}
	case split:
		r.culprit = u.Messages[at]
	default:
		a.size = max(len(u.Messages)/2, 1)
	}
	return msgs
}

// finishOthers finishes the messages of a unit that were applied although the unit failed, because the
// store cannot undo them. It returns the others: the one that failed, and those to set aside.
func (a *Applier) finishOthers(ctx context.Context, o Owner, d *unit.Done, failed int) (rest []*model.Message) {
	part := &unit.Unit{Intent: d.Unit.Intent}
	part.Intent.Advance = nil // the checkpoint has not moved
	done := &unit.Done{Unit: part, Ran: d.Ran, Reports: d.Reports}
	for i, m := range d.Unit.Messages {
		if i == failed || d.Rows[i] != nil {
			rest = append(rest, m)
			continue
		}
		part.Messages = append(part.Messages, m)
		done.Fates, done.Rows = append(done.Fates, d.Fates[i]), append(done.Rows, nil)
	}
	_ = o.Committed(ctx, done)
	a.Finish(done)
	return rest
}

// closingPause is how long a delivery waits before it is tried again, while the reader of the log
// applies the last events before the projector goes live.
const closingPause = 10 * time.Millisecond

func (a *Applier) grow(took time.Duration, alone bool) {
	switch {
	case alone:
		a.size = 1
	case took > time.Second:
		a.size = max(cmp.Or(a.size, a.Batch)/2, 1)
	case took < time.Second/2:
		a.size = min(2*cmp.Or(a.size, a.Batch), a.Batch)
	}
}

// PauseUnit waits before a unit of n messages is tried again, after an error that was not the
// fault of a message. A transient error halves the unit. After a deadlock, units of several messages run
// one at a time for a minute.
func (a *Applier) PauseUnit(ctx context.Context, n, tries int, err error) {
	h := a.Worker.Host
	if provider.ClassOf(err) == provider.ClassTransient {
		a.size = max(n/2, 1)
	}
	if provider.CodeOf(err) == provider.CodeDeadlock {
		a.Worker.Group.Serial.Store(h.Clock().Add(time.Minute).UnixNano())
	}
	delay, _ := h.Retry.Delay(tries) // cannot fail: tries ≥ 1, and the schedule is checked
	if h.Observer.Retried != nil {
		h.Observer.Retried(a.Worker.Projector.Name, provider.ClassOf(err), delay)
	}
	h.Report(slog.LevelWarn, "unit failed", err,
		"projector", a.Worker.Projector.Name, "messages", n, "tries", tries, "again_in", delay)
	a.Worker.Loop.Rest()
	model.Wait(ctx, delay)
}

// SetAside makes the next unit of m set m aside, after this number of attempts.
func SetAside(m *model.Message, d *unit.Done, cause error, attempts int) {
	m.Aside = &model.Aside{Cause: cause, Attempts: attempts, Handler: d.Handler}
	if d.Handler == "" && len(m.Handlers) == 1 {
		m.Aside.Handler = m.Handlers[0].Name
	}
}

// Finish acks and reports the messages of a committed unit.
func (a *Applier) Finish(d *unit.Done) {
	h := a.Worker.Host
	for _, report := range d.Reports {
		report()
	}
	if d.Ran {
		a.Worker.Group.Applied.Add(1)
	}
	for i, m := range d.Unit.Messages {
		switch row := d.Rows[i]; {
		case row != nil:
			a.reportParked(m, row)
		case m.Parked != nil && d.Fates[i] != unit.Changed && h.Observer.Replayed != nil:
			h.Observer.Replayed(a.Worker.Projector.Name)
		}
		if m.Parked == nil {
			m.Done()
		}
	}
}

func (a *Applier) reportParked(m *model.Message, row *provider.Aside) {
	h, p := a.Worker.Host, &row.Parked
	if h.Observer.Parked != nil {
		h.Observer.Parked(a.Worker.Projector.Name, p.Handler, p.Class, p.Code)
	}
	if row.After >= 0 && p.Class != provider.ClassHeld {
		time.AfterFunc(row.After, h.Scan.Send)
	}
	if m.Aside == nil { // it waits behind another one, or is suspect
		a.Report(slog.LevelDebug, "parked", m, &provider.Error{Class: p.Class, Code: p.Code}, p.Attempts)
		return
	}
	if h.Observer.Handled != nil && m.Aside.Handler != "" {
		h.Observer.Handled(m.Aside.Handler, false, m.Waited(h.Clock()), 0, m.Aside.Cause)
	}
	what := "parked"
	if row.After < 0 {
		what = "stuck"
	}
	a.Report(slog.LevelWarn, what, m, m.Aside.Cause, p.Attempts)
	if m.Parked == nil {
		a.brake.count(m.Aside, a.Worker.Group.Applied.Load())
	}
	if (row.After < 0 || p.Class == provider.ClassUnable) && a.Worker.Projector.Rules.Halts {
		h.Halt(context.WithoutCancel(m.Msg.Context()))
	}
}

// Report logs what happened to a message.
func (a *Applier) Report(level slog.Level, what string, m *model.Message, err error, attempts int) {
	a.Worker.Host.Report(level, what, err, "projector", a.Worker.Projector.Name, "topic", m.Topic, "message_id", m.ID, "type", m.Raw.Type,
		"attempts", attempts)
}
