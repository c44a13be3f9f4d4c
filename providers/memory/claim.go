package memory

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// EntryCandidates implements provider.Outbox.
func (db *Provider) EntryCandidates(ctx context.Context, q provider.EntryQuery, limit int) ([]provider.Entry, error) {
	return checkedQuery(ctx, db, "read candidates", provider.CheckQuery(q), func(s *state, now time.Time) []provider.Entry { return s.candidates(q, limit, now) })
}

// TakeEntry implements provider.Outbox.
func (db *Provider) TakeEntry(ctx context.Context, e provider.Entry, q provider.EntryQuery, t claim.Terms) (taken provider.Entry, ok bool, err error) {
	err = db.tx(ctx, func(tx *Model) error {
		taken, ok = tx.staged.take(e, q, t, db.now())
		return nil
	})
	if err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, err)
	}
	return taken, ok, nil
}

// ClaimEntries implements provider.BatchClaimer: the portable claim, in one transaction.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) (taken []provider.Entry, err error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	err = db.tx(ctx, func(tx *Model) error {
		now := db.now()
		taken, err = claim.Portable(ctx, t,
			func(_ context.Context, limit int) ([]provider.Entry, error) {
				return tx.staged.candidates(q, limit, now), nil
			},
			func(_ context.Context, e provider.Entry, t claim.Terms) (provider.Entry, bool, error) {
				e, ok := tx.staged.take(e, q, t, now)
				return e, ok, nil
			},
			provider.Entry.Alone)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	return taken, nil
}

// lane identifies the entries that are published in order.
type lane struct{ topic, key string }

func laneOf(e provider.Entry) lane { return lane{e.Topic, e.Key} }

func eligible(e provider.Entry, now time.Time) bool {
	claimable := e.Status == outbox.Pending || e.Status == outbox.Failed || e.Status == outbox.Claimed
	return claimable && !e.NextAttemptAt.After(now)
}

// candidates returns the eligible entries that no earlier entry of their topic and key blocks.
func (s *state) candidates(q provider.EntryQuery, limit int, now time.Time) []provider.Entry {
	var found []provider.Entry
	held := map[lane]bool{}
	scanned, bytes := 0, 0
	for seq := range s.open.from(0) {
		if len(found) >= limit || q.Near && scanned >= limit {
			break
		}
		e, _ := s.entries.get(seq)
		switch {
		case len(q.Topics) > 0 && !slices.Contains(q.Topics, e.Topic), slices.Contains(q.Except, e.Topic):
		case !eligible(e, now):
			held[laneOf(e)] = !q.Unordered
		case seq <= q.After:
		default:
			scanned++
			if held[laneOf(e)] {
				continue
			}
			if bytes += len(e.Payload); q.Bytes > 0 && bytes > q.Bytes && len(found) > 0 {
				return found
			}
			found = append(found, ownEntry(e))
		}
	}
	return found
}

// take claims e if e has not changed since it was read, and if this claim holds every earlier
// open entry of its key.
func (s *state) take(e provider.Entry, q provider.EntryQuery, t claim.Terms, now time.Time) (provider.Entry, bool) {
	is, ok := s.entries.get(e.Seq)
	asRead := ok && is.Status == e.Status && is.Attempts == e.Attempts && is.Suspect == e.Suspect &&
		is.Token == e.Token && is.NextAttemptAt.Equal(e.NextAttemptAt)
	if !asRead || !eligible(is, now) || !q.Unordered && s.passes(is, t.Token) {
		return e, false
	}
	// and eligible: the lease of that claim has ended
	if is.Status == outbox.Claimed {
		is.Suspect = true
		if q.Attempts > 0 && is.Attempts >= q.Attempts {
			is.Status, is.LastError = outbox.Abandoned, "crashed"
			s.put(is)
			return e, false
		}
	}
	is.Status, is.Token, is.ClaimedBy = outbox.Claimed, t.Token, t.Holder
	is.Attempts++
	is.LastAttemptedAt, is.NextAttemptAt = now, now.Add(t.Lease)
	s.put(is)
	return ownEntry(is), true
}

// passes reports whether a claim of e would pass an earlier entry of its key that the claim does
// not hold.
func (s *state) passes(e provider.Entry, mine claim.Token) bool {
	for seq := range s.open.from(0) {
		if seq >= e.Seq {
			return false
		}
		before, _ := s.entries.get(seq)
		if laneOf(before) == laneOf(e) && (before.Status != outbox.Claimed || before.Token != mine) {
			return true
		}
	}
	return false
}

// MarkEntries implements provider.Outbox.
func (db *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := provider.CheckMarks(marks); err != nil {
		return nil, fmt.Errorf("mark entries: %w", err)
	}
	err = db.tx(ctx, func(tx *Model) error {
		now := db.now()
		for _, m := range marks {
			e, ok := tx.staged.entries.get(m.Seq)
			if !ok || e.Status != outbox.Claimed || e.Token != m.Token {
				late = append(late, m.Seq)
				continue
			}
			if m.Drop {
				tx.staged.drop(e)
			} else {
				tx.staged.put(changed(e, m, now))
			}
			if m.To == outbox.Published {
				tx.staged.releaseHeld(laneOf(e))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", err)
	}
	return late, nil
}

func changed(e provider.Entry, m outbox.Mark, now time.Time) provider.Entry {
	e.Status = m.To
	switch m.To {
	case outbox.Published:
		e.PublishedAt = now
	case outbox.Failed:
		e.NextAttemptAt, e.LastError = now.Add(m.After), m.Error
	case outbox.Abandoned:
		e.LastError = m.Error
	case outbox.Claimed:
		e.NextAttemptAt = now.Add(m.After)
	case outbox.Pending:
		e.Attempts--
		e.NextAttemptAt = now.Add(m.After)
		e.LastError = cmp.Or(m.Error, e.LastError)
	}
	return e
}
