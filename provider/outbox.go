package provider

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Outbox is what a relay requires of a store.
//
// An entry is open until it is published or skipped (EntryStatus.Open). It is eligible while it is pending, failed or
// claimed and its NextAttemptAt is not in the future on the store's clock, which is read once per statement.
// With EntryQuery.Unordered, the conditions on earlier entries do not apply.
type Outbox interface {
	// EntryCandidates reads at most limit eligible entries in order of Seq, without taking them. It omits an entry if an
	// earlier open entry of its topic and key is not eligible.
	//   - With q.Near it reads no more than limit eligible entries.
	//   - With q.Bytes it stops before the entry that would exceed them, unless that is the first.
	EntryCandidates(ctx context.Context, q EntryQuery, limit int) ([]Entry, error)

	// TakeEntry takes e if e is unchanged since it was read (status, attempts, token), still eligible, and every earlier
	// open entry of its topic and key is held by t.Token. It checks all of that in one atomic step.
	//   - Taking counts an attempt, sets the token and holder of t, and leases the entry for t.Lease.
	//   - If e was claimed and that claim crashed, e becomes suspect; at q.Attempts it is abandoned instead
	//     (LastErrorCrashed) and not taken.
	//   - If e was not taken, the result is (e, false, nil). Terms are complete (claim.Terms.WithDefaults).
	TakeEntry(ctx context.Context, e Entry, q EntryQuery, t claim.Terms) (Entry, bool, error)

	// MarkEntries changes claimed entries in one transaction, each fenced by its token.
	//   - It returns the Seqs whose token is no longer that of the entry's claim, in any order. Those are unchanged.
	//     Of two marks of one entry the first counts, and the second is late.
	//   - If an entry is published, held entries of its topic and key become pending in the same transaction: the
	//     first of them, and at least the next one.
	//   - What CheckMarks refuses is an *eventstore.InvalidError, and nothing is changed.
	MarkEntries(ctx context.Context, marks []EntryMark) (late []int64, err error)
}

// EntryMaintainer is a capability of an Outbox: what relays do for the outbox itself from time to time.
type EntryMaintainer interface {
	// HoldEntries holds at most limit pending entries that wait for long: those behind an entry of their topic and key that
	// is abandoned, or failed with at least long of its backoff left.
	//   - A held entry keeps its place: no later one of its key is claimed before it. It becomes pending again, with its
	//     attempts unchanged, once the entry that it waits for is published, requeued or skipped.
	//   - Held entries with nothing before them, for example because a person deleted it, become pending too.
	//   - It returns how many it held. Concurrent claims may omit entries of the keys that it reads.
	HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error)

	// DeleteEntries reads some thousand entries after Seq after, in order, and deletes those that have been published or
	// skipped for longer than keep says; no published ones if keep.Published is zero. keep is complete
	// (EntryRetention.WithDefaults). It returns how many it deleted, and the Seq to continue after; 0 at the end.
	DeleteEntries(ctx context.Context, keep EntryRetention, after int64) (n int, next int64, err error)
}

// Waker is a capability of an Outbox: a hint that there is something to claim.
type Waker interface {
	// Enqueued returns a channel that is closed when entries are next added through this value, in this
	// process. Entries that other processes or a caller's own transaction add may give no hint.
	Enqueued() <-chan struct{}
}

// Enqueuer is the outbox inside a transaction that the caller owns, such as the result of sqlite.DB.InTx.
type Enqueuer interface {
	// Enqueue adds messages to the outbox. They are added if the transaction commits, and only then.
	//   - A message whose id is in the outbox for that topic already is ignored.
	//   - What OutboxMessage.Normalize refuses is an *eventstore.InvalidError: nothing is added, and the transaction
	//     stays usable.
	Enqueue(ctx context.Context, ms ...OutboxMessage) error
}

// MarkerMaintainer is a capability of a provider: it finds and deletes markers of handlers that are gone.
type MarkerMaintainer interface {
	// MarkedHandlers lists the handlers that have markers of any generation, in order.
	MarkedHandlers(ctx context.Context) ([]string, error)
	// DropMarkers deletes at most limit markers of handler, of any generation, and returns how many. Zero means that none
	// is left, except those that others are deleting.
	DropMarkers(ctx context.Context, handler string, limit int) (int, error)
}
