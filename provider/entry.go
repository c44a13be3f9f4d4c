package provider

import (
	"errors"
	"time"

	"github.com/kinora-go/kinora/claim"
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

// ErrStale: the entry was last attempted so long ago that its message, if that attempt published it, would take effect again.
var ErrStale = errors.New("last attempted before the marker window: its message may take effect a second time")
