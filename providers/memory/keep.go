package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var _ provider.EntryMaintainer = (*DB)(nil)

// HoldEntries implements provider.EntryMaintainer.
func (db *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error) {
	return update(ctx, db, "hold entries", func(s *state, now time.Time) int {
		changed, n := provider.HoldEntries(s.openEntries, long, limit, now)
		for _, e := range changed {
			s.put(e)
		}
		return n
	})
}

// releaseHeld makes the held entries of a topic and key pending.
func (s *state) releaseHeld(l lane) {
	for seq := range s.held.from(0) {
		if e, _ := s.entries.get(seq); laneOf(e) == l {
			e.Status = outbox.Pending
			s.put(e)
		}
	}
}

const deleteScan = 1000 // entries that one call scans

// DeleteEntries implements provider.EntryMaintainer.
func (db *Provider) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	err = db.tx(ctx, func(tx *Model) error {
		now, scanned := db.now(), 0
		for _, e := range tx.staged.entries.from(after + 1) {
			if scanned++; scanned > deleteScan {
				return nil
			}
			next = e.Seq
			if keep.IsOver(&e, now) {
				tx.staged.drop(e)
				n++
			}
		}
		next = 0
		return nil
	})
	if err != nil {
		return 0, after, fmt.Errorf("delete entries: %w", err)
	}
	return n, next, nil
}

func (s *state) drop(e outbox.Entry) {
	s.entries = s.entries.drop(e.Seq)
	s.open = s.open.drop(e.Seq)
	s.held = s.held.drop(e.Seq)
	s.messages = s.messages.drop(pair(e.Topic, e.ID))
}
