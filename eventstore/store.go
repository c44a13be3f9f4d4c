package eventstore

import (
	"context"
	"iter"
)

// Expected is the version that a stream must be at; any value ≥ 0 is exact.
type Expected int64

const (
	Any      Expected = -1 // whatever version the stream is at
	NoStream Expected = 0  // the stream must not be there yet
)

// Appended says where a stream stands after an append. It is also the token to
// wait on (projector.Projector.Wait).
type Appended struct {
	Stream   string
	Version  int64 // of the last of the events
	Position int64 // of the last of the events
	Count    int   // how many events: versions Version-Count+1 to Version; 0 where Update decided nothing
	Replayed bool  // the same ids were there already; nothing was written
}

// Store keeps streams.
type Store interface {
	// Append adds events to stream, with the outbox entries that the provider's route makes of them.
	//   - All of it commits, or nothing does.
	//   - A stream at another version than expected is a *ConflictError (errors.Is ErrConflict).
	//   - If the ids of all events are in this stream already, in order, at expected+1 and on (for Any:
	//     anywhere, contiguous), nothing is written and the stored place is returned, Replayed set,
	//     whatever was appended later. If only some are, or one is elsewhere, it is ErrEventIDReused.
	//   - Input that no database could store is an *InvalidError (errors.Is ErrInvalid), before any SQL.
	//   - A stream whose row is missing or behind its events, because somebody changed it, is ErrDamaged.
	//   - A lost COMMIT reply is resolved inside, by id; never by a blind second try. Where that does not
	//     succeed, it is ErrAmbiguous.
	Append(ctx context.Context, stream string, expected Expected, events []Draft) (Appended, error)

	// ReadStream yields the events of stream whose version is greater than afterVersion, in order.
	//   - It reads page by page and holds no cursor, lock or connection while the caller's loop body runs.
	//   - A stream that is not there yields nothing; a name that none can have, an *InvalidError.
	//   - An error is yielded last, with a zero Raw.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[Raw, error]
}

// TxStore is a Store inside a transaction that its caller owns (such as sqlite.DB.InTx returns).
//   - It never commits, rolls back or retries.
//   - Every error that Append documents leaves the transaction usable, with nothing of that append in it, but where a provider names
//     an exception (postgres.Tx.Append has one).
type TxStore interface {
	Store
	CallersTx()
}
