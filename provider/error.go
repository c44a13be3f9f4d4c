package provider

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
)

// Class says how a runner treats an error of a unit.
type Class int

const (
	// ClassUnknown: counted, and tried again with a backoff; stuck after the last attempt. The default for handlers.
	ClassUnknown Class = iota
	// ClassTransient: not the fault of the message, for example a busy or unreachable database.
	// Tried again with a backoff, without limit, and never counted.
	ClassTransient
	ClassPermanent // no retry can help: the message is stuck at once
	ClassShutdown  // the runner stops: not counted, not parked, not acked, so the broker redelivers the message
	ClassAmbiguous // the reply to COMMIT was lost: the unit runs again, and skips messages whose markers were committed
	ClassHeld      // no error: the message is parked only because it waits behind an earlier one of its key
	// ClassUnable: the program lacks what the message needs (Parked.Needs), such as its schema version. The message waits,
	// without attempts, for a program that has it.
	ClassUnable
)

var classes = [...]string{"unknown", "transient", "permanent", "shutdown", "ambiguous", "held", "unable"}

func (c Class) String() string { return wordOf(classes[:], c, ClassUnknown) }

// wordOf returns the word of a constant, or that of other for a value that is none.
func wordOf[T ~int](words []string, value, other T) string {
	if value < 0 || int(value) >= len(words) {
		return words[other]
	}
	return words[value]
}

// ParseClass is the inverse of Class.String. Any other text is ClassUnknown.
func ParseClass(s string) Class {
	return Class(max(slices.Index(classes[:], s), int(ClassUnknown)))
}

// MarshalText returns String.
func (c Class) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText is ParseClass.
func (c *Class) UnmarshalText(text []byte) error {
	*c = ParseClass(string(text))
	return nil
}

// Codes of an Error that all providers use. Others are SQLSTATEs, codes of a database, or words.
const (
	CodeDeadline = "deadline" // a handler took longer than its timeout
	CodeDeadlock = "deadlock" // the database ended the unit to resolve a deadlock
	// CodePartly: a part of the writes took effect, and cannot be undone. Always with ClassPermanent.
	CodePartly = "partly_applied"
)

// ErrInTransaction: a call with the context of an open transaction of the same store, such as a claim in a handler, would
// wait for it for ever. Stores with one writer at a time return it at once. Call the view of the transaction, or after it.
var ErrInTransaction error = &eventstore.InvalidError{
	Field: "ctx", Reason: "is that of an open transaction, for which the call would wait: use the transaction, or call after it",
}

// Error is an error with a class and a code.
type Error struct {
	Class Class
	Code  string // a SQLSTATE, a code of the database, or a word; may be empty
	Err   error
}

func (e *Error) Error() string {
	if e == nil { // a handler may return a nil *Error as an error that is not nil
		return "unknown: a nil *projector.Error"
	}
	if e.Code == "" {
		return fmt.Sprintf("%s: %v", e.Class, e.Err)
	}
	return fmt.Sprintf("%s (%s): %v", e.Class, e.Code, e.Err)
}

// Unwrap returns the error without its class.
func (e *Error) Unwrap() error {
	if e == nil {
		return nil
	}
	return e.Err
}

// ClassOf returns the class of the *Error in the chain of err, or ClassUnknown.
func ClassOf(err error) Class {
	if e, ok := errors.AsType[*Error](err); ok && e != nil {
		return e.Class
	}
	return ClassUnknown
}

// CodeOf returns the code of the *Error in the chain of err, or CodeDeadline for context.DeadlineExceeded.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok && e != nil && e.Code != "" {
		return e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return CodeDeadline
	}
	return ""
}

// MessageError says which message of a unit caused an error. The *Error of Units.Do wraps it if the message is known.
type MessageError struct {
	Message int // index in Unit.Messages
	// Others: all other messages of the unit that are not set aside were applied. Only without Keeps.Atomic and markers.
	Others bool
	Err    error
}

func (e *MessageError) Error() string { return e.Err.Error() }

// Unwrap returns the error without the message.
func (e *MessageError) Unwrap() error { return e.Err }

// HandlerError returns an *Error for an error that a handler returned without a class. It is
// permanent if err is eventstore.ErrInvalid, ErrEventIDReused or ErrTaskIDReused, else unknown.
func HandlerError(err error) *Error {
	switch {
	case errors.Is(err, eventstore.ErrInvalid):
		return &Error{Class: ClassPermanent, Code: "invalid", Err: err}
	case errors.Is(err, eventstore.ErrEventIDReused):
		return &Error{Class: ClassPermanent, Code: "event_id_reused", Err: err}
	case errors.Is(err, ErrTaskIDReused):
		return &Error{Class: ClassPermanent, Code: "task_id_reused", Err: err}
	}
	return &Error{Class: ClassUnknown, Err: err}
}
