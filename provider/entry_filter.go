package provider

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// EntryFilter selects entries. The zero filter selects all, up to the default limit. Text that is
// longer than 255 bytes, is not UTF-8 or has a NUL is an *eventstore.InvalidError in every method
// that takes an EntryFilter. The same holds for the topics of an EntryQuery.
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

// OnlyOpen reports whether f selects only open entries. Providers find these without reading
// resolved ones.
func (f EntryFilter) OnlyOpen() bool {
	for _, s := range f.Status {
		if !s.Open() {
			return false
		}
	}
	return len(f.Status) > 0
}

// EntryRetention is how long resolved entries are kept. Abandoned entries are kept until an
// operator requeues or skips them.
type EntryRetention struct {
	// Published is how long published entries are kept. Zero means that relays delete an entry
	// instead of marking it published, and never delete published entries that other relays keep.
	Published time.Duration
	// Skipped is how long skipped entries are kept. Zero means 30 days.
	Skipped time.Duration
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
