package projector

import (
	"errors"

	"github.com/kinora-go/kinora/provider"
)

// Class says how a runner treats an error. Package provider defines each.
type Class = provider.Class

// The classes of errors.
const (
	ClassUnknown   = provider.ClassUnknown
	ClassTransient = provider.ClassTransient
	ClassPermanent = provider.ClassPermanent
	ClassShutdown  = provider.ClassShutdown
	ClassAmbiguous = provider.ClassAmbiguous
	ClassHeld      = provider.ClassHeld
)

// Error is an error with its class, and its code if it has one. A handler may return one to choose the class.
type Error = provider.Error

// ClassOf returns the class of the *Error in err, or ClassUnknown.
func ClassOf(err error) Class { return provider.ClassOf(err) }

// Permanent marks err as not worth a retry: the message is stuck at once. It is nil if err is.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Class: ClassPermanent, Err: err}
}

// Codes of parked messages, besides SQLSTATEs and the codes of providers.
const (
	codeMalformed    = "malformed"    // it is not in the wire form
	codeUnregistered = "unregistered" // its type, or that version of it, is not registered; due again once it is
	codeUndecodable  = "undecodable"  // its data is not what its type says
	codeNoHandler    = "no_handler"   // it was parked for a handler that this program does not have
	codePanic        = "panic"
	codeGoexit       = "goexit"  // the handler called runtime.Goexit
	codeStuck        = "stuck"   // the handler did not return after its timeout
	codeCrashed      = "crashed" // a process ended while it had the message in hand
)

var (
	// ErrParked: the event is parked for this projector, and waits for a person.
	ErrParked = errors.New("the event is parked")
	// ErrSkipped: the event was parked, and a person gave it up.
	ErrSkipped = errors.New("the event was skipped")
	// ErrPruned: the marker of the event may have been deleted, as it is older than the window of markers.
	ErrPruned = errors.New("markers of that time are pruned: the event may have been applied")
	// ErrNoMarkers: the projector has no markers, so there is no record of what it applied.
	ErrNoMarkers = errors.New("the projector keeps no markers")
	// ErrHalted: a message of a projector with Halt is stuck. The runner starts again once it is replayed or skipped.
	ErrHalted = errors.New("the projector is halted: a message is stuck")
	// ErrInput: what was asked for is not possible; nothing was done.
	ErrInput = provider.ErrInput
	// ErrNoDryRun: the provider cannot show what a unit changes.
	ErrNoDryRun = errors.New("this provider has no dry runs")
)

var (
	errBegin     = &Error{Class: ClassTransient, Code: "begin", Err: errors.New("the store did not answer in time")}
	errNoHandler = &Error{Class: ClassPermanent, Code: codeNoHandler, Err: errors.New("this program does not have its handler")}

	errGoexit = &Error{Class: ClassUnknown, Code: codeGoexit, Err: errors.New("the handler called runtime.Goexit")}
	errStuck  = &Error{Class: ClassPermanent, Code: codeStuck, Err: errors.New("the handler did not return after its timeout, and may still run")}
)
