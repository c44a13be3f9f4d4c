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
	return update(ctx, db, "hold entries", func(s *state, now time.Time) int { return s.hold(now.Add(long), limit) })
}

// hold walks the open entries in order. It holds at most limit pending entries behind an entry
// that is abandoned or not due before until, and releases held entries that are the first of
// their key.
func (s *state) hold(until time.Time, limit int) (n int) {
	waiting, open := map[lane]bool{}, map[lane]bool{}
	for seq := range s.open.from(0) {
		e, _ := s.entries.get(seq)
		l := laneOf(e)
		switch {
		case e.Status == outbox.Abandoned, e.Status == outbox.Failed && !e.NextAttemptAt.Before(until):
			waiting[l] = true
		case e.Status == outbox.Pending && waiting[l] && n < limit:
			e.Status = outbox.Held
			s.put(e)
			n++
		case e.Status == outbox.Held && !open[l]:
			e.Status = outbox.Pending
			s.put(e)
		}
		open[l] = true
	}
	return n
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
			if e.Status == outbox.Published && keep.Published > 0 && e.PublishedAt.Before(now.Add(-keep.Published)) ||
				e.Status == outbox.Skipped && e.NextAttemptAt.Before(now.Add(-keep.Skipped)) {
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
