package provider

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// EntryStatus is the status of an entry.
//
//	pending ─claim─▶ claimed ─▶ published
//	 │ ▲ ▲             │ ├────▶ failed ─(backoff over)─▶ claimed …
//	 │ │ └──release────┘ └────▶ abandoned ─requeue─▶ pending, or ─skip─▶ skipped
//	 ▼ │
//	held (behind an entry of its key that waits for long; pending again when that is resolved)
//
// Published and skipped entries never change again. An abandoned entry changes only by Requeue or
// Skip. Until then the later entries of its topic and key wait.
type EntryStatus string

// The statuses of an entry.
const (
	EntryPending   EntryStatus = "pending"   // can be claimed
	EntryClaimed   EntryStatus = "claimed"   // a relay has it until its lease ends
	EntryPublished EntryStatus = "published" // the publisher confirmed it
	EntryFailed    EntryStatus = "failed"    // publishing failed; waits for its backoff
	EntryHeld      EntryStatus = "held"      // waits for an abandoned or failed entry of its key
	EntryAbandoned EntryStatus = "abandoned" // its attempts are exhausted
	EntrySkipped   EntryStatus = "skipped"   // an operator gave it up
)

// EntryStatuses lists every status.
func EntryStatuses() []EntryStatus {
	return []EntryStatus{EntryPending, EntryClaimed, EntryPublished, EntryFailed, EntryHeld, EntryAbandoned, EntrySkipped}
}

// Open reports whether later entries of the topic and key wait for an entry in this status. They
// do not wait for published and skipped ones.
func (s EntryStatus) Open() bool { return s != EntryPublished && s != EntrySkipped }

// ZeroCounts returns a count of zero for each of the given statuses, or for all statuses if none
// is given.
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
	Seq       int64       `json:"seq"` // the order of entries
	Status    EntryStatus `json:"status"`
	Attempts  int         `json:"attempts"`             // claims counted since it was added or requeued, the live one included
	Suspect   bool        `json:"suspect,omitempty"`    // the lease of a claim expired without a mark; now it is claimed alone
	Token     claim.Token `json:"token,omitzero"`       // of the last claim
	ClaimedBy string      `json:"claimed_by,omitempty"` // the holder of the last claim
	LastError string      `json:"last_error,omitempty"` // the class of the last error, never its text
	// NextAttemptAt is the end of the lease of a claimed entry, and the time when a skipped entry
	// was skipped. Any other entry cannot be claimed before it.
	NextAttemptAt   time.Time `json:"next_at,omitzero"`
	CreatedAt       time.Time `json:"created_at"`
	LastAttemptedAt time.Time `json:"last_attempted_at,omitzero"` // zero: never
	PublishedAt     time.Time `json:"published_at,omitzero"`      // zero: not yet
	// Malformed: another program changed the row, and its headers are not a JSON object of strings (then Headers is
	// nil), or a time is infinite or outside the years 1 to 9999 (then it is zero). After a claim only Headers
	// and CreatedAt can be so. Relays abandon such an entry with LastErrorMalformed.
	Malformed bool `json:"malformed,omitempty"`
}

// Values of Entry.LastError that are not classes of a publisher's errors.
const (
	LastErrorMalformed = "malformed" // the entry is Malformed
	LastErrorCrashed   = "crashed"   // its last lease expired, and its attempts are exhausted
)

// Alone reports whether e, as it was before the claim, must be claimed alone: the lease of an earlier claim expired.
func (e Entry) Alone() bool { return e.Suspect || e.Status == EntryClaimed }

// StoredTime returns t in UTC, or the zero time and false if t is outside the years 1 to 9999, as RFC 3339 has it.
func StoredTime(t time.Time) (time.Time, bool) {
	if t = t.UTC(); t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}, false
	}
	return t, true
}

// ErrStale: Inspector.Requeue refused an entry that was last attempted longer ago than the
// provider's RequeueWindow.
var ErrStale = errors.New("last attempted before the requeue window, so it may take effect again: set filter.Force")

// EntryFilter selects entries. The zero filter selects all, up to the default limit. CheckFilter says what is invalid.
type EntryFilter struct {
	Status []EntryStatus // any of these; empty means all
	Topic  string
	Key    string
	Stream string        // of the event
	Seqs   []int64       // only these; nil means all, empty means none
	Older  time.Duration // only entries created longer ago than this, on the store's clock
	After  int64         // only greater Seqs; for the next page, the last Seq of this one
	Limit  int           // zero means 100 for Entries, and no limit for Requeue and Skip
	Force  bool          // Requeue: also entries that would be ErrStale
}

// OnlyOpen reports whether f selects only open entries. Providers find these without reading resolved ones.
func (f EntryFilter) OnlyOpen() bool {
	return len(f.Status) > 0 && !slices.ContainsFunc(f.Status, func(s EntryStatus) bool { return !s.Open() })
}

// EntryRetention is how long resolved entries are kept. Abandoned entries are kept until an
// operator requeues or skips them.
type EntryRetention struct {
	// Published is how long published entries are kept. Zero means that relays delete an entry instead of marking
	// it published, and never delete published entries that other relays keep.
	Published time.Duration
	Skipped   time.Duration // how long skipped entries are kept; zero means 30 days
}

// WithDefaults returns r with its zero fields filled in. A negative duration is claim.ErrTerms.
func (r EntryRetention) WithDefaults() (EntryRetention, error) {
	r.Skipped = cmp.Or(r.Skipped, 30*24*time.Hour)
	if r.Published < 0 || r.Skipped < 0 {
		return r, fmt.Errorf("%w: retention of published entries %s, of skipped entries %s: must not be negative",
			claim.ErrTerms, r.Published, r.Skipped)
	}
	return r, nil
}

// DefaultRequeueWindow is the default window of marker.Retention. If consumers keep markers for
// another time, set RequeueWindow in the provider's Config to it.
const DefaultRequeueWindow = 8 * 24 * time.Hour
