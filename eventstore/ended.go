package eventstore

import (
	"errors"
	"reflect"
)

// TypeEnded is the stored name of Ended.
const TypeEnded = "kinora.ended"

// Ended is the last event of a stream, which ends it for ever. Return it last:
//
//		repo.Update(ctx, id, func(r *Review) ([]any, error) { return []any{Withdrawn{}, eventstore.Ended{}}, nil })
//
//	  - After it, every append to the stream is ErrStreamEnded, also a concurrent one.
//	  - Every table of types has it. The route publishes it like the other events of the stream.
//	  - A projector whose read model has rows of the stream handles it like any event, with
//	    projector.On of an Event[Ended], and deletes them. It gets the ends of all categories that it reads.
//	    Handlers of an interface do not get it.
//	  - Apply of an aggregate gets it too. Load of a stream that has ended still returns the aggregate; once
//	    the stream is archived, only Ended was applied to it.
//	  - Archive deletes the events before it. Then readers of the log, and so a rebuild, get only Ended: its
//	    handler must accept that there are no rows.
type Ended struct{}

var endedType = reflect.TypeFor[Ended]()

var (
	// ErrStreamEnded: the stream has ended, so nothing can be appended to it.
	ErrStreamEnded = errors.New("the stream has ended")
	// ErrNotEnded: only the events of a stream that has ended can be archived.
	ErrNotEnded = errors.New("the stream has not ended: append Ended first")
	// ErrNotPassed: projectors have not applied the events that are to be archived. The error names them.
	ErrNotPassed = errors.New("projectors have not applied the events of the stream")
)

// ArchiveOptions are the options of Archive. The zero value is the default.
type ArchiveOptions struct {
	// Ignore are projectors that need not have passed the stream: those that no longer run, and those
	// whose checkpoint is in another database, such as Redis. For these, ask Projector.Wait before.
	Ignore []string
}

// ends reports whether the last of the events is Ended.
func ends(events []any) bool {
	return len(events) > 0 && reflect.TypeOf(events[len(events)-1]) == endedType
}
