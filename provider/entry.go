package provider

import (
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
)

// EntryStatus is where an entry stands in its life.
//
//	pending ─claim─▶ claimed ─▶ published
//	 │ ▲ ▲             │ ├────▶ failed ─(backoff over)─▶ claimed …
//	 │ │ └──release────┘ └────▶ abandoned ─requeue─▶ pending, or ─skip─▶ skipped
//	 ▼ │
//	held (behind an entry of its topic and key that waits for long; pending again when that is resolved)
//
// Published and skipped entries never change again. An abandoned entry changes only by Requeue or Skip. Until then the
// later entries of its topic and key wait.
type EntryStatus string

// The statuses of an entry.
const (
	EntryPending   EntryStatus = "pending"   // waits to be claimed
	EntryClaimed   EntryStatus = "claimed"   // a relay has it; another relay may take it once the lease is over
	EntryPublished EntryStatus = "published" // the publisher confirmed it
	EntryFailed    EntryStatus = "failed"    // publishing failed; claimable again after its backoff
	EntryHeld      EntryStatus = "held"      // waits behind an entry of its topic and key that is abandoned, or failed with a long backoff
	EntryAbandoned EntryStatus = "abandoned" // its attempts are exhausted
	EntrySkipped   EntryStatus = "skipped"   // given up by a person
)

// EntryStatuses lists every status.
func EntryStatuses() []EntryStatus {
	return []EntryStatus{EntryPending, EntryClaimed, EntryPublished, EntryFailed, EntryHeld, EntryAbandoned, EntrySkipped}
}

// Open reports whether an entry in this status precedes the later ones of its topic and key. Published and skipped
// entries do not.
func (s EntryStatus) Open() bool { return s != EntryPublished && s != EntrySkipped }

// ZeroCounts returns a count of zero for each of the given statuses, or for all statuses if none is given.
func ZeroCounts(of []EntryStatus) map[EntryStatus]int64 {
	if len(of) == 0 {
		of = EntryStatuses()
	}
	counts := make(map[EntryStatus]int64, len(of))
	for _, s := range of {
		counts[s] = 0
	}
	return counts
}

// Entry is a message in the outbox. Times are on the store's clock, UTC.
type Entry struct {
	OutboxMessage
	Seq       int64 // the order of entries
	Status    EntryStatus
	Attempts  int         // claims counted since it was added or requeued, the live one included
	Suspect   bool        // a claim of it crashed: its lease ended without a mark. It is claimed alone from then on
	Token     claim.Token // of the last claim
	ClaimedBy string      // the holder of the last claim
	LastError string      // the class of the last error, never its text
	// NextAttemptAt: if claimed, the end of the lease; if skipped, the time of that; else not claimable before.
	NextAttemptAt   time.Time
	CreatedAt       time.Time
	LastAttemptedAt time.Time // zero: never
	PublishedAt     time.Time // zero: not yet
	// Malformed: the row was changed by another program, and its headers are not a JSON object of strings (then Headers
	// is nil), or a time is infinite or outside the years 1 to 9999 (then that time is zero). A claim sets
	// NextAttemptAt and LastAttemptedAt, so after it only Headers and CreatedAt matter. Relays abandon such an entry
	// with LastError LastErrorMalformed, and never publish it.
	Malformed bool
}

// Values of Entry.LastError that a store or a relay writes without an error of a publisher.
const (
	LastErrorMalformed = "malformed" // the entry is Malformed
	LastErrorCrashed   = "crashed"   // its last claim crashed, and its attempts are exhausted
)

// Alone reports whether e, as it was read, must be claimed alone, because a claim of it crashed.
func (e Entry) Alone() bool { return e.Suspect || e.Status == EntryClaimed }

// StoredTime returns t in UTC, or the zero time and false if t is outside the years 1 to 9999. RFC 3339 cannot express
// such a time.
func StoredTime(t time.Time) (time.Time, bool) {
	if t = t.UTC(); t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}, false
	}
	return t, true
}

// EntryFilter selects entries. The zero filter selects all, up to the default limit.
type EntryFilter struct {
	Status []EntryStatus // one of these; empty: any
	Topic  string
	Key    string
	Stream string        // of the event
	Seqs   []int64       // one of these; nil: any; empty: none
	Older  time.Duration // created longer than this ago, on the store's clock
	After  int64         // only greater Seqs: the last one of the previous page
	Limit  int           // zero means 100 for Entries, and no limit for Requeue and Skip
	Force  bool          // Requeue: also entries that were last attempted too long ago; see Requeue
}

// OnlyOpen reports whether f selects open entries only. Providers find these without reading resolved ones.
func (f EntryFilter) OnlyOpen() bool {
	for _, s := range f.Status {
		if !s.Open() {
			return false
		}
	}
	return len(f.Status) > 0
}

// DefaultRequeueWindow is the time for which consumers keep markers, unless marker.Retention says otherwise. If it does, the
// provider's Config must say so too.
const DefaultRequeueWindow = 8 * 24 * time.Hour

// ErrStale: the entry was last attempted so long ago that its message, if that attempt published it, would take effect again.
var ErrStale = errors.New("last attempted before the marker window: its message may take effect a second time")

// EntryRetention is how long resolved entries are kept. Abandoned ones are kept until a person decides.
type EntryRetention struct {
	// Published: how long published entries are kept. Zero means not at all: relays delete an entry instead of marking
	// it published, and leave alone published entries that others keep.
	Published time.Duration
	Skipped   time.Duration // how long skipped entries are kept; zero means 30 days
}

// WithDefaults fills in zero fields. A negative time is claim.ErrTerms.
func (r EntryRetention) WithDefaults() (EntryRetention, error) {
	if r.Skipped == 0 {
		r.Skipped = 30 * 24 * time.Hour
	}
	if r.Published < 0 || r.Skipped < 0 {
		return r, fmt.Errorf("%w: published entries kept for %s, skipped ones for %s: give no negative duration", claim.ErrTerms, r.Published, r.Skipped)
	}
	return r, nil
}

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
