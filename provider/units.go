package provider

import "context"

// Units runs units of work. All errors are *Error, also those that handlers return.
type Units[Tx any] interface {
	// Do opens u, calls run with what the opening found, and commits all of it: what run wrote through tx, what it
	// returned, the markers. Or it commits nothing.
	//   - The opening is, each step with a snapshot of its own: the projector's fence, shared (see Switch); the
	//     generation; the markers, sorted, each of which waits for a concurrent unit that writes the same one;
	//     which lanes are held, which they stay until the unit ends; which messages other runners have named.
	//   - A parked message is opened by locking its lane. If another unit has the lane, the message is not fresh;
	//     but if it has attempts (Parking.Try), the unit waits for the lane.
	//   - run may be called again, with its earlier writes undone, and before anything is sent with a Found in which
	//     all is fresh; not if u.Once or u.Careful is set.
	//   - run must not end tx: then the unit fails with a permanent *Error.
	//   - If run panics or calls runtime.Goexit, nothing is committed.
	//   - If ctx ends and run does not return within a second, the transaction is broken off: nothing is committed,
	//     and others can have what it locked. Do returns when run does.
	//   - If run only queues statements, and these take until ctx ends and are undone, the error is ClassUnknown
	//     with CodeDeadline. If they may have been committed, it is ClassAmbiguous.
	//   - An error without a class becomes permanent if it is eventstore.ErrInvalid or ErrEventIDReused, else
	//     unknown. The end of ctx is never permanent. A deadlock is transient with CodeDeadlock.
	//   - The error contains a *MessageError if a statement that failed belongs to a message (Found.Begin).
	Do(ctx context.Context, u Unit, run func(ctx context.Context, tx Tx, found Found) (Closing, error)) error

	// Keeps says what Do commits together with run's writes. A wrapper passes it on.
	Keeps() Keeps

	// Switch calls fn while no unit of the projector is open, and makes the generation that fn returns the live one,
	// in the transaction of what fn writes. live is the generation until then; the first one is 1.
	// A unit waits for it, and runs in the new generation.
	Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx Tx, live int) (int, error)) error
}
