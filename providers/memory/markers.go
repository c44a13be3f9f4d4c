package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/marker"
)

var _ marker.Keeper = (*DB)(nil)

// MarkedHandlers implements marker.Keeper.
func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list handlers with markers: %w", err)
	}
	var names []string
	for at := range db.committed.Load().markers.from("") {
		if name := first(at); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// PruneMarkers implements marker.Keeper.
func (db *DB) PruneMarkers(ctx context.Context, handler string, window time.Duration, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		s := &tx.staged
		old := s.markersOf(handler, db.now().Add(-window))
		for _, m := range old[:min(limit, len(old))] {
			s.markers = s.markers.drop(m.pair)
			if floor, _ := s.floors.get(handler); m.at.After(floor) {
				s.floors = s.floors.put(handler, m.at)
			}
			n++
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("prune markers: %w", err)
	}
	return n, nil
}

type marked struct {
	pair string
	at   time.Time
}

// markersOf are the markers of handler that are older than that, the oldest first.
func (s *state) markersOf(handler string, than time.Time) (old []marked) {
	for pair, at := range s.markers.from("") {
		if first(pair) == handler && at.Before(than) {
			old = append(old, marked{pair, at})
		}
	}
	slices.SortStableFunc(old, func(a, b marked) int { return a.at.Compare(b.at) })
	return old
}

// Floor implements marker.Keeper.
func (db *DB) Floor(ctx context.Context, handler string) (time.Time, error) {
	if err := ctx.Err(); err != nil {
		return time.Time{}, fmt.Errorf("floor of %s: %w", handler, err)
	}
	floor, _ := db.committed.Load().floors.get(handler)
	return floor, nil
}

// DropMarkers implements marker.Keeper.
func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		for at := range tx.staged.markers.from("") {
			if n < limit && first(at) == handler {
				tx.staged.markers = tx.staged.markers.drop(at)
				n++
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("drop markers: %w", err)
	}
	return n, nil
}
