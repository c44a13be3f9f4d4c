package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

func (e *engine[Tx]) report(t Task, end ending, attempts int) {
	what, attrs := "task failed", []any{"kind", t.Kind, "id", t.ID}
	switch end.to {
	case Abandoned:
		what = "task abandoned"
	case Pending:
		what = "task released"
	case "":
		what = "task left to its lease"
	}
	if end.step != "" {
		attrs = append(attrs, "step", end.step)
	}
	e.log.Warn(what, e.attrs(end.err, append(attrs, "attempts", attempts, "code", end.code)...)...)
}

// inDoubt reports whether a step may have begun that is not recorded: in this run, or in an earlier one
// that did not end in order.
func (a *attempt[Tx]) inDoubt(r *Run[Tx]) bool { return a.task.Doubt || r.open }

// failed is fail after a run of the handler.
func (a *attempt[Tx]) failed(ctx context.Context, r *Run[Tx], cause error) ending {
	a.task.Doubt = a.inDoubt(r)
	end := a.fail(ctx, cause)
	end.step = r.step
	return end
}

// fail records a failure: the task is released, tried again, or abandoned.
func (a *attempt[Tx]) fail(ctx context.Context, cause error) ending {
	switch context.Cause(ctx) {
	case errLost: //nolint:errorlint // these are passed unwrapped
		return ending{}
	case errStopping:
		if errors.Is(cause, errStuck) { // the lease protects the task until the handler has returned
			return ending{err: cause}
		}
		return a.end(provider.TaskChange{To: Pending, Doubt: a.task.Doubt})
	}
	if provider.ClassOf(cause) == provider.ClassUnknown && !isPermanent(cause) {
		if e := provider.HandlerError(cause); e.Class == provider.ClassPermanent {
			cause = e
		}
	}
	c := provider.TaskChange{To: Failed, Code: codeOf(cause), Doubt: a.task.Doubt}
	c.Code = strings.ReplaceAll(strings.ToValidUTF8(c.Code[:min(len(c.Code), provider.MaxIDBytes)], ""), "\x00", "")
	attempts := int(a.hold.attempts.Load())
	switch {
	case isPermanent(cause):
		c.To = Abandoned
	case isUncounted(cause) && !errors.Is(cause, errDeadline):
		c.To, c.After = Pending, time.Second // for example an outage
	case a.cfg.Backoff.Exhausted(attempts):
		c.To = Abandoned
	default:
		c.After, _ = a.cfg.Backoff.Delay(max(attempts, 1))
	}
	end := a.end(c)
	end.err = errors.Join(cause, end.err)
	return end
}

func (a *attempt[Tx]) end(c provider.TaskChange) ending {
	c.ID, c.Token = a.task.ID, a.task.Token
	if c.To == Done || c.To == Undone || c.To == Abandoned {
		if err := a.audit(a.work, c.To, c.Code); err != nil {
			return a.unrecorded(err, c.Result)
		}
	}
	crash.Point("task: before its end")
	if c.To == Done {
		a.recording(a.hold, true)
	}
	got, err := a.change(c)
	crash.Point("task: after its end")
	if err != nil {
		return ending{err: err}
	}
	if !got.Applied {
		a.recording(a.hold, false)
		return a.refused(got)
	}
	if open := c.To == Pending || c.To == Failed || c.To == Waiting; open && c.After < a.cfg.Poll && (c.After > 0 || c.To != Waiting) {
		time.AfterFunc(c.After, func() { a.soon.Send() })
	}
	return ending{to: c.To, code: c.Code}
}

func (a *attempt[Tx]) refused(got provider.TaskChanged) ending {
	if got.Late(a.task.Token) {
		a.observeFenced(a.task.Kind)
		return ending{}
	}
	t, now := &a.task, got.Now
	t.State, t.Undo, t.Why, t.Result = now.State, now.Undo, now.Why, now.Result // Doubt was set by the claim
	return ending{again: true}
}

// unrecorded releases a task that could not be audited for the length of a lease. If its claim were
// left to end, that would count as an attempt, and a long outage of the sink would abandon the task. The
// result of a handler is kept, so that the handler does not run again.
func (a *attempt[Tx]) unrecorded(cause error, result json.RawMessage) ending {
	if a.task.Spent { // released, it would be run again
		return ending{err: cause}
	}
	c := provider.TaskChange{ID: a.task.ID, Token: a.task.Token, To: Pending, After: a.cfg.Lease, Code: codeAudit, Doubt: a.task.Doubt, Result: result}
	if a.work.Err() != nil { // the worker stops
		c.After, c.Code = 0, ""
	}
	got, err := a.change(c)
	end := ending{err: errors.Join(cause, err)}
	if got.Applied {
		end.to, end.code = Pending, c.Code
	}
	return end
}

const (
	passFor  = time.Second      // for which this worker claims no task of a kind that it has left to another one
	leaveFor = 30 * time.Second // until a task is claimed again that no other worker can end
)

// leave releases the last task of a group whose kind this worker does not define, for one that does. result is that of the
// handler, which does not run again. No attempt is counted.
func (a *attempt[Tx]) leave(result json.RawMessage) ending {
	t := &a.task
	c := provider.TaskChange{To: Pending, After: leaveFor, Code: codeUnknownGroup, Doubt: t.Doubt, Result: result}
	limited, cancel := context.WithTimeout(a.hard, claimLimit)
	defer cancel()
	workers, _ := a.workers(limited)
	able := isDefined(workers, t.Kind, t.GroupKind)
	a.mu.Lock()
	if able {
		a.passed[t.Kind], c.After = now().Add(passFor), 0
	} else if _, known := a.lacking[t.GroupKind]; !known {
		a.lacking[t.GroupKind] = now()
	}
	a.mu.Unlock()
	return a.end(c)
}

type auditError struct{ error }

func (e *auditError) Unwrap() error { return e.error }

func (a *attempt[Tx]) audit(ctx context.Context, to Status, code string) error {
	t := &a.task
	id := t.ID + "/" + string(to)
	if !to.Final() { // it may be abandoned again after a requeue
		id += fmt.Sprintf("/%d", t.Version)
	}
	return a.append(ctx, Record{ID: id, Task: t.ID, Kind: t.Kind, Group: t.Group, What: string(to), Detail: code})
}

func (a *attempt[Tx]) append(ctx context.Context, r Record) error {
	if a.cfg.Audit == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	t := &a.task
	r.By, r.At = a.cfg.Holder, now().UTC()
	crash.Point("audit: before")
	done, failed := make(chan struct{}), errors.New("it panicked or ended its goroutine")
	a.live.Add(1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				a.log.Error("audit sink panicked", "kind", t.Kind, "id", t.ID, "stack", string(debug.Stack()))
			}
			a.live.Add(-1)
			close(done)
		}()
		failed = a.cfg.Audit.Append(ctx, r)
	}()
	err := errors.New("it did not return after its timeout")
	if pauses.Returns(ctx, done, grace) {
		err = failed
	}
	crash.Point("audit: after")
	if err != nil {
		return &auditError{fmt.Errorf("audit sink: %w", err)}
	}
	return nil
}
