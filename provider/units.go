package provider

import "context"

// Units runs units of work. All errors are *Error, also those of handlers.
type Units[Tx any] interface {
	// Do opens u, calls run with the result of the opening, and commits: the writes of run
	// through tx, the Closing that it returned, and the markers. It commits all of these, or
	// nothing.
	//   - The opening has these steps, each with a new snapshot: the shared lock of the projector
	//     (see Switch); the markers, sorted, while each insert waits for a concurrent unit that
	//     writes the same marker; which lanes are held, and they stay held until the unit ends;
	//     which messages other runners have in flight.
	//   - If the projector has a checkpoint, its mode and position are read in the same step as the
	//     markers. They decide about messages with Mark and a Position (Found.Left, Found.Fresh).
	//     The position is read again in a later step, because markers may have been deleted in
	//     between (Progress.PruneApplied). Unit.Advance locks the checkpoint.
	//   - A unit of a generation whose checkpoint has ModeEnded fails with ErrEnded, whatever its
	//     messages are.
	//   - The unit locks the lanes of parked messages. If another unit has the lane, the message
	//     is not fresh, but if it has attempts (Parking.Try), the unit waits for the lane.
	//   - run may be called again after its earlier writes are undone. Its first call may be
	//     before any statement is sent, with a Found in which all messages are fresh. Neither
	//     happens with u.Once or u.Careful.
	//   - run must not end tx. If it does, the unit fails with a permanent *Error.
	//   - In a store with one writer, run's ctx shows that the unit is open: a call with it that would wait for the unit
	//     is ErrInTransaction.
	//   - If run panics or calls runtime.Goexit, nothing is committed.
	//   - If run does not return within a second after ctx ends, the transaction is rolled back
	//     and its locks are released. Do returns when run returns.
	//   - If run only queues statements, and ctx ends before they finish, the error is
	//     ClassUnknown with CodeDeadline if they are undone, and ClassAmbiguous if they may have
	//     been committed.
	//   - An error without a class becomes permanent or unknown (HandlerError). The end of ctx is
	//     never permanent. A deadlock is transient with CodeDeadlock.
	//   - The error contains a *MessageError if the statement that failed belongs to a message
	//     (Found.Begin).
	Do(ctx context.Context, u Unit, run func(ctx context.Context, tx Tx, found Found) (Closing, error)) error

	// Keeps returns what Do commits together with the writes of run. A wrapper must pass it on.
	Keeps() Keeps
}
