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
	// ClassUnknown: counted, tried again with backoff, stuck after the last attempt. The class of what a handler
	// returns, unless it says otherwise.
	ClassUnknown Class = iota
	// ClassTransient: not the message's fault, such as a database that is busy or away. Tried again with backoff,
	// without limit, never counted.
	ClassTransient
	// ClassPermanent: no retry can help. Stuck at once.
	ClassPermanent
	// ClassShutdown: the runner stops. Never counted, never parked, not acked.
	ClassShutdown
	// ClassAmbiguous: COMMIT was sent and its reply was lost. The unit runs again, and its markers decide.
	ClassAmbiguous
	// ClassHeld is not an error, but the reason why a message is parked: it waits behind an earlier one of its key.
	ClassHeld
)

var classes = [...]string{"unknown", "transient", "permanent", "shutdown", "ambiguous", "held"}

func (c Class) String() string {
	if c < 0 || int(c) >= len(classes) {
		return classes[ClassUnknown]
	}
	return classes[c]
}

// ParseClass is the inverse of Class.String. Any other text is ClassUnknown.
func ParseClass(s string) Class {
	return Class(max(slices.Index(classes[:], s), int(ClassUnknown)))
}

// Codes of an Error that mean the same in every provider. Other codes are SQLSTATEs, a database's own, or words.
const (
	CodeDeadline = "deadline" // a handler took longer than its timeout
	CodeDeadlock = "deadlock" // the database ended the unit to resolve a deadlock
)

// Error is an error with its class, and its code if it has one.
type Error struct {
	Class Class
	Code  string
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

// ClassOf returns the class of the *Error in err, or ClassUnknown.
func ClassOf(err error) Class {
	if e, ok := errors.AsType[*Error](err); ok && e != nil {
		return e.Class
	}
	return ClassUnknown
}

// CodeOf returns the code of the *Error in err, or CodeDeadline for a deadline, or "".
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok && e != nil && e.Code != "" {
		return e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return CodeDeadline
	}
	return ""
}

// MessageError says which message of a unit an error belongs to. Units.Do wraps it in its *Error if it knows.
type MessageError struct {
	Message int // index in Unit.Messages
	Err     error
}

func (e *MessageError) Error() string { return e.Err.Error() }

// Unwrap returns the error without the message.
func (e *MessageError) Unwrap() error { return e.Err }

// Refused gives a class to an error that a handler returned without one: permanent if no retry can help, as with input that the
// event store refuses, else unknown.
func Refused(err error) *Error {
	switch {
	case errors.Is(err, eventstore.ErrInvalid):
		return &Error{Class: ClassPermanent, Code: "invalid", Err: err}
	case errors.Is(err, eventstore.ErrEventIDReused):
		return &Error{Class: ClassPermanent, Code: "event_id_reused", Err: err}
	}
	return &Error{Class: ClassUnknown, Err: err}
}
