package projector

import (
	"context"
	"errors"
	"fmt"
)

// Class says what to do about an error of a unit of work.
type Class int

const (
	// UnknownClass: counted, retried with backoff, then parked. What a handler returns, unless it says otherwise.
	UnknownClass Class = iota
	// Transient: the world's fault (a busy or absent database). Retried with backoff, without limit, never counted.
	Transient
	// PermanentClass: no retry can help. Parked at once.
	PermanentClass
	// Shutdown: the runner's drain is over. Never counted, never parked, not acked.
	Shutdown
	// Ambiguous: COMMIT was sent and its reply lost. Done again; the marker decides.
	Ambiguous
	// HeldClass: no error, but why a message is parked: it waits behind an earlier one of its key.
	HeldClass
)

func (c Class) String() string {
	switch c {
	case Transient:
		return "transient"
	case PermanentClass:
		return "permanent"
	case Shutdown:
		return "shutdown"
	case Ambiguous:
		return "ambiguous"
	case HeldClass:
		return "held"
	default:
		return "unknown"
	}
}

// ParseClass is the inverse of Class.String.
func ParseClass(s string) Class {
	for c := UnknownClass; c <= HeldClass; c++ {
		if c.String() == s {
			return c
		}
	}
	return UnknownClass
}

// ErrNoMarkers: what was asked needs a projector with Options.Markers.
var ErrNoMarkers = errors.New("the projector keeps no markers")

// Error is an error with its class, and its code where it has one.
type Error struct {
	Class Class
	Code  string // SQLSTATE, a database's own code, or a word
	Err   error
}

func (e *Error) Error() string {
	if e == nil { // a handler may return it by mistake, as an error that is not nil
		return "unknown: a nil *projector.Error"
	}
	if e.Code == "" {
		return fmt.Sprintf("%s: %v", e.Class, e.Err)
	}
	return fmt.Sprintf("%s (%s): %v", e.Class, e.Code, e.Err)
}

// Unwrap is the error itself.
func (e *Error) Unwrap() error {
	if e == nil {
		return nil
	}
	return e.Err
}

// DeadlineCode is the code of an unknown *Error with which a unit says that the handler took too long.
const DeadlineCode = "deadline"

// tookTooLong tells whether err says so.
func tookTooLong(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e != nil && e.Class == UnknownClass && e.Code == DeadlineCode
}

// Permanent marks err as not worth a retry: the message is parked at once. It is nil where err is.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Class: PermanentClass, Err: err}
}

// ClassOf classes any error: that of the *Error in it, else UnknownClass.
func ClassOf(err error) Class {
	if e, ok := errors.AsType[*Error](err); ok && e != nil {
		return e.Class
	}
	return UnknownClass
}

// codeOf is the code of the *Error in err, else a word for what is known about it.
func codeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok && e != nil && e.Code != "" {
		return e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return DeadlineCode
	}
	return ""
}
