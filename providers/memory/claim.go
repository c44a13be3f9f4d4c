package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// ClaimEntries implements provider.Outbox: the portable claim, in one transaction.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) (taken []provider.Entry, err error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	err = db.tx(ctx, func(tx *Model) error {
		now := db.now()
		taken, err = claim.Portable(ctx, t,
			func(_ context.Context, limit int) ([]provider.Entry, error) {
				return q.Candidates(tx.staged.openEntries, limit, now), nil
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

// openEntries yields the open entries in order.
func (s *state) openEntries(yield func(provider.Entry) bool) {
	for seq := range s.open.from(0) {
		e, _ := s.entries.get(seq)
		if !yield(ownEntry(e)) {
			return
		}
	}
}

// take claims a candidate, if this claim has every earlier open entry of its key.
func (s *state) take(e provider.Entry, q provider.EntryQuery, t claim.Terms, now time.Time) (provider.Entry, bool) {
	if !q.Unordered && s.passes(e, t.Token) {
		return e, false
	}
	e, ok := q.Take(e, t, now)
	s.put(e)
	return ownEntry(e), ok
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
				tx.staged.put(m.Apply(e, now))
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
