package projector

import (
	"context"
	"encoding/json"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// UnitOfWork is a transaction that also records that it happened. Providers implement it.
type UnitOfWork[Tx any] interface {
	// Do records w, runs apply, and puts what apply returns into the outbox: all of it commits, or nothing.
	//   - apply gets the indexes into w.Marks whose message is new to its handler, in order. Where w.Marks is not
	//     empty and none of them is new, it does not run, or has run with its effects undone; Do returns nil.
	//   - The rest of w is recorded with the marks that are new, and also where none is.
	//   - With no marks, apply always runs, with a nil fresh. A nil apply only records w.
	//   - A concurrent unit that holds the same mark is waited for: where it commits, the mark is not new.
	//   - apply may run again within one Do, its earlier effects undone.
	//   - apply must not end tx; a unit whose transaction it ended fails with a permanent *Error.
	//   - If apply panics or calls runtime.Goexit, nothing is recorded.
	//   - Where ctx ends and apply does not return within a second, its transaction is broken off: nothing is recorded,
	//     and others can have what it held. Do returns when apply does.
	//   - Where apply only queues, and what it queued takes until ctx ends and is undone, the error is an unknown *Error with DeadlineCode.
	//     It counts like a handler's own time; where it may have been done, the error is Ambiguous.
	//   - Errors are *Error: apply's own too. Where it has no class yet, it is permanent for what eventstore refuses (ErrInvalid,
	//     ErrEventIDReused), else unknown. The end of ctx is never permanent.
	Do(ctx context.Context, w Work, apply func(ctx context.Context, tx Tx, fresh []int) ([]outbox.Message, error)) error

	// Records says what of Work this provider commits together with apply's writes. A wrapper passes it on.
	Records() Records
}

// Work is what one unit records beside the handlers' writes.
type Work struct {
	Projector string       // whose read model this is
	Marks     []marker.Key // distinct; none where the projector keeps no markers
	// Park is messages to set aside; Seq, State and At are for the provider to fill in. A message is set aside once for
	// a projector and handler: where it has an id and is parked, or was skipped, the first stays; one that was replayed
	// is set aside again.
	Park []Parked
	// Behind, where it is not nil, is why the messages of Park are set aside: a parked one is in the way of this attempt. The unit
	// fails with ErrNotHeld unless that is so; and until the unit is over, what is in the way stays there.
	Behind *Attempt
	// Replay are parked messages that this unit handles, and that are no longer parked with it. With Marks, there is one for each, in
	// their order.
	Replay []Replay
	// Forget is attempts of which the count begins anew with this unit.
	Forget []Attempt
	// Done is attempts of Runner's that are no longer under way (Journal) with this unit's commit; where nothing is committed, they stay.
	Done   []Attempt
	Runner string
	// Fresh, where it is not nil, is told once all is committed, or where nothing was new, how many marks were new.
	Fresh func(marks int)
	// Rehearse, where it is not nil, makes the unit a rehearsal: everything is done, and undone instead of committed.
	// It is told the rows that the handlers changed, those of the provider's own tables left out, by table and place.
	// It is never called where Do returns an error; Fresh is not called.
	Rehearse func([]Change)
}

// Told tells Fresh.
func (w Work) Told(marks int) {
	if w.Fresh != nil {
		w.Fresh(marks)
	}
}

// Records declares which parts of a unit's work are atomic with its effects. Park says so of Park, Behind, Replay and
// Forget; a provider that declares it is a Journal.
type Records struct{ Marks, Park, Outbox, Rehearse bool }

// Change is a row that a rehearsed unit has inserted (no Before), changed, or deleted (no After).
type Change struct {
	Table  string          // with its schema, where that is not the usual one
	Before json.RawMessage // an object of its columns
	After  json.RawMessage
}
