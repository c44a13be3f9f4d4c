package memory

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
)

// inWay tells whether p is in the way of a.
func inWay(p projector.Parked, a projector.Attempt) bool {
	return p.State == projector.StillParked && p.Holds && p.Projector == a.Projector && p.Key != "" && p.Key == a.Key &&
		(isOf(p, a.Handler, a.Was) || !slices.Contains(a.Takes, p.Type)) && (a.Seq == 0 || p.Seq < a.Seq)
}

// isOf tells whether p is parked for this handler, by any of its names, or for none.
func isOf(p projector.Parked, handler string, was []string) bool {
	return p.Handler == "" || p.Handler == handler || slices.Contains(was, p.Handler)
}

// isHeld tells whether anything is in the way of a, these aside.
func (s *state) isHeld(a projector.Attempt, but ...int64) bool {
	for seq, p := range s.parked.from(0) {
		if inWay(p, a) && !slices.Contains(but, seq) {
			return true
		}
	}
	return false
}

func (s *state) park(parked []projector.Parked, now time.Time) {
	for _, p := range parked {
		if s.isSetAside(p) {
			continue
		}
		s.parkings++
		p.Seq, p.State, p.At = s.parkings, projector.StillParked, now
		p.ResolvedAt, p.Decision = time.Time{}, projector.Decision{}
		s.parked = s.parked.put(p.Seq, ownParked(p))
	}
}

// isSetAside tells whether the message, if it has an id, is parked or was skipped already.
func (s *state) isSetAside(p projector.Parked) bool {
	for _, is := range s.parked.from(0) {
		if p.MessageID != "" && is.MessageID == p.MessageID && is.Projector == p.Projector && is.Handler == p.Handler && is.State != projector.Replayed {
			return true
		}
	}
	return false
}

// replayable refuses what cannot be replayed. What the same unit replays before is in nobody's way.
func (s *state) replayable(replays []projector.Replay) error {
	var before []int64
	for _, r := range replays {
		p, _ := s.parked.get(r.Seq)
		switch {
		case p.Seq == 0 || p.Projector != r.Projector || p.State != projector.StillParked:
			return &projector.ReplayError{Seq: r.Seq, Err: projector.ErrNotParked}
		case s.isHeld(r.Attempt, before...):
			return &projector.ReplayError{Seq: r.Seq, Err: projector.ErrHeld}
		case !r.Force && s.pruned(r, p.At):
			return &projector.ReplayError{Seq: r.Seq, Err: projector.ErrPruned}
		}
		before = append(before, r.Seq)
	}
	return nil
}

// pruned tells whether markers of the handler, by any of its names, may be missing from that time or later.
func (s *state) pruned(r projector.Replay, at time.Time) bool {
	for _, name := range append([]string{r.Handler}, r.Was...) {
		if floor, ok := s.floors.get(name); ok && !floor.Before(at) {
			return true
		}
	}
	return false
}

func (s *state) replay(replays []projector.Replay, now time.Time) {
	for _, r := range replays {
		if !r.Stays {
			s.resolve(r.Seq, projector.Replayed, r.Decision, now)
		}
	}
}

// resolve ends the parking of a message. The first that waits of each handler of its key is due.
func (s *state) resolve(seq int64, to projector.ParkedState, d projector.Decision, now time.Time) {
	p, _ := s.parked.get(seq)
	p.State, p.Decision, p.ResolvedAt = to, d, now
	s.parked, s.due = s.parked.put(seq, p), s.due.drop(seq)
	first := map[string]bool{}
	for later, q := range s.parked.from(seq + 1) {
		waits := q.State == projector.StillParked && q.Class == projector.HeldClass && q.Projector == p.Projector && q.Key == p.Key
		if waits && !first[q.Handler] {
			first[q.Handler] = true
			s.due = s.due.put(later, struct{}{})
		}
	}
}

// ParkedMessages implements projector.ParkedInspector.
func (db *DB) ParkedMessages(ctx context.Context, f projector.ParkedFilter) ([]projector.Parked, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	if f.Limit == 0 {
		f.Limit = 100
	}
	return db.committed.Load().pickParked(f), nil
}

// ParkedCount implements projector.ParkedInspector.
func (db *DB) ParkedCount(ctx context.Context, name string) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	return int64(len(db.committed.Load().pickParked(projector.ParkedFilter{Projector: name}))), nil
}

// SkipParked implements projector.ParkedInspector.
func (db *DB) SkipParked(ctx context.Context, f projector.ParkedFilter, d projector.Decision) (n int, err error) {
	if err := d.Validate(); err != nil {
		return 0, fmt.Errorf("skip parked messages: %w", err)
	}
	err = db.Tx(ctx, func(tx *Model) error {
		now := db.now()
		for _, p := range tx.staged.pickParked(f) {
			if p.State == projector.StillParked {
				tx.staged.resolve(p.Seq, projector.Skipped, d, now)
				n++
			}
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("skip parked messages: %w", err)
	}
	return n, nil
}

// pickParked is what f picks, in order of Seq; a Limit of 0 is none.
func (s *state) pickParked(f projector.ParkedFilter) []projector.Parked {
	var picked []projector.Parked
	for _, p := range s.parked.from(f.After + 1) {
		switch {
		case p.State != f.State,
			f.Projector != "" && p.Projector != f.Projector,
			f.Handler != "" && p.Handler != f.Handler,
			f.Key != "" && p.Key != f.Key,
			f.Class != nil && p.Class != *f.Class,
			f.Code != "" && p.Code != f.Code,
			f.Seqs != nil && !slices.Contains(f.Seqs, p.Seq):
			continue
		}
		picked = append(picked, ownParked(p))
		if len(picked) == f.Limit {
			break
		}
	}
	return picked
}

// Outcomes implements projector.State.
func (db *DB) Outcomes(ctx context.Context, keys []marker.Key) ([]projector.Outcome, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("look up outcomes: %w", err)
	}
	s := db.committed.Load()
	outcomes := make([]projector.Outcome, len(keys))
	for i, k := range keys {
		outcomes[i] = s.outcome(k)
	}
	return outcomes, nil
}

func (s *state) outcome(k marker.Key) projector.Outcome {
	if s.marked(k) {
		return projector.Applied
	}
	is := projector.Unseen
	for _, p := range s.parked.from(0) {
		if p.MessageID != k.MessageID || !isOf(p, k.Handler, k.Was) || p.Handler == "" && !strings.HasPrefix(k.Handler, p.Projector+"/") {
			continue
		}
		switch p.State {
		case projector.StillParked:
			return projector.IsParked
		case projector.Skipped:
			is = projector.IsSkipped
		}
	}
	return is
}

// ownParked is own for parked messages.
func ownParked(p projector.Parked) projector.Parked {
	p.Payload = bytes.Clone(p.Payload)
	p.Headers = maps.Clone(p.Headers)
	return p
}
