package task

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/provider"
)

var (
	// ErrTimeout is the error of Wait if there was no answer in time. It is recorded: a later answer is
	// Late, and Wait returns ErrTimeout whenever the handler runs again.
	ErrTimeout = errors.New("no answer in time")
	// ErrChanged: the handler asks for other steps than the task began with. The task is abandoned
	// with the code "changed".
	ErrChanged = errors.New("the handler has other steps than the task began with: deploy the code that it began with, or patch the task")
	// ErrMisuse: a handler took two steps at the same time, or one name twice. The task is abandoned
	// with the code "misuse".
	ErrMisuse = errors.New("steps must be taken one after another, each name once")
	// ErrIDReused: a task or a group of this id exists with another kind, input, data or group.
	ErrIDReused = provider.ErrTaskIDReused
	// ErrNotDone: the task has no result.
	ErrNotDone = errors.New("the task is not done")
)

// Permanent returns err as an error for which no retry can help: the task is abandoned at once, with
// the code of a *provider.Error in err, else "permanent". It returns nil if err is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent(cmp.Or(provider.CodeOf(err), codePermanent), err)
}

// GiveUp returns an error with which a handler ends its task without success, as a decision: what
// its steps did is undone in reverse order, and the task becomes Undone. code (1 to 255 bytes) is
// stored in Task.Why.
func GiveUp(code string) error {
	if err := provider.CheckText("code of GiveUp", code, provider.MaxIDBytes); err != nil {
		return Permanent(err)
	}
	return &gaveUp{code}
}

type gaveUp struct{ code string }

func (g *gaveUp) Error() string { return "gave up: " + g.code }

// Errors with which a run ends early. Handlers return them from Step, StepTx and Wait; it makes no
// difference if they return another error or none.
var (
	errWaiting  = errors.New("the task waits: return this error")
	errUndoing  = errors.New("the task is being undone: return this error")
	errLost     = errors.New("another worker has the task: return this error")
	errStopping = errors.New("the worker stops: return this error")
)

var (
	errFenced   = errors.New("the task has changed") // rolls a unit back
	errDead     = errors.New("the run has ended: do not use a Run after its handler has returned")
	errDeadline = errors.New("the handler took longer than its timeout")
	errNoGroup  = errors.New("the kind of the group is not defined")
	errOwnTask  = fmt.Errorf("a handler must not postpone or cancel its own task in its transaction: %w", ErrMisuse)
	errPanic    = &provider.Error{Class: provider.ClassUnknown, Code: codePanic, Err: errors.New("the handler panicked")}
	errGoexit   = &provider.Error{Class: provider.ClassUnknown, Code: "goexit", Err: errors.New("the handler called runtime.Goexit")}
	errStuck    = &provider.Error{Class: provider.ClassUnknown, Code: "stuck", Err: errors.New("the handler did not return after its timeout, and may still run")}
)

// Codes of tasks. Others are SQLSTATEs, codes of handlers' errors, and Go types of errors.
const (
	codeUndecodable  = "undecodable"   // the input or a recorded result is not of the handler's type
	codeUnencodable  = "unencodable"   // the result cannot be stored
	codeTooLarge     = "too_large"     // more than provider.MaxTaskState
	codeChanged      = "changed"       // ErrChanged
	codeMisuse       = "misuse"        // ErrMisuse
	codePermanent    = "permanent"     // Permanent, of an error without a code
	codePanic        = "panic"         // the handler panicked
	codeUnknownGroup = "unknown_group" // the worker does not define the kind of the group that it would complete
	codeAudit        = "audit"         // the audit sink failed
)

func permanent(code string, err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: code, Err: err}
}

// isEnd reports whether a run ends with err whatever its handler returns.
func isEnd(err error) bool {
	return errors.Is(err, errWaiting) || errors.Is(err, errUndoing) || errors.Is(err, errLost) ||
		errors.Is(err, errStopping) || errors.Is(err, errFenced) || isPermanent(err)
}

func isPermanent(err error) bool {
	return provider.ClassOf(err) == provider.ClassPermanent || errors.Is(err, ErrChanged) || errors.Is(err, ErrMisuse)
}

// isUncounted reports whether err is not the fault of the task.
func isUncounted(err error) bool {
	switch provider.ClassOf(err) {
	case provider.ClassTransient, provider.ClassAmbiguous, provider.ClassShutdown:
		return true
	}
	return false
}

// codeOf returns the code of an error, which is stored: a word or a class, never its text.
func codeOf(err error) string {
	switch {
	case errors.Is(err, ErrChanged):
		return codeChanged
	case errors.Is(err, ErrMisuse):
		return codeMisuse
	case errors.Is(err, errDeadline):
		return provider.CodeDeadline
	}
	if code := provider.CodeOf(err); code != "" {
		return code
	}
	if decided := (*gaveUp)(nil); errors.As(err, &decided) { // by an undo
		return provider.WhatGaveUp
	}
	return errclass.Of(err)
}

// causeOf returns err, and errDeadline with it if that ended ctx.
func causeOf(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errDeadline) && !errors.Is(err, errDeadline) {
		return fmt.Errorf("%w: %w", errDeadline, err)
	}
	return err
}
