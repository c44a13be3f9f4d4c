package memory

import (
	"bytes"
	"maps"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// hold is the queue of a lane: it is there as long as a message in it is waiting or stuck.
type hold struct {
	dueAt time.Time              // when the first message is tried; zero: it is stuck
	queue *tree[int64, struct{}] // the Seqs of the messages
}

func (h hold) isDue(now time.Time) bool { return !h.dueAt.IsZero() && !h.dueAt.After(now) }

func laneKey(projector string, lane provider.Lane) string { return pair(projector, string(lane[:])) }

// after is the first message of a lane with a greater Seq; the zero Parked if there is none.
func (s *state) after(h hold, seq int64) provider.Parked {
	for next := range h.queue.from(seq + 1) {
		p, _ := s.parked.get(next)
		return p
	}
	return provider.Parked{}
}

// isAsListed says whether a message is as it was when p was read.
func isAsListed(is, p provider.Parked) bool {
	return is.Attempts == p.Attempts && slices.Equal(is.Handlers, p.Handlers)
}

func isOpen(p provider.Parked) bool {
	return p.State == provider.StateWaiting || p.State == provider.StateStuck
}

// park sets a delivery aside, at the end of its lane.
func (s *state) park(a provider.Aside, now time.Time) {
	p := ownParked(a.Parked)
	if seq, ok := s.parkedIDs.get(pair(p.Projector, p.MessageID)); ok {
		s.addHandlers(seq, p.Handlers)
		return
	}
	s.parkings++
	p.Seq, p.At, p.State = s.parkings, now, provider.StateWaiting
	p.ResolvedAt, p.Decision = time.Time{}, provider.Decision{}
	if a.After < 0 {
		p.State = provider.StateStuck
	}
	held := s.holds.has(laneKey(p.Projector, p.Lane))
	s.keep(p)
	if !held {
		s.schedule(p.Projector, p.Lane, now.Add(a.After))
	}
}

// addHandlers adds handlers to a message that is parked already, unless it was skipped. One without handlers was parked
// before its type was known: only the handlers that are added have left their markers.
func (s *state) addHandlers(seq int64, handlers []string) {
	p, _ := s.parked.get(seq)
	if !isOpen(p) {
		return
	}
	p.Handlers = slices.Clone(p.Handlers)
	for _, h := range handlers {
		if !slices.Contains(p.Handlers, h) {
			p.Handlers = append(p.Handlers, h)
		}
	}
	s.keep(p)
}

// keep stores p. As long as it is waiting or stuck it is in the queue of its lane, and until it is replayed no message
// with its id is parked again.
func (s *state) keep(p provider.Parked) {
	p.DueAt = time.Time{} // it is that of the lane
	s.parked = s.parked.put(p.Seq, p)
	lane, id := laneKey(p.Projector, p.Lane), pair(p.Projector, p.MessageID)
	h, _ := s.holds.get(lane)
	if isOpen(p) {
		h.queue = h.queue.put(p.Seq, struct{}{})
	} else {
		h.queue = h.queue.drop(p.Seq)
	}
	if h.queue == nil {
		s.holds = s.holds.drop(lane)
	} else {
		s.holds = s.holds.put(lane, h)
	}
	if p.State != provider.StateReplayed && p.MessageID != "" {
		s.parkedIDs = s.parkedIDs.put(id, p.Seq)
	} else if seq, _ := s.parkedIDs.get(id); seq == p.Seq {
		s.parkedIDs = s.parkedIDs.drop(id)
	}
}

// forget deletes p.
func (s *state) forget(p provider.Parked) {
	p.State = provider.StateReplayed
	s.keep(p)
	s.parked = s.parked.drop(p.Seq)
}

// fail writes into p why it failed, as from says.
func (s *state) fail(p, from provider.Parked, stuck bool) {
	p.Class, p.Code, p.Attempts, p.Handler, p.Version = from.Class, from.Code, from.Attempts, from.Handler, from.Version
	if stuck {
		p.State = provider.StateStuck
	}
	s.keep(p)
}

// schedule says when a lane is tried next: at the given time, or never if its first message is stuck.
func (s *state) schedule(projector string, lane provider.Lane, at time.Time) {
	h, ok := s.holds.get(laneKey(projector, lane))
	if !ok {
		return
	}
	if h.dueAt = at; s.after(h, 0).State == provider.StateStuck {
		h.dueAt = time.Time{}
	}
	s.holds = s.holds.put(laneKey(projector, lane), h)
}

// shown is p as a caller gets it: with the time of its lane, and with bytes and maps of its own.
func (s *state) shown(p provider.Parked) provider.Parked {
	p = ownParked(p)
	if h, ok := s.holds.get(laneKey(p.Projector, p.Lane)); ok && isOpen(p) {
		p.DueAt = h.dueAt
	}
	return p
}

// ownParked is own for parked messages.
func ownParked(p provider.Parked) provider.Parked {
	p.Payload, p.Headers, p.Handlers = bytes.Clone(p.Payload), maps.Clone(p.Headers), slices.Clone(p.Handlers)
	return p
}
