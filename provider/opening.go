package provider

import (
	"bytes"
	"slices"
)

// What follows is the part of a unit that is the same in every store: which rows to write and to lock, and what the rows that
// are there mean. A provider asks its store, and calls these with the answers.

// IsReplay reports whether the messages of u are parked ones.
func (u *Unit) IsReplay() bool { return len(u.Messages) > 0 && u.Messages[0].Parked != nil }

// Names are all names of the handler, the present one first.
func (h *Handler) Names() []string { return append([]string{h.Name}, h.Was...) }

// Markers are those of the messages with Mark, one for each name of each of their handlers. found, if not nil, leaves out
// messages that are parked and not live.
func (u *Unit) Markers(found *Found) []Marker {
	all := make([]Marker, 0, len(u.Messages))
	for i := range u.Messages {
		m := &u.Messages[i]
		if !m.Mark || found != nil && found.Live != nil && !found.Live[i] {
			continue
		}
		for j := range m.Handlers {
			all = append(all, Marker{m.Handlers[j].Name, m.ID})
			for _, was := range m.Handlers[j].Was {
				all = append(all, Marker{was, m.ID})
			}
		}
	}
	return all
}

// Lanes are the lanes of the messages, each once, in an order in which all units lock them.
func (u *Unit) Lanes() []Lane {
	lanes := make([]Lane, len(u.Messages))
	for i := range u.Messages {
		lanes[i] = u.Messages[i].Lane
	}
	slices.SortFunc(lanes, func(a, b Lane) int { return bytes.Compare(a[:], b[:]) })
	return slices.Compact(lanes)
}

// NewFound is a Found in which no lane is held, and each handler is fresh, or none is.
func (u *Unit) NewFound(fresh bool) Found {
	handlers := 0
	for i := range u.Messages {
		handlers += len(u.Messages[i].Handlers)
	}
	flags := make([]bool, handlers+len(u.Messages))
	for i := range flags[:handlers] {
		flags[i] = fresh
	}
	found := Found{Fresh: make([][]bool, len(u.Messages)), Held: flags[handlers:], Begin: func(int) {}}
	for i := range u.Messages {
		n := len(u.Messages[i].Handlers)
		found.Fresh[i], flags = flags[:n:n], flags[n:]
	}
	return found
}

// SetFresh fills in Fresh. inserted says whether the opening has inserted a marker: if it could insert those of all names of
// a handler, the message is new to it.
func (f *Found) SetFresh(u *Unit, inserted func(Marker) bool) {
	for i := range u.Messages {
		m := &u.Messages[i]
		if f.Live != nil && !f.Live[i] {
			continue
		}
		for j, h := range m.Handlers {
			missing := func(name string) bool { return !inserted(Marker{name, m.ID}) }
			f.Fresh[i][j] = !m.Mark || !missing(h.Name) && !slices.ContainsFunc(h.Was, missing)
		}
	}
}

// SetHeld fills in Held.
func (f *Found) SetHeld(u *Unit, held Lane) {
	for i := range u.Messages {
		f.Held[i] = f.Held[i] || u.Messages[i].Lane == held
	}
}

// SetLive fills in Live. front are the first messages of the unit's lanes that are waiting or stuck, at least as many of each
// lane as the unit has, each lane in order of Seq, with Seq, Lane, Attempts, State and Handlers. due has the lanes that the
// unit has locked, and says whether their time has come.
func (f *Found) SetLive(u *Unit, front []Parked, due map[Lane]bool) {
	f.Live = make([]bool, len(u.Messages))
	at := make(map[int64]int, len(u.Messages))
	for i := range u.Messages {
		at[u.Messages[i].Parked.Seq] = i
	}
	next := map[Lane]int{} // the first message of the unit that may follow in the lane
	for _, is := range front {
		isDue, locked := due[is.Lane]
		i, asked := at[is.Seq]
		live := asked && locked && i >= next[is.Lane] && is.IsAsListed(u.Messages[i].Parked) &&
			(u.DryRun != nil || is.State == StateWaiting && (isDue || is.Attempts > 0)) // with attempts, Try has put the lane off for this unit
		if next[is.Lane] = i + 1; !live {
			next[is.Lane] = len(u.Messages) // none behind it is first
			continue
		}
		f.Live[i] = true
	}
}

// IsAsListed reports whether p has the attempts and the handlers with which it was listed.
func (p *Parked) IsAsListed(listed *Parked) bool {
	return p.Attempts == listed.Attempts && slices.Equal(p.Handlers, listed.Handlers)
}
