package provider

import (
	"cmp"
	"iter"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// The functions of this file are the rules of entries for stores that apply them row by row, in a
// transaction. now is the store's time.

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

// Candidates returns at most limit eligible entries that no earlier entry of their topic and key
// blocks. open yields all open entries in order of Seq. A claim takes them in this order, as
// claim.Portable does, each only if the claim has every earlier open entry of its topic and key.
func (q *EntryQuery) Candidates(open iter.Seq[Entry], limit int, now time.Time) (found []Entry) {
	blocked := map[queueOf]bool{}
	scanned, bytes := 0, 0
	for e := range open {
		if len(found) >= limit || q.Near && scanned >= limit {
			break
		}
		switch queue := (queueOf{e.Topic, e.Key}); {
		case len(q.Topics) > 0 && !slices.Contains(q.Topics, e.Topic), slices.Contains(q.Except, e.Topic):
		case !e.IsEligible(now):
			blocked[queue] = !q.Unordered
		case e.Seq <= q.After:
		default:
			scanned++
			if blocked[queue] {
				continue
			}
			if bytes += len(e.Payload); q.Bytes > 0 && bytes > q.Bytes && len(found) > 0 {
				return found
			}
			found = append(found, e)
		}
	}
	return found
}

// Take returns an eligible entry as a claim leaves it. It returns false if the entry is not claimed: its
// claims have crashed as often as q allows, and it is abandoned.
func (q *EntryQuery) Take(e Entry, t claim.Terms, now time.Time) (Entry, bool) {
	if e.Status == EntryClaimed { // the lease of that claim has ended
		e.Suspect = true
		if q.Attempts > 0 && e.Attempts >= q.Attempts {
			e.Status, e.LastError = EntryAbandoned, LastErrorCrashed
			return e, false
		}
	}
	e.Status, e.Token, e.ClaimedBy = EntryClaimed, t.Token, t.Holder
	e.Attempts++
	e.LastAttemptedAt, e.NextAttemptAt = now, now.Add(t.Lease)
	return e, true
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
