package provider

import (
	"context"
	"encoding/json"
	"time"
)

// Unit describes one transaction of a projector. Its messages are either all deliveries or all
// parked ones.
type Unit struct {
	Projector  string
	Generation int       // see Build
	Messages   []Message // in order; no id twice
	// Careful, if not nil, is the worker that runs the unit. Then Found.Suspect reports the messages that
	// other runners have in flight (Liveness.InFlight), and the commit deletes those of this worker.
	Careful *Worker
	// Reader, if not nil, is the reader of the log that read the messages. They are applied in every mode.
	// The error is ErrFenced unless the checkpoint has its mode and token until the unit ends.
	Reader *Reader
	// Advance, if not nil, moves the checkpoint in the same transaction. Then no markers are inserted: a
	// message is fresh for a handler that has no marker of it. The unit may have no messages.
	Advance *Advance
	// Segment, if not zero, makes Reader and Advance concern the position and the token of a segment, with
	// the mode of the checkpoint. The error is ErrFenced also if the current Split does not have it.
	Segment int
	// Restore: the messages are recorded as parked next to the read model, but they are not parked: they were
	// applied once, and the read model has gone back to an earlier state. They are applied again.
	Restore bool
	// Checkpointed: the projector has a checkpoint. If the read model's store has none, it has lost it.
	Checkpointed bool
	// Timeout, if not zero, is how long each handler may take. A store whose statements wait for locks lets one wait for
	// half of it, at most: the error is then ClassTransient, as the message is not to blame.
	Timeout time.Duration
	Serial  bool    // wait until no other serial unit of the projector is open; runners set it after deadlocks
	Switch  *Switch // if not nil, change the live generation, or compare two generations
	Once    bool    // run is called only once, after the opening, because its effects cannot be undone
	// DryRun, if not nil, makes the unit a dry run: it is rolled back, and unless Do returns an error, DryRun
	// is called with the rows that the handlers changed, without those of the provider's own tables, ordered
	// by table and key. In a dry run a parked message may be stuck.
	DryRun func([]Change)
}

// Message is one message of a unit.
type Message struct {
	ID       string    // may be empty
	Lane     Lane      // the lane that is held if the message is parked
	Handlers []Handler // the handlers to run, in order; may be empty
	Mark     bool      // insert a marker for each of Handlers
	// Position is that of an event of the log that the projector reads, and stored with its marker; 0 if the
	// message is none.
	Position int64
	Parked   *Parked // the parked message as it was listed; nil for a delivery
}

// Handler has the names of a handler.
type Handler struct {
	Name string   // the full name, such as "product-ratings/posted"
	Was  []string // its earlier full names: a marker with one of them counts, and new markers have all names
}

// Units runs units of work. All errors are *Error, also those of handlers.
type Units[Tx any] interface {
	// Do opens u, calls run with the result of the opening, and commits the writes of run through tx, the
	// Closing that it returned, and the markers: all of these, or nothing.
	//   - The opening has these steps, each with a new snapshot: the shared lock of the projector (see
	//     Switch); the markers, sorted, while each insert waits for a concurrent unit that writes the same
	//     marker; which lanes are held, and they stay held until the unit ends; which messages other runners
	//     have in flight.
	//   - If the projector has a checkpoint, its mode and position are read in the same step as the markers.
	//     They decide about messages with Mark and a Position (Found.Left, Found.Fresh). The position is read
	//     again in a later step, because Progress.PruneApplied may have deleted markers in between.
	//     Unit.Advance locks the checkpoint.
	//   - A unit of a generation whose checkpoint has ModeEnded fails with ErrEnded, whatever its messages are.
	//   - The unit locks the lanes of parked messages. If another unit has the lane, the message is not
	//     fresh, but if it has attempts (Parking.Try), the unit waits for the lane.
	//   - run may be called again after its earlier writes are undone. Its first call may be before any
	//     statement is sent, with a Found in which all messages are fresh. Neither happens with u.Once or
	//     u.Careful.
	//   - If run ends tx, the unit fails with a permanent *Error. If it panics or calls runtime.Goexit,
	//     nothing is committed.
	//   - In a store with one writer, run's ctx shows that the unit is open: a call with it that would wait for the unit
	//     is ErrInTransaction.
	//   - If run does not return within a second after ctx ends, the transaction is rolled back and its locks
	//     are released. Do returns when run returns.
	//   - If run only queues statements, and ctx ends before they finish, the error is ClassUnknown with
	//     CodeDeadline if they are undone, and ClassAmbiguous if they may have been committed.
	//   - An error without a class becomes permanent or unknown (HandlerError). The end of ctx is never
	//     permanent. A deadlock is transient with CodeDeadlock. The error contains a *MessageError if the
	//     statement that failed belongs to a message (Found.Begin).
	Do(ctx context.Context, u Unit, run func(ctx context.Context, tx Tx, found Found) (Closing, error)) error

	// Keeps returns what Do commits together with the writes of run. A wrapper must pass it on.
	Keeps() Keeps
}

// Provider is a store for runners. Tx is the transaction type of its handlers.
type Provider[Tx any] interface {
	Units[Tx]
	Parking
	Liveness
	Records
	Progress
	Builds
	Leases
}

// Keeps lists what Units.Do can commit together with the writes of handlers.
type Keeps struct {
	// Atomic: a unit that fails has no effect. If false, messages are applied one after another, and a unit
	// that fails may have applied some: their markers show which, or without markers MessageError.Others.
	Atomic  bool
	Markers bool // markers of Message.Mark
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is supported
	Tables  bool // Unit.Switch can rename, show and compare tables
	Reset   bool // Unit.Switch can empty tables
}

// Change is a row that a dry run inserted (no Before), updated, or deleted (no After).
type Change struct {
	Table  string          `json:"table"`            // with its schema unless that is the default schema
	Before json.RawMessage `json:"before,omitempty"` // an object of the columns
	After  json.RawMessage `json:"after,omitempty"`
}
