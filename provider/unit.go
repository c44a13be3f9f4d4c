package provider

import "time"

// Unit describes one transaction of a projector. Its messages are either all deliveries or all
// parked ones.
type Unit struct {
	Projector  string
	Generation int       // see Build
	Messages   []Message // in order; no id twice
	// Careful, if not nil, is the worker that runs the unit. Then Found.Suspect reports the
	// messages that workers of other runners have in flight (Liveness.InFlight), and the commit
	// deletes the messages in flight of this worker.
	Careful *Worker
	// Reader, if not nil, is the reader of the log that read the messages. They are applied in every
	// mode, and the checkpoint has its mode and token until the unit ends. If they are others, the
	// error is ErrFenced.
	Reader *Reader
	// Advance, if not nil, moves the checkpoint in the same transaction. Then no markers are
	// inserted: a message is fresh for a handler that has no marker of it. The unit may have no
	// messages.
	Advance *Advance
	// Segment, if not zero, makes Reader and Advance concern a segment instead of the checkpoint:
	// its position and its token. The mode is that of the checkpoint. The error is ErrFenced also if
	// the current Split does not have the segment.
	Segment int
	// Restore: the messages are recorded as parked next to the read model, but they are not parked. They
	// were applied once, and the read model has gone back to an earlier state. They are applied again.
	Restore bool
	// Checkpointed: the projector has a checkpoint. If the read model's store has none, it has lost it.
	Checkpointed bool
	// Timeout, if not zero, is how long each handler may take. A store whose statements wait for locks lets one wait for
	// half of it, at most: the error is then ClassTransient, as the message is not to blame.
	Timeout time.Duration
	// Serial: the unit waits until no other serial unit of the projector is open. Runners set it
	// after deadlocks.
	Serial bool
	// Switch, if not nil, makes the unit change the live generation, or compare two generations.
	Switch *Switch
	// Once: run is called only once, after the opening, because its effects cannot be undone.
	Once bool
	// DryRun, if not nil, makes the unit a dry run: it is rolled back instead of committed. Then
	// DryRun is called with the rows that the handlers changed, without those of the provider's
	// own tables, ordered by table and key. It is not called if Do returns an error. In a dry run
	// a parked message may be stuck.
	DryRun func([]Change)
}

// Message is one message of a unit.
type Message struct {
	ID       string    // may be empty
	Lane     Lane      // the lane that is held if the message is parked
	Handlers []Handler // the handlers to run, in order; may be empty
	Mark     bool      // insert a marker for each of Handlers
	// Position is that of an event of the log that the projector reads; 0 if the message is none.
	// Its marker is stored with it.
	Position int64
	Parked   *Parked // the parked message as it was listed; nil for a delivery
}

// Handler has the names of a handler.
type Handler struct {
	Name string // the full name, such as "product-ratings/posted"
	// Was are its earlier full names. A marker with one of them counts, and new markers are
	// written with all names.
	Was []string
}
