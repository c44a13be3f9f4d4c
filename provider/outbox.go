package provider

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Outbox is a store for relays.
//
// An entry is open until it is published or skipped (EntryStatus.Open). It is eligible while it
// is pending, failed or claimed, and its NextAttemptAt is not in the future on the store's clock.
// The clock is read once per statement. With EntryQuery.Unordered, the conditions on earlier
// entries do not apply.
type Outbox interface {
	// ClaimEntries does what the function ClaimEntries does, in one transaction: see claim.Portable. t
	// is complete (claim.Terms.WithDefaults).
	ClaimEntries(ctx context.Context, q EntryQuery, t claim.Terms) ([]Entry, error)

	// MarkEntries changes claimed entries in one transaction.
	//   - A mark whose token is not that of the entry's claim changes nothing: late has its Seq,
	//     in any order. Of two marks of one entry the first counts, and the second is late.
	//   - If an entry is published, held entries of its topic and key become pending in the same
	//     transaction: the first of them, and at least the next one.
	//   - A mark that CheckMarks refuses is an *eventstore.InvalidError, and nothing is changed.
	MarkEntries(ctx context.Context, marks []EntryMark) (late []int64, err error)
}

// EntryMaintainer is a capability of an Outbox: maintenance that relays do every few seconds or
// minutes. If the Outbox also has the capability Leases, one relay at a time deletes entries.
type EntryMaintainer interface {
	// HoldEntries holds at most limit pending entries that wait for long: those behind an entry
	// of their topic and key that is abandoned, or failed with at least long of its backoff left.
	// It returns their number.
	//   - A held entry keeps its place: no later entry of its key is claimed before it. It
	//     becomes pending again, with its attempts unchanged, after the entry that it waits for
	//     is published, requeued or skipped.
	//   - Held entries without an entry before them, for example because a person deleted the
	//     row, become pending too.
	//   - Concurrent claims may omit entries of the keys that it reads.
	HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error)

	// DeleteEntries reads some thousand entries after Seq after, in order, and deletes those that
	// were published or skipped longer ago than keep says; no published ones if keep.Published is
	// zero. keep is complete (EntryRetention.WithDefaults). It returns the number of deleted
	// entries, and the Seq to continue after; 0 at the end.
	DeleteEntries(ctx context.Context, keep EntryRetention, after int64) (n int, next int64, err error)
}

// Waker is a capability of an Outbox: a hint that entries were added.
type Waker interface {
	// Enqueued returns a channel that is closed when entries are next added through this value,
	// in this process. Entries that other processes or a caller's transaction add may not close
	// it.
	Enqueued() <-chan struct{}
}

// Enqueuer is the outbox in a transaction that the caller owns, such as the result of
// sqlite.DB.InTx.
type Enqueuer interface {
	// Enqueue adds messages to the outbox if the transaction commits.
	//   - A message is ignored if its id is already in the outbox for that topic.
	//   - A message that OutboxMessage.Normalize refuses is an *eventstore.InvalidError: nothing
	//     is added, and the transaction stays usable.
	Enqueue(ctx context.Context, ms ...OutboxMessage) error
}

// MarkerMaintainer is a capability of a provider: it finds and deletes markers of handlers that
// were removed.
type MarkerMaintainer interface {
	// MarkedHandlers returns the handlers that have markers of any generation, sorted.
	MarkedHandlers(ctx context.Context) ([]string, error)
	// DropMarkers deletes at most limit markers of handler, of any generation, and returns their
	// number. Zero means that none is left, except those that other transactions are deleting.
	DropMarkers(ctx context.Context, handler string, limit int) (int, error)
}
