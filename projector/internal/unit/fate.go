package unit

import (
	"slices"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Fate is what becomes of a message in a unit.
type Fate int

// The fates.
const (
	Run     Fate = iota // its handlers run
	Changed             // a parked message that has changed since it was listed: nothing
	Left                // to the reader of the log: nothing
	Unread              // left, but the reader does not read its type: set aside alone
	Applied             // its handlers have applied it before
	Skipped             // an operator has skipped it
	Partly              // a part of it was applied, and cannot be undone: set aside
	Behind              // parked behind others of its lane
	Suspect             // it may have crashed a process: set aside, and tried alone
	Failed              // set aside
)

// HasRow reports whether a message with this fate is set aside.
func (f Fate) HasRow() bool {
	return f == Unread || f == Partly || f == Behind || f == Suspect || f == Failed
}

// fates decides about the messages of a unit, in their order. No fate depends on a handler: one that
// fails ends the unit.
type fates struct {
	found   provider.Found
	stopped map[provider.Lane]bool // lanes in which this unit has set a message aside
}

func (f *fates) of(i int, m *model.Message) Fate {
	reports := func(all []bool) bool { return all != nil && all[i] }
	switch {
	case m.Parked != nil && !f.found.Live[i]:
		return Changed
	case reports(f.found.Left) && m.Aside != nil && len(m.Handlers) == 0:
		return Unread
	case reports(f.found.Left):
		return Left
	case m.Parked == nil && len(m.Handlers) > 0 && !slices.Contains(f.found.Fresh[i], true):
		return Applied
	case m.Skipped:
		return Skipped
	case reports(f.found.Partly):
		return Partly // it must not wait: what waits is applied again
	case m.Parked == nil && f.found.Held[i], f.stopped[m.Lane]:
		return Behind
	case reports(f.found.Suspect):
		return Suspect
	case m.Aside != nil:
		return Failed
	}
	return Run
}

func (f *fates) stop(lane provider.Lane) {
	if f.stopped == nil {
		f.stopped = map[provider.Lane]bool{}
	}
	f.stopped[lane] = true
}
