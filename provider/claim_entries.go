package provider

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
)

// EntryQuery selects entries to claim.
type EntryQuery struct {
	Topics    []string // only these; empty: all
	Except    []string // not these
	Attempts  int      // the limit of attempts: an entry whose claim crashed at the limit is abandoned; ≤ 0: no limit
	Unordered bool     // entries do not wait for earlier ones of their key
	After     int64    // only entries with a greater Seq
	// Near: read only the first eligible entries, no more than may be claimed. That is cheap whatever the number of waiting
	// entries, but an empty result does not mean that there are none.
	Near  bool
	Bytes int // at most this much payload, unless a single entry has more; ≤ 0: no limit
}

// EntryMark is one change of a claimed entry, fenced by the claim's token.
type EntryMark struct {
	Seq   int64
	Token claim.Token
	// To: EntryPublished, EntryFailed or EntryAbandoned; EntryClaimed renews the lease; EntryPending releases the
	// entry and gives the attempt back.
	To    EntryStatus
	After time.Duration // failed: the backoff; claimed: the new lease; pending: not claimable before
	Error string        // failed, abandoned and pending: the class of the error, never its text
	Drop  bool          // published: delete the entry instead
}

// CheckMarks refuses a mark to a status that a claim cannot end in, and a negative time, with *eventstore.InvalidError.
// Providers call it before they change anything.
func CheckMarks(marks []EntryMark) error {
	for i, m := range marks {
		switch m.To {
		case EntryPublished, EntryFailed, EntryAbandoned, EntryClaimed, EntryPending:
		default:
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].to", i), Reason: "want published, failed, abandoned, claimed or pending"}
		}
		if m.Drop && m.To != EntryPublished {
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].drop", i), Reason: "only a published entry can be deleted"}
		}
		if m.After < 0 {
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].after", i), Reason: "negative"}
		}
	}
	return nil
}

// ClaimEntries claims eligible entries in order of Seq, by the store's own ClaimEntries if it has one, else portably.
//   - An entry has at most one live claim. A live lease is never taken over, an expired one is.
//   - An entry is claimed only together with all earlier open ones of its topic and key. So no key runs past an entry
//     that waits, has failed, or is claimed by another relay.
//   - An entry whose claim crashed is claimed alone.
//   - The entries are in post-claim state. With an error, they are those taken before it.
func ClaimEntries(ctx context.Context, s Outbox, q EntryQuery, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	if b, ok := s.(BatchClaimer); ok {
		return b.ClaimEntries(ctx, q, t)
	}
	return ClaimEntriesPortably(ctx, s, q, t)
}

// ClaimEntriesPortably does what ClaimEntries does with one read, and one guarded change per entry. It never uses the
// store's own ClaimEntries.
func ClaimEntriesPortably(ctx context.Context, s Outbox, q EntryQuery, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	return claim.Portable(ctx, t,
		func(ctx context.Context, limit int) ([]Entry, error) { return s.EntryCandidates(ctx, q, limit) },
		func(ctx context.Context, e Entry, t claim.Terms) (Entry, bool, error) {
			return s.TakeEntry(ctx, e, q, t)
		},
		Entry.Alone)
}

// BatchClaimer is a capability of an Outbox: ClaimEntries in one transaction.
type BatchClaimer interface {
	// ClaimEntries does what the function ClaimEntries does. Terms are complete (claim.Terms.WithDefaults).
	ClaimEntries(ctx context.Context, q EntryQuery, t claim.Terms) ([]Entry, error)
}
