package provider

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Outbox is a store for relays.
//
// An entry is open until it is published or skipped (EntryStatus.Open). It is eligible while it is pending,
// failed or claimed, and its NextAttemptAt is not in the future on the store's clock, which is read once
// per statement. With EntryQuery.Unordered, the conditions on earlier entries do not apply.
type Outbox interface {
	// ClaimEntries is the function ClaimEntries in one transaction (claim.Portable). t is complete (WithDefaults).
	ClaimEntries(ctx context.Context, q EntryQuery, t claim.Terms) ([]Entry, error)

	// MarkEntries changes claimed entries in one transaction.
	//   - A mark whose token is not that of the entry's claim changes nothing: late has its Seq, in any
	//     order. Of two marks of one entry the first counts, and the second is late.
	//   - If an entry is published, the first held entries of its topic and key become pending, at least one.
	//   - If CheckMarks refuses a mark, nothing is changed.
	MarkEntries(ctx context.Context, marks []EntryMark) (late []int64, err error)
}

// EntryMaintainer is a capability of an Outbox: maintenance that relays do every few seconds or
// minutes. If the Outbox also has the capability Leases, one relay at a time deletes entries.
type EntryMaintainer interface {
	// HoldEntries holds at most limit pending entries that wait for long: those behind an entry of their
	// topic and key that is abandoned, or failed with at least long of its backoff left. It returns their number.
	//   - No later entry of its key is claimed before a held one. That becomes pending again, with its
	//     attempts unchanged, after the entry that it waits for is published, requeued or skipped.
	//   - Held entries without an entry before them, such as one that a person deleted, become pending too.
	//   - Concurrent claims may omit entries of the keys that it reads.
	HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error)

	// DeleteEntries reads some thousand entries after Seq after, in order, and deletes those that were
	// published or skipped longer ago than keep says. keep is complete (EntryRetention.WithDefaults). It
	// returns the number of deleted entries, and the Seq to continue after; 0 at the end.
	DeleteEntries(ctx context.Context, keep EntryRetention, after int64) (n int, next int64, err error)
}

// Waker is a capability of an Outbox: a hint that entries were added.
type Waker interface {
	// Enqueued returns a channel that is closed when entries are next added through this value. Those
	// that other processes or a caller's transaction add may not close it.
	Enqueued() <-chan struct{}
}

// Enqueuer is the outbox in a transaction that the caller owns, such as sqlite.DB.InTx.
type Enqueuer interface {
	// Enqueue adds messages if the transaction commits. One whose id the outbox has for its topic is ignored. If
	// OutboxMessage.Normalize refuses one, nothing is added, and the transaction stays usable.
	Enqueue(ctx context.Context, ms ...OutboxMessage) error
}

// MarkerMaintainer is a capability of a provider: it finds and deletes markers of removed handlers.
type MarkerMaintainer interface {
	// MarkedHandlers returns the handlers that have markers of any generation, sorted.
	MarkedHandlers(ctx context.Context) ([]string, error)
	// DropMarkers deletes at most limit markers of handler, of any generation, and returns their
	// number. Zero means that none is left, except those that other transactions are deleting.
	DropMarkers(ctx context.Context, handler string, limit int) (int, error)
}

// EntryQuery selects entries to claim.
type EntryQuery struct {
	Topics []string // only these; empty means all
	Except []string // all topics except these
	// Attempts is the limit; ≤ 0 means none. An entry whose claim crashed at the limit is abandoned.
	Attempts  int
	Unordered bool  // entries do not wait for earlier ones of their key
	After     int64 // only entries with a greater Seq
	// Near: read only the first eligible entries, at most the limit of the claim, at a cost that does not
	// depend on the waiting ones. An empty result does not mean that no entry can be claimed.
	Near  bool
	Bytes int // the most payload, unless a single entry has more; ≤ 0 means no limit
}

// EntryMark is a change of a claimed entry. It takes effect only if Token is still that of the claim.
type EntryMark struct {
	Seq   int64
	Token claim.Token
	// To is EntryPublished, EntryFailed, EntryAbandoned, EntryClaimed (a renewal), or EntryPending (a release, not counted).
	To EntryStatus
	// After is the backoff of a failed entry, the lease of a claimed one, and the delay of a pending one.
	After time.Duration
	// Error is the class, never the text, of a failed, abandoned or pending entry. Empty keeps that of a pending one.
	Error string
	Drop  bool // published: delete the entry instead of marking it
}

// CheckMarks returns an *eventstore.InvalidError for a mark with a To that EntryMark does not list, with a
// negative After, or with a Drop that is not published. Providers call it before they change anything.
func CheckMarks(marks []EntryMark) error {
	for i, m := range marks {
		switch m.To {
		case EntryPublished, EntryFailed, EntryAbandoned, EntryClaimed, EntryPending:
		default:
			return invalidf(fmt.Sprintf("marks[%d].to", i), "must be published, failed, abandoned, claimed or pending")
		}
		if m.Drop && m.To != EntryPublished {
			return invalidf(fmt.Sprintf("marks[%d].drop", i), "must be false unless the entry is published")
		}
		if m.After < 0 {
			return invalidf(fmt.Sprintf("marks[%d].after", i), "must not be negative")
		}
	}
	return nil
}

// ClaimEntries claims eligible entries in order of Seq.
//   - An entry has at most one live claim. A live lease is never taken over, an expired one is.
//   - An entry is claimed only together with all earlier open ones of its topic and key, so never before
//     one that waits, has failed, or is claimed by another relay.
//   - Claiming counts an attempt, sets the token and holder of t, and leases the entries for t.Lease.
//   - An entry whose lease expired without a mark becomes suspect, and is claimed alone (Entry.Alone). At
//     q.Attempts it is abandoned instead (LastErrorCrashed).
//   - The entries are as they are after the claim. With an error, there are none. If its claim was committed,
//     they are claimed until the lease expires.
func ClaimEntries(ctx context.Context, s Outbox, q EntryQuery, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	return s.ClaimEntries(ctx, q, t)
}

// Inspector lists entries, and requeues or skips them for operators.
type Inspector interface {
	// Entries lists the entries that f selects in order of Seq.
	Entries(ctx context.Context, f EntryFilter) ([]Entry, error)
	// StatusCounts counts entries by status: the given statuses, or all if none is given, also with a count
	// of zero. The cost grows with the open entries, and with resolved ones only if they are counted.
	StatusCounts(ctx context.Context, of ...EntryStatus) (map[EntryStatus]int64, error)
	// Requeue makes the abandoned and failed entries that f selects pending at once, resets their
	// attempts and Suspect, and returns their number. Others are unchanged. Held entries behind them
	// become pending in the same transaction: the first of them, and at least the next one.
	//   - ErrStale: one of the entries was last attempted longer ago than the provider's RequeueWindow, and
	//     f.Force is not set. Nothing is changed. That attempt may have published the message, and
	//     consumers may have deleted the markers by which they would recognize it.
	//   - A Malformed entry whose LastAttemptedAt cannot be read is unchanged without f.Force.
	Requeue(ctx context.Context, f EntryFilter) (int, error)
	// Skip gives up the pending, failed, held and abandoned entries that f selects, and returns their
	// number. This cannot be undone. Held entries behind them become pending as with Requeue. Others are
	// unchanged, except a Malformed one whose lease never ends.
	Skip(ctx context.Context, f EntryFilter) (int, error)
}
