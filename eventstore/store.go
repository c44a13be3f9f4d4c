package eventstore

import (
	"context"
	"iter"
)

// Store stores streams of events.
type Store interface {
	// Append adds events to stream, with the outbox entries of the provider's route.
	//   - All of it commits, or nothing does.
	//   - If the stream is not at version expected, the error is a *ConflictError (errors.Is
	//     ErrConflict).
	//   - If the ids of all events are already in this stream, in order and contiguous, from
	//     version expected+1 on (for Any: anywhere), nothing is written. The result is their
	//     place with Replayed set, even if later events were appended. If only some ids are
	//     stored, or one is stored elsewhere, the error is ErrEventIDReused.
	//   - If the stream has ended, and the events are not stored in it, the error is ErrStreamEnded. An
	//     append ends the stream with an event of TypeEnded, which must be its last one.
	//   - Input that no database can store is an *InvalidError (errors.Is ErrInvalid), before any
	//     SQL.
	//   - If the stream's row is missing or behind its events, because a person changed it, the
	//     error is ErrDamaged.
	//   - If the reply to COMMIT is lost, Append appends again: it finds the event ids, or writes
	//     the events. If that does not succeed either, the error is ErrAmbiguous.
	Append(ctx context.Context, stream string, expected Expected, events []Draft) (Appended, error)

	// ReadStream yields the events of stream with a version greater than afterVersion, in order.
	//   - It reads in pages, and holds no cursor, lock or connection while the body of the
	//     caller's loop runs.
	//   - A stream without events yields nothing. An invalid name yields an *InvalidError.
	//   - An error is yielded last, with a zero Raw.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[Raw, error]
}

// TxStore is a Store inside a transaction that the caller owns, such as the result of
// sqlite.DB.InTx.
//   - It never commits, rolls back or retries.
//   - After any error that Append documents, the transaction is usable, and nothing of that
//     append is in it. A provider documents its exceptions (postgres.Tx.Append has one).
type TxStore interface {
	Store
	CallersTx() // marks the type: UpdateTx takes no other store
}
