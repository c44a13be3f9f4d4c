package projector

import (
	"errors"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Class says how a runner treats an error.
type Class = provider.Class

// The classes that handlers and RunnerConfig.Classify choose from. Others: go doc provider.Class.
const (
	// ClassUnknown: counted, and tried again with a backoff; stuck after the last attempt. Errors
	// of handlers have this class unless they say otherwise.
	ClassUnknown = provider.ClassUnknown
	// ClassTransient: not the fault of the message, for example a busy database. Tried again with
	// a backoff, without limit, and never counted.
	ClassTransient = provider.ClassTransient
	// ClassPermanent: no retry can help. The message is stuck at once.
	ClassPermanent = provider.ClassPermanent
)

// Error is an error with a Class, a Code (such as a SQLSTATE; may be empty) and the cause Err. A
// handler may return one to choose the class.
type Error = provider.Error

// ClassOf returns the class of the *Error in the chain of err, or ClassUnknown.
func ClassOf(err error) Class { return provider.ClassOf(err) }

// Permanent returns err with ClassPermanent: the message is stuck at once. It returns nil if err
// is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Class: ClassPermanent, Err: err}
}

var (
	// ErrParked: the event is parked for this projector, and waits for an operator.
	ErrParked = errors.New("the event is parked: replay or skip it")
	// ErrSkipped: the event was parked, and an operator skipped it.
	ErrSkipped = errors.New("the event was skipped")
	// ErrPruned: the event is older than the window of markers, so its marker may have been
	// deleted.
	ErrPruned = errors.New("the event has no marker and is older than the marker window: it may have been applied")
	// ErrNoMarkers: the projector has neither markers nor a checkpoint, so nothing records which
	// events it has applied.
	ErrNoMarkers = errors.New("no markers: Wait requires a runner FromLog, or Options.Markers and a store that keeps markers")
	// ErrHalted: a message of a projector with Halt is stuck, or this program is unable to apply it. A new runner starts
	// after it is replayed or skipped, or another program has applied it.
	ErrHalted = model.ErrHalted
	// ErrNoCheckpoint: the projector has no checkpoint, because no runner has read a log for it.
	ErrNoCheckpoint = errors.New("the projector has no checkpoint: start a runner that reads the log")
	// ErrOtherLog: the events were appended to another database or schema.
	ErrOtherLog = errors.New("the events are in another log")
	// ErrNoEvent: the log does not have the event, and it cannot appear any more.
	ErrNoEvent = errors.New("the log does not have the event")
	// ErrNotTaken: the event is before the position at which a handler began to read the log.
	ErrNotTaken = errors.New("the handler began behind the event")
	// ErrLogChanged: the log is not the one that was read. Its database was restored from a backup,
	// or it is another log.
	ErrLogChanged = model.ErrLogChanged
	// ErrForgotten: a person has forgotten the projector (Forget). The text says who, when and why. No runner of it starts
	// until Release.
	ErrForgotten = generation.ErrForgotten
	// ErrInput: an argument is invalid, and nothing was changed.
	ErrInput = provider.ErrInput
	// ErrNoDryRun: the provider cannot show the changes of a unit.
	ErrNoDryRun = errors.New("the provider has no dry runs")
)
