package eventstore

import (
	"context"
	"iter"
)

// Store stores streams of events.
type Store interface {
	// Append adds events to stream, with the outbox entries that the provider's route makes for them.
	//   - All of that commits, or nothing does.
	//   - A stream at another version than expected is a *ConflictError (errors.Is ErrConflict).
	//   - If the ids of all events are in this stream already, in order and contiguous, from expected+1 on (for Any:
	//     anywhere), nothing is written. The result is their place with Replayed set, also if later events were
	//     appended. If only some of the ids are stored, or one is stored elsewhere, it is ErrEventIDReused.
	//   - Input that no database can store is an *InvalidError (errors.Is ErrInvalid), before any SQL.
	//   - If a stream's row is missing or behind its events, because another program changed it, the
	//     error is ErrDamaged.
	//   - If the reply to COMMIT is lost, Append looks for the event ids. If it cannot, the result is ErrAmbiguous.
	Append(ctx context.Context, stream string, expected Expected, events []Draft) (Appended, error)

	// ReadStream yields the events of stream whose version is greater than afterVersion, in order.
	//   - It reads page by page and holds no cursor, lock or connection while the caller's loop body runs.
	//   - A stream without events yields nothing. An invalid name yields an *InvalidError.
	//   - An error is yielded last, with a zero Raw.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[Raw, error]
}

// TxStore is a Store inside a transaction that the caller owns, such as the result of sqlite.DB.InTx.
//   - It never commits, rolls back or retries.
//   - After any error that Append documents, the transaction is usable and has nothing of that append in it. A provider
//     documents its exceptions (postgres.Tx.Append has one).
type TxStore interface {
	Store
	CallersTx()
}
