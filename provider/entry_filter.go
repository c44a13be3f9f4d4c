package provider

import (
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// EntryFilter selects entries. The zero filter selects all, up to the default limit. Text that is longer than
// 255 bytes, is not UTF-8 or has a NUL is an *eventstore.InvalidError in every method that takes an EntryFilter. The same
// holds for the topics of an EntryQuery.
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

// DefaultRequeueWindow is the time for which consumers keep markers, unless marker.Retention says otherwise. If it does, the
// provider's Config must say so too.
const DefaultRequeueWindow = 8 * 24 * time.Hour
