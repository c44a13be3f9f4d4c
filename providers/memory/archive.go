package memory

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Archive deletes the events of an ended stream before its last one, and its snapshots, in one transaction.
// It returns the number of deleted events. To keep them elsewhere, read them with ReadStream before. The
// version of the stream and its last event stay. So do the entries of the outbox and parked messages,
// which have copies of events.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it
//     takes. Nothing is deleted.
func (db *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	if err := provider.CheckStream(stream); err != nil {
		return 0, err
	}
	err = db.tx(ctx, func(tx *Model) error {
		s := &tx.staged
		if !s.ended(stream) {
			return eventstore.ErrNotEnded
		}
		if err := provider.Passed(s.behind(stream, db.lineage), o); err != nil {
			return err
		}
		s.snapshots = s.snapshots.drop(stream)
		deleted = s.archive(stream)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("archive %s: %w", stream, err)
	}
	return deleted, nil
}

// behind returns the projectors that take an event of the stream, except the last one, that is after
// their checkpoint.
func (s *state) behind(stream, lineage string) (projectors []string) {
	events, _ := s.streams.get(stream)
	for key, c := range s.checkpoints.from("") {
		if c.Mode == provider.ModeEnded || c.Lineage != lineage && c.Lineage != "" {
			continue
		}
		takes := map[string]bool{}
		for _, b := range c.Handlers {
			takes[b.Type] = true
		}
		for version, e := range events.from(0) {
			if version < events.last() && e.Position > c.Place.Position && takes[e.Type] {
				projectors = append(projectors, first(key))
				break
			}
		}
	}
	return projectors
}

// archive deletes the events before the last one.
func (s *state) archive(stream string) (n int64) {
	events, _ := s.streams.get(stream)
	left := events
	for version, e := range events.from(0) {
		if version < events.last() {
			left = left.drop(version)
			s.log = s.log.drop(e.Position)
			s.places = s.places.drop(e.ID)
			n++
		}
	}
	s.streams = s.streams.put(stream, left)
	return n
}
