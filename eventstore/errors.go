package eventstore

import (
	"errors"
	"fmt"
)

var (
	// ErrConflict: the stream is not at the expected version. The error is a *ConflictError.
	ErrConflict = errors.New("stream is at another version")
	// ErrEventIDReused: an event id of this append is already stored, with other events or at
	// another place. The same call can never succeed.
	ErrEventIDReused = errors.New("event id is already used by another append")
	// ErrAmbiguous: the reply to a commit was lost, and the store could not be asked again. The
	// events may be stored. After Append, append the same drafts again: the events are found, or
	// written. After Transact of a provider, read the stored data before you repeat it.
	ErrAmbiguous = errors.New("the commit may have taken effect: append the same drafts again, or read the stored data")
	// ErrDamaged: the stream has events that its row in the table of streams does not count,
	// because a person deleted or changed the row. The events can be read. Appends fail until the
	// row is restored; the error has the SQL for that.
	ErrDamaged = errors.New("the stream is damaged: it has events that its row does not count")
	// ErrUnregistered: the event type, or this schema version of the type, is not in Types.
	ErrUnregistered = errors.New("event type is not registered")
	// ErrInvalid: no database can store the input. The error is an *InvalidError.
	ErrInvalid = errors.New("invalid input")
)

// ConflictError says which version the stream has. errors.Is(err, ErrConflict) is true for it.
type ConflictError struct {
	Stream   string
	Expected Expected
	Actual   int64 // the version of the stream; 0 if it has no events
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("stream %q is at version %d, expected %d", e.Stream, e.Actual, e.Expected)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// InvalidError says which field is invalid, and why. No SQL was sent. errors.Is(err, ErrInvalid)
// is true for it. Neither Field nor Reason contains the value.
type InvalidError struct {
	Field  string // such as "stream" or "events[2].data"
	Reason string // such as "must not be empty"
}

func (e *InvalidError) Error() string { return e.Field + ": " + e.Reason }

// Is makes errors.Is(err, ErrInvalid) true.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// invalid returns an *InvalidError unless reason is empty.
func invalid(field, reason string) error {
	if reason == "" {
		return nil
	}
	return &InvalidError{Field: field, Reason: reason}
}
