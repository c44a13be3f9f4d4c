package memory

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// generation is the live generation of a projector.
func (s *state) generation(projector string) int {
	if live, ok := s.live.get(projector); ok {
		return live
	}
	return 1
}

func markerKey(handler string, generation int, message string) string {
	return pair(handler, pair(strconv.Itoa(generation), message))
}

// mark leaves the markers of a message, one for each name of the handler, unless one of them is there.
func (s *state) mark(h provider.Handler, generation int, message string, now time.Time) (fresh bool) {
	if s.isMarked(h.Name, h.Was, generation, message) {
		return false
	}
	for _, name := range append([]string{h.Name}, h.Was...) {
		s.markers = s.markers.put(markerKey(name, generation, message), now)
	}
	return true
}

func (s *state) isMarked(handler string, was []string, generation int, message string) bool {
	has := func(name string) bool { return s.markers.has(markerKey(name, generation, message)) }
	return has(handler) || slices.ContainsFunc(was, has)
}

// Outcomes implements provider.Records.
func (db *DB) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("look up outcomes: %w", err)
	}
	s := db.committed.Load()
	outcomes := make([]provider.Outcome, len(questions))
	for i, q := range questions {
		outcomes[i] = s.outcome(q)
	}
	return outcomes, nil
}

func (s *state) outcome(q provider.Question) provider.Outcome {
	projector, _, _ := strings.Cut(q.Handler, "/")
	isName := func(name string) bool { return name == q.Handler || slices.Contains(q.Was, name) }
	if seq, ok := s.parkedIDs.get(pair(projector, q.MessageID)); ok {
		p, _ := s.parked.get(seq)
		h, _ := s.holds.get(laneKey(projector, p.Lane))
		switch {
		case len(p.Handlers) > 0 && !slices.ContainsFunc(p.Handlers, isName): // parked for other handlers
		case p.State == provider.StateSkipped:
			return provider.OutcomeSkipped
		case p.State == provider.StateStuck, h.dueAt.IsZero():
			return provider.OutcomeStuck
		default:
			return provider.OutcomeWaiting
		}
	}
	isPruned := func(name string) bool { floor, ok := s.floors.get(name); return ok && !q.RecordedAt.After(floor) }
	switch {
	case s.isMarked(q.Handler, q.Was, s.generation(projector), q.MessageID):
		return provider.OutcomeApplied
	case !q.RecordedAt.IsZero() && (isPruned(q.Handler) || slices.ContainsFunc(q.Was, isPruned)):
		return provider.OutcomePruned
	}
	return provider.OutcomeUnseen
}

// Prune implements provider.Records.
func (db *DB) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		before := db.now().Add(-window)
		n = tx.staged.pruneParked(projector, before, limit)
		for _, handler := range handlers {
			n += tx.staged.pruneMarkers(handler, before, limit)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("prune: %w", err)
	}
	return n, nil
}

func (s *state) pruneParked(projector string, before time.Time, limit int) int {
	var old []provider.Parked
	for _, p := range s.parked.from(0) {
		if p.Projector == projector && !isOpen(p) && p.ResolvedAt.Before(before) {
			old = append(old, p)
		}
	}
	slices.SortStableFunc(old, func(a, b provider.Parked) int { return a.ResolvedAt.Compare(b.ResolvedAt) })
	old = old[:min(limit, len(old))]
	for _, p := range old {
		s.forget(p)
	}
	return len(old)
}

// pruneMarkers raises the handler's floor to the time of the youngest marker that it deletes.
func (s *state) pruneMarkers(handler string, before time.Time, limit int) int {
	type marked struct {
		key string
		at  time.Time
	}
	var old []marked
	for key, at := range s.markers.from("") {
		if first(key) == handler && at.Before(before) {
			old = append(old, marked{key, at})
		}
	}
	slices.SortStableFunc(old, func(a, b marked) int { return a.at.Compare(b.at) })
	old = old[:min(limit, len(old))]
	for _, m := range old {
		s.markers = s.markers.drop(m.key)
		if floor, _ := s.floors.get(handler); m.at.After(floor) {
			s.floors = s.floors.put(handler, m.at)
		}
	}
	return len(old)
}

// MarkedHandlers implements marker.Keeper.
func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list handlers with markers: %w", err)
	}
	var names []string
	for key := range db.committed.Load().markers.from("") {
		if name := first(key); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// DropMarkers implements marker.Keeper.
func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		for key := range tx.staged.markers.from("") {
			if n < limit && first(key) == handler {
				tx.staged.markers = tx.staged.markers.drop(key)
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
