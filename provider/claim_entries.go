package provider

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// EntryQuery selects entries to claim.
type EntryQuery struct {
	Topics []string // only these; empty means all
	Except []string // all topics except these
	// Attempts is the limit of attempts; ≤ 0 means none. An entry whose claim crashed at the
	// limit is abandoned.
	Attempts  int
	Unordered bool  // entries do not wait for earlier ones of their key
	After     int64 // only entries with a greater Seq
	// Near: read only the first eligible entries, at most the limit of the claim. The cost does
	// not depend on the number of waiting entries. An empty result does not mean that no entry
	// can be claimed.
	Near  bool
	Bytes int // the most payload, unless a single entry has more; ≤ 0 means no limit
}

// EntryMark is a change of a claimed entry. It takes effect only if Token is still the token of
// the entry's claim.
type EntryMark struct {
	Seq   int64
	Token claim.Token
	// To is EntryPublished, EntryFailed or EntryAbandoned. EntryClaimed renews the lease.
	// EntryPending releases the entry and restores the attempt.
	To EntryStatus
	// After is the backoff of a failed entry, the new lease of a claimed one, and the time until a
	// pending one can be claimed.
	After time.Duration
	// Error is the class of the error, never its text, for failed, abandoned and pending. A
	// pending mark with an empty Error keeps the last one.
	Error string
	Drop  bool // published: delete the entry instead of marking it
}

// CheckMarks returns an *eventstore.InvalidError for a mark with a To that EntryMark does not
// list, with a negative After, or with a Drop that is not published. Providers call it before
// they change anything.
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
//   - An entry is claimed only together with all earlier open ones of its topic and key. So no
//     entry is claimed before an earlier one of its key that waits, has failed, or is claimed by
//     another relay.
//   - Claiming counts an attempt, sets the token and holder of t, and leases the entries for
//     t.Lease.
//   - An entry that was still claimed, and so its lease expired without a mark, becomes suspect,
//     and is claimed alone (Entry.Alone). At q.Attempts it is abandoned instead
//     (LastErrorCrashed).
//   - The entries are as they are after the claim. With an error, they are those taken before it.
func ClaimEntries(ctx context.Context, s Outbox, q EntryQuery, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	return s.ClaimEntries(ctx, q, t)
}
