package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// ClaimEntries implements provider.Outbox.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	return update(ctx, db, "claim entries", func(s *state, now time.Time) []provider.Entry {
		taken, abandoned := q.Claim(s.openEntries, t, now)
		for _, e := range slices.Concat(taken, abandoned) {
			s.put(e)
		}
		for i := range taken {
			taken[i] = ownEntry(taken[i])
		}
		return taken
	})
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
