package provider

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
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

// Open reports whether later entries of the topic and key wait for an entry in this status.
func (s EntryStatus) Open() bool { return s != EntryPublished && s != EntrySkipped }

// ZeroCounts returns a count of zero for each of the given statuses, or for all if none is given.
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

// ErrStale: Inspector.Requeue refused an entry that was last attempted before the provider's RequeueWindow.
var ErrStale = errors.New("last attempted before the requeue window, so it may take effect again: set filter.Force")

// EntryFilter selects entries. The zero filter selects all, up to the default limit. CheckFilter says what is invalid.
type EntryFilter struct {
	Status []EntryStatus `json:"status,omitempty"` // any of these; empty means all
	Topic  string        `json:"topic,omitempty"`
	Key    string        `json:"key,omitempty"`
	Stream string        `json:"stream,omitempty"` // of the event
	Seqs   []int64       `json:"seqs,omitzero"`    // only these; nil means all, empty means none
	Older  time.Duration `json:"older,omitempty"`  // only entries created longer ago than this, on the store's clock
	After  int64         `json:"after,omitempty"`  // only greater Seqs; for the next page, the last Seq of this one
	Limit  int           `json:"limit,omitempty"`  // zero means 100 for Entries, and no limit for Requeue and Skip
	Force  bool          `json:"force,omitempty"`  // Requeue: also entries that would be ErrStale
}

// OnlyOpen reports whether f selects only open entries. Providers find these without reading resolved ones.
func (f EntryFilter) OnlyOpen() bool {
	return len(f.Status) > 0 && !slices.ContainsFunc(f.Status, func(s EntryStatus) bool { return !s.Open() })
}

// EntryRetention is how long resolved entries are kept. Abandoned ones are kept until an operator decides.
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
// another time, set RequeueWindow in the provider's Config to the shortest of their windows.
const DefaultRequeueWindow = 8 * 24 * time.Hour

// The functions below are the rules of entries, row by row, in a transaction. now is the store's time.

// Selects reports whether f selects e, apart from f.After and f.Limit.
func (f *EntryFilter) Selects(e *Entry, now time.Time) bool {
	return (len(f.Status) == 0 || slices.Contains(f.Status, e.Status)) &&
		(f.Topic == "" || e.Topic == f.Topic) &&
		(f.Key == "" || e.Key == f.Key) &&
		(f.Stream == "" || e.Headers[HeaderStream] == f.Stream) &&
		(f.Older <= 0 || e.CreatedAt.Before(now.Add(-f.Older))) &&
		(f.Seqs == nil || slices.Contains(f.Seqs, e.Seq))
}

// IsEligible reports whether e can be claimed, apart from the entries before it.
func (e *Entry) IsEligible(now time.Time) bool {
	claimable := e.Status == EntryPending || e.Status == EntryFailed || e.Status == EntryClaimed
	return claimable && !e.NextAttemptAt.After(now)
}

// queueOf identifies the entries that are published in order.
type queueOf struct{ topic, key string }

// Claim returns what a claim makes of the open entries, which open yields in order of Seq: those that it takes, and
// those that it abandons, because their claims have crashed as often as q allows. t is complete.
func (q *EntryQuery) Claim(open iter.Seq[Entry], t claim.Terms, now time.Time) (taken, abandoned []Entry) {
	blocked := map[queueOf]bool{} // by an earlier open entry that the claim does not have
	scanned, bytes := 0, 0
	for e := range open {
		if len(taken)+len(abandoned) >= t.Limit || q.Near && scanned >= t.Limit {
			break
		}
		queue := queueOf{e.Topic, e.Key}
		switch {
		case len(q.Topics) > 0 && !slices.Contains(q.Topics, e.Topic), slices.Contains(q.Except, e.Topic):
			continue
		case !e.IsEligible(now), e.Seq <= q.After:
			blocked[queue] = !q.Unordered
			continue
		}
		if scanned++; blocked[queue] {
			continue
		}
		bytes += len(e.Payload)
		isFirst, alone := len(taken)+len(abandoned) == 0, e.Alone()
		if !isFirst && q.Bytes > 0 && bytes > q.Bytes || len(taken) > 0 && alone {
			break
		}
		if e.Suspect = alone; e.Status == EntryClaimed && q.Attempts > 0 && e.Attempts >= q.Attempts {
			e.Status, e.LastError = EntryAbandoned, LastErrorCrashed
			abandoned, blocked[queue] = append(abandoned, e), !q.Unordered
			continue
		}
		e.Status, e.Token, e.ClaimedBy = EntryClaimed, t.Token, t.Holder
		e.Attempts++
		e.LastAttemptedAt, e.NextAttemptAt = now, now.Add(t.Lease)
		if taken = append(taken, e); alone {
			break
		}
	}
	return taken, abandoned
}

// Apply returns a claimed entry as the mark leaves it. With m.Drop it is to be deleted.
func (m *EntryMark) Apply(e Entry, now time.Time) Entry {
	e.Status = m.To
	switch m.To {
	case EntryPublished:
		e.PublishedAt = now
	case EntryFailed:
		e.NextAttemptAt, e.LastError = now.Add(m.After), m.Error
	case EntryAbandoned:
		e.LastError = m.Error
	case EntryClaimed:
		e.NextAttemptAt = now.Add(m.After)
	case EntryPending:
		e.Attempts--
		e.NextAttemptAt = now.Add(m.After)
		e.LastError = cmp.Or(m.Error, e.LastError)
	case EntryHeld, EntrySkipped: // CheckMarks refuses them
	}
	return e
}

// HoldEntries returns the entries that EntryMaintainer.HoldEntries changes, as it leaves them, and how
// many of them it holds. open yields all open entries in order of Seq.
func HoldEntries(open iter.Seq[Entry], long time.Duration, limit int, now time.Time) (changed []Entry, n int) {
	waiting, seen := map[queueOf]bool{}, map[queueOf]bool{}
	for e := range open {
		queue := queueOf{e.Topic, e.Key}
		switch {
		case e.Status == EntryAbandoned, e.Status == EntryFailed && !e.NextAttemptAt.Before(now.Add(long)):
			waiting[queue] = true
		case e.Status == EntryPending && waiting[queue] && n < limit:
			e.Status = EntryHeld
			changed = append(changed, e)
			n++
		case e.Status == EntryHeld && !seen[queue]:
			e.Status = EntryPending
			changed = append(changed, e)
		}
		seen[queue] = true
	}
	return changed, n
}

// IsOver reports whether e is to be deleted. r is complete (WithDefaults).
func (r *EntryRetention) IsOver(e *Entry, now time.Time) bool {
	return e.Status == EntryPublished && r.Published > 0 && e.PublishedAt.Before(now.Add(-r.Published)) ||
		e.Status == EntrySkipped && e.NextAttemptAt.Before(now.Add(-r.Skipped))
}
