package memory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Due implements provider.Parking.
func (db *DB) Due(ctx context.Context, f provider.DueFilter) ([]provider.Parked, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list due messages: %w", err)
	}
	s, now := db.committed.Load(), db.now()
	var list []provider.Parked
	for _, projector := range f.Projectors {
		due := s.due(projector, f.Lanes, now)
		for _, h := range due[:min(f.Keys, len(due))] {
			list = append(list, s.front(h, f.Each)...)
		}
	}
	return list, nil
}

// due lists the lanes of a projector whose time has come, in order of their time.
func (s *state) due(projector string, lanes []provider.Lane, now time.Time) (due []hold) {
	prefix := pair(projector, "")
	for at, h := range s.holds.from(prefix) {
		lane, ok := strings.CutPrefix(at, prefix)
		if !ok {
			break
		}
		if h.isDue(now) && (lanes == nil || slices.Contains(lanes, provider.Lane([]byte(lane)))) {
			due = append(due, h)
		}
	}
	slices.SortStableFunc(due, func(a, b hold) int { return a.dueAt.Compare(b.dueAt) })
	return due
}

// front is the first message of a lane, or as many as n if nothing is wrong with them.
func (s *state) front(h hold, n int) (front []provider.Parked) {
	for seq := range h.queue.from(0) {
		p, _ := s.parked.get(seq)
		waits := p.Class == provider.ClassHeld && p.State == provider.StateWaiting
		if len(front) > 0 && (!waits || len(front) >= n) {
			break
		}
		front = append(front, s.shown(p))
		if !waits {
			break
		}
	}
	return front
}

// Try implements provider.Parking.
func (db *DB) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (tried bool, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		s, now := &tx.staged, db.now()
		h, _ := s.holds.get(laneKey(p.Projector, p.Lane))
		is := s.after(h, 0)
		if !h.isDue(now) || is.Seq != p.Seq || !isAsListed(is, p) {
			return nil
		}
		if tried = limit < 0 || is.Attempts < limit; tried {
			is.Attempts++
		} else {
			is.State = provider.StateStuck
		}
		s.keep(is)
		s.schedule(p.Projector, p.Lane, now.Add(again))
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("try parked message %d: %w", p.Seq, err)
	}
	return tried, nil
}

// Parked implements provider.Parking.
func (db *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	if f.Limit == 0 {
		f.Limit = 100
	}
	return db.committed.Load().pickParked(f), nil
}

// ParkedCount returns how many messages of a projector are waiting or stuck; of all projectors if its name is empty.
func (db *DB) ParkedCount(ctx context.Context, projector string) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	return int64(len(db.committed.Load().pickParked(provider.ParkedFilter{Projector: projector}))), nil
}

// Decide implements provider.Parking.
func (db *DB) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	if to != provider.StateWaiting && to != provider.StateSkipped {
		return 0, fmt.Errorf("decide about parked messages: %w: to make them %s", provider.ErrInput, to)
	}
	if d != (provider.Decision{}) {
		if err := d.Validate(); err != nil {
			return 0, fmt.Errorf("decide about parked messages: %w", err)
		}
	}
	err = db.Tx(ctx, func(tx *Model) error {
		s, now := &tx.staged, db.now()
		picked := slices.DeleteFunc(s.pickParked(f), func(p provider.Parked) bool { return !isOpen(p) })
		var first []provider.Parked // of their lanes, whose time this changes
		for _, p := range picked {
			if h, _ := s.holds.get(laneKey(p.Projector, p.Lane)); s.after(h, 0).Seq == p.Seq {
				first = append(first, p)
			}
		}
		for _, p := range picked {
			if p.State = to; to == provider.StateWaiting {
				p.Attempts = 0
			} else {
				p.ResolvedAt = now
			}
			if d != (provider.Decision{}) {
				p.Decision = d
			}
			s.keep(p)
		}
		for _, p := range first {
			s.schedule(p.Projector, p.Lane, now)
		}
		n = len(picked)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("decide about parked messages: %w", err)
	}
	return n, nil
}

// pickParked is what f selects, in order of Seq; a Limit of 0 is none.
func (s *state) pickParked(f provider.ParkedFilter) []provider.Parked {
	states := f.States
	if states == nil {
		states = []provider.ParkedState{provider.StateWaiting, provider.StateStuck}
	}
	var picked []provider.Parked
	for _, p := range s.parked.from(f.After + 1) {
		switch {
		case !slices.Contains(states, p.State),
			f.Projector != "" && p.Projector != f.Projector,
			f.Handler != "" && p.Handler != f.Handler,
			f.Key != "" && p.Key != f.Key,
			f.Class != nil && p.Class != *f.Class,
			f.Code != "" && p.Code != f.Code,
			f.Types != nil && !slices.Contains(f.Types, p.Type),
			f.Seqs != nil && !slices.Contains(f.Seqs, p.Seq):
			continue
		}
		picked = append(picked, s.shown(p))
		if len(picked) == f.Limit {
			break
		}
	}
	return picked
}
