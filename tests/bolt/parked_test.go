package bolt

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Messages that wait or are stuck are in the queue of their lane. A lane is held while its queue is not
// empty, and due when its first message is. The DueAt of the other messages does not count until they
// are first.

func buildOf(p *provider.Parked) provider.Build {
	return provider.Build{Projector: p.Projector, Generation: p.Generation}
}

func buildKey(b provider.Build) []byte { return key(b.Projector, b.Number()) }

func laneKey(p *provider.Parked) []byte {
	return key(p.Projector, buildOf(p).Number(), p.Lane, p.Seq)
}

func idKey(p *provider.Parked) []byte { return key(p.Projector, buildOf(p).Number(), p.MessageID) }

// front returns the first messages of a lane, at most n.
func (s *session) front(b provider.Build, lane provider.Lane, n int) (front []provider.Parked) {
	for k := range lanes.under(s, key(b.Projector, b.Number(), lane)) {
		if len(front) == n {
			break
		}
		p, _ := parked.get(s, key(number(k)))
		front = append(front, p)
	}
	return front
}

func isDue(front []provider.Parked, now time.Time) bool {
	return len(front) > 0 && front[0].IsDue(now)
}

// park adds a delivery to the end of its lane. If the message is parked already, park adds the handlers
// to it, unless a person skipped the message.
func (s *session) park(b provider.Build, a provider.Aside) {
	p := a.Parked
	p.Projector, p.Generation = b.Projector, b.Number()
	if seq, ok := parkedIDs.get(s, idKey(&p)); ok {
		if is, _ := parked.get(s, key(seq)); is.State.IsOpen() {
			is.AddHandlers(p.Handlers)
			parked.put(s, key(seq), is)
		}
		return
	}
	p.Seq, p.At, p.ResolvedAt, p.Decision = parked.next(s), s.now, time.Time{}, provider.Decision{}
	lanes.put(s, laneKey(&p), true)
	if p.MessageID != "" {
		parkedIDs.put(s, idKey(&p), p.Seq)
	}
	s.keep(p, a.After)
}

// keep stores a message that may be tried after this time from now, once it is the first of its lane. If
// after is negative, the message is stuck.
func (s *session) keep(p provider.Parked, after time.Duration) {
	p.Wait(after, s.now)
	parked.put(s, key(p.Seq), p)
}

// resolve removes a message from its lane and makes the next one due. The id of a replayed message can be
// parked again.
func (s *session) resolve(p provider.Parked, to provider.ParkedState) {
	p.State, p.ResolvedAt, p.DueAt = to, s.now, time.Time{}
	parked.put(s, key(p.Seq), p)
	if to == provider.StateReplayed {
		parkedIDs.drop(s, idKey(&p))
	}
	lanes.drop(s, laneKey(&p))
	front := s.front(buildOf(&p), p.Lane, 1)
	if len(front) > 0 && front[0].Seq > p.Seq && front[0].State == provider.StateWaiting {
		s.keep(front[0], 0)
	}
}

func (db *DB) Due(ctx context.Context, f provider.DueFilter) ([]provider.Parked, error) {
	return query(ctx, db, "list due messages", provider.CheckDueFilter(f), func(s *session) (due []provider.Parked) {
		for _, b := range f.Builds {
			due = append(due, s.due(b, f)...)
		}
		return due
	})
}

func (s *session) due(b provider.Build, f provider.DueFilter) []provider.Parked {
	var firsts []provider.Parked
	for k := range lanes.under(s, buildKey(b)) {
		if p, _ := parked.get(s, key(number(k))); len(firsts) == 0 || p.Lane != firsts[len(firsts)-1].Lane {
			firsts = append(firsts, p)
		}
	}
	return f.Due(firsts, func(first provider.Parked, n int) []provider.Parked { return s.front(b, first.Lane, n) }, s.now)
}

func (db *DB) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	return update(ctx, db, "try a parked message", nil, func(s *session) (bool, error) {
		front := s.front(buildOf(&p), p.Lane, 1)
		if !isDue(front, s.now) || front[0].Seq != p.Seq || !front[0].Unchanged(&p) {
			return false, nil
		}
		is := front[0]
		if limit >= 0 && is.Attempts >= limit {
			s.keep(is, -1)
			return false, nil
		}
		is.Attempts++
		s.keep(is, again)
		return true, nil
	})
}

func (db *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db, "list parked messages", provider.CheckParkedFilter(f), func(s *session) []provider.Parked { return s.pickParked(f) })
}

func (db *DB) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (int, error) {
	invalid := cmp.Or(provider.CheckDecision(to, d), provider.CheckParkedFilter(f))
	f.States = slices.DeleteFunc(slices.Clone(f.InStates()), func(in provider.ParkedState) bool { return !in.IsOpen() })
	return update(ctx, db, "decide about parked messages", invalid, func(s *session) (int, error) {
		picked := s.pickParked(f)
		for _, p := range picked {
			if d != (provider.Decision{}) {
				p.Decision = d
			}
			if to == provider.StateSkipped {
				s.resolve(p, to)
			} else {
				p.Attempts = 0
				s.keep(p, 0)
			}
		}
		return len(picked), nil
	})
}

// pickParked returns the messages that f selects, with the DueAt of their lanes. A Limit of 0 means no
// limit.
func (s *session) pickParked(f provider.ParkedFilter) (picked []provider.Parked) {
	for _, p := range parked.from(s, nil, key(max(f.After, 0)+1)) {
		if !f.Selects(&p) {
			continue
		}
		if p.State.IsOpen() {
			p.DueAt = s.front(buildOf(&p), p.Lane, 1)[0].DueAt
		}
		if picked = append(picked, p); len(picked) == f.Limit {
			break
		}
	}
	return picked
}
