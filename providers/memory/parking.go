package memory

import (
	"bytes"
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Messages that wait or are stuck are in the queue of their lane. It is held while its queue is not
// empty, and due when its first message is. The DueAt of others does not count until they are first.

func laneKey(b provider.Build, lane provider.Lane) string { return pair(buildKey(b), string(lane[:])) }

func laneOfParked(p *provider.Parked) string { return laneKey(buildOf(p), p.Lane) }

func messageKey(p *provider.Parked) string { return pair(buildKey(buildOf(p)), p.MessageID) }

func buildOf(p *provider.Parked) provider.Build {
	return provider.Build{Projector: p.Projector, Generation: p.Generation}
}

// front returns the first messages of a lane, at most n.
func (s *state) front(lane string, n int) (front []provider.Parked) {
	queue, _ := s.lanes.get(lane)
	for seq := range queue.from(0) {
		if len(front) == n {
			break
		}
		p, _ := s.parked.get(seq)
		front = append(front, p)
	}
	return front
}

// park adds a delivery to the end of its lane. One that is parked already gets the handlers, unless a
// person skipped it. A parked message without handlers was parked before its type was known.
func (s *state) park(b provider.Build, a provider.Aside, now time.Time) {
	p := ownParked(a.Parked)
	p.Projector, p.Generation = b.Projector, b.Generation
	id, lane := messageKey(&p), laneOfParked(&p)
	if seq, ok := s.parkedIDs.get(id); ok {
		if is, _ := s.parked.get(seq); is.State.IsOpen() {
			is.AddHandlers(p.Handlers)
			s.parked = s.parked.put(seq, is)
		}
		return
	}
	s.parkings++
	p.Seq, p.At, p.ResolvedAt, p.Decision = s.parkings, now, time.Time{}, provider.Decision{}
	queue, _ := s.lanes.get(lane)
	s.lanes = s.lanes.put(lane, queue.put(p.Seq, struct{}{}))
	if p.MessageID != "" {
		s.parkedIDs = s.parkedIDs.put(id, p.Seq)
	}
	s.keep(p, a.After, now)
}

// keep stores a message that waits, as Parked.Wait says.
func (s *state) keep(p provider.Parked, after time.Duration, now time.Time) {
	p.Wait(after, now)
	s.parked = s.parked.put(p.Seq, p)
}

// resolve takes a message from its lane. The next one is due. A replayed one can be parked again.
func (s *state) resolve(p provider.Parked, to provider.ParkedState, now time.Time) {
	p.State, p.ResolvedAt, p.DueAt = to, now, time.Time{}
	s.parked = s.parked.put(p.Seq, p)
	if to == provider.StateReplayed {
		s.parkedIDs = s.parkedIDs.drop(messageKey(&p))
	}
	s.leaveLane(&p)
	front := s.front(laneOfParked(&p), 1)
	if len(front) > 0 && front[0].Seq > p.Seq && front[0].State == provider.StateWaiting {
		s.keep(front[0], 0, now)
	}
}

// leaveLane removes a message from the queue of its lane.
func (s *state) leaveLane(p *provider.Parked) {
	s.lanes = dropIn(s.lanes, laneOfParked(p), p.Seq)
}

// Due implements provider.Parking.
func (db *Provider) Due(ctx context.Context, f provider.DueFilter) ([]provider.Parked, error) {
	return query(ctx, db, "list due messages", provider.CheckDueFilter(f), func(s *state, now time.Time) (due []provider.Parked) {
		for _, b := range f.Builds {
			due = append(due, s.due(b, f, now)...)
		}
		return due
	})
}

// firsts returns the first message of each lane of a build.
func (s *state) firsts(b provider.Build) (firsts []provider.Parked) {
	for lane := range under(s.lanes, buildKey(b)) {
		firsts = append(firsts, s.front(lane, 1)...)
	}
	return firsts
}

func (s *state) due(b provider.Build, f provider.DueFilter, now time.Time) []provider.Parked {
	due := f.Due(s.firsts(b), func(first provider.Parked, n int) []provider.Parked { return s.front(laneKey(b, first.Lane), n) }, now)
	for i := range due {
		due[i] = ownParked(due[i])
	}
	return due
}

// Needs implements provider.Parking.
func (db *Provider) Needs(ctx context.Context, after []provider.Need) ([]provider.Need, error) {
	return query(ctx, db, "list needs", provider.CheckNeeds(after), func(s *state, _ time.Time) (all []provider.Need) {
		for _, a := range after {
			all = append(all, provider.NeedsOf(a, s.firsts(a.Build))...)
		}
		return all
	})
}

// Try implements provider.Parking.
func (db *Provider) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	return update(ctx, db, "try a parked message", nil, func(s *state, now time.Time) (bool, error) {
		front := s.front(laneOfParked(&p), 1)
		if len(front) == 0 {
			return false, nil
		}
		ok, changed := front[0].Try(&p, limit, again, now)
		if changed {
			s.parked = s.parked.put(front[0].Seq, front[0])
		}
		return ok, nil
	})
}

// Parked implements provider.Parking.
func (db *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db.Provider, "list parked messages", provider.CheckParkedFilter(f), func(s *state, _ time.Time) []provider.Parked { return s.pickParked(f) })
}

// ParkedCount returns how many messages of a projector's live generation wait or are stuck. If the
// name is empty, it counts those of all projectors.
func (db *DB) ParkedCount(ctx context.Context, projector string) (int64, error) {
	return query(ctx, db.Provider, "count parked messages", provider.CheckStorable("projector", projector), func(s *state, _ time.Time) int64 {
		rows := s.pickParked(provider.ParkedFilter{Projector: projector})
		return int64(len(slices.DeleteFunc(rows, func(p provider.Parked) bool {
			g, known := s.generations.get(buildKey(provider.Build{Projector: p.Projector, Generation: p.Generation}))
			return known && g.State != provider.GenerationLive
		})))
	})
}

// Decide implements provider.Parking.
func (db *Provider) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (int, error) {
	invalid := cmp.Or(provider.CheckDecision(to, d), provider.CheckParkedFilter(f))
	f.States = slices.DeleteFunc(slices.Clone(f.InStates()), func(in provider.ParkedState) bool { return !in.IsOpen() })
	return update(ctx, db, "decide about parked messages", invalid, func(s *state, now time.Time) (int, error) {
		picked := s.pickParked(f)
		for _, p := range picked {
			if d != (provider.Decision{}) {
				p.Decision = d
			}
			if to == provider.StateSkipped {
				s.resolve(p, to, now)
			} else {
				p.Attempts = 0
				s.keep(p, 0, now)
			}
		}
		return len(picked), nil
	})
}

// pickParked returns the messages that f selects, in order of Seq. A Limit of 0 means no limit.
func (s *state) pickParked(f provider.ParkedFilter) (picked []provider.Parked) {
	for _, p := range s.parked.from(f.After + 1) {
		if !f.Selects(&p) {
			continue
		}
		if picked = append(picked, s.shown(p)); len(picked) == f.Limit {
			break
		}
	}
	return picked
}

// shown returns p as a caller gets it: a copy, with the DueAt of its lane.
func (s *state) shown(p provider.Parked) provider.Parked {
	if p = ownParked(p); p.State.IsOpen() {
		p.DueAt = s.front(laneOfParked(&p), 1)[0].DueAt
	}
	return p
}

// ownParked copies the bytes, maps and slices of a parked message, as own does for an event.
func ownParked(p provider.Parked) provider.Parked {
	p.Payload, p.Headers, p.Handlers = bytes.Clone(p.Payload), maps.Clone(p.Headers), slices.Clone(p.Handlers)
	return p
}
