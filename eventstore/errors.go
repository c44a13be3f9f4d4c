package eventstore

import (
	"errors"
	"fmt"
)

var (
	// ErrConflict is matched by *ConflictError.
	ErrConflict = errors.New("stream is at another version")
	// ErrEventIDReused: an event id is stored already, but not as the whole of this append at this place.
	// It is permanent: the same call can never succeed.
	ErrEventIDReused = errors.New("event id is already used by another append")
	// ErrAmbiguous: the database's answer to an append was lost and could not be found out, so whether the
	// events are there is not known. Append the same drafts again: it finds them, or writes them.
	ErrAmbiguous = errors.New("it is not known whether the events were written")
	// ErrDamaged: the stream has events that its row in the table of streams does not count,
	// because the row was deleted or changed. The events can be read, and appends fail until the
	// row is restored. The error says how.
	ErrDamaged = errors.New("the stream is damaged: it has events that its row does not count")
	// ErrUnregistered: the type table does not know this event type, or not this schema version of it.
	ErrUnregistered = errors.New("event type is not registered")
	// ErrInvalid is matched by *InvalidError.
	ErrInvalid = errors.New("invalid input")
)

// ConflictError is ErrConflict with its data.
type ConflictError struct {
	Stream   string
	Expected Expected
	Actual   int64 // the version that the stream is at; 0 where it is not there
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("stream %q is at version %d, not %d", e.Stream, e.Actual, e.Expected)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// InvalidError is ErrInvalid with its data. Nothing reached the database. Neither field holds the value.
type InvalidError struct {
	Field  string // "stream", "events[2].data"
	Reason string
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
