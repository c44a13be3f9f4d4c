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
