package provider

// ParkedFilter selects parked messages; the zero filter selects all that are not resolved. CheckParkedFilter says
// which filters are refused.
type ParkedFilter struct {
	Projector string
	Handler   string // the handler that failed
	Key       string
	Class     *Class
	Code      string
	Types     []string      // of these event types; nil: any; empty: none
	States    []ParkedState // in one of these; nil: waiting or stuck; empty: none
	Seqs      []int64       // these; nil: any; empty: none
	After     int64         // only greater Seqs: the last one of the page before
	Limit     int           // zero means 100 for Parking.Parked, and no limit for Parking.Decide
}

// InStates are the States of f: waiting and stuck if it has none.
func (f *ParkedFilter) InStates() []ParkedState {
	if f.States == nil {
		return []ParkedState{StateWaiting, StateStuck}
	}
	return f.States
}

// DueFilter selects what Parking.Due lists.
type DueFilter struct {
	Projectors []string
	Lanes      []Lane // only these; nil: any; empty: none
	Keys       int    // at most this many lanes of each projector
	Each       int    // at most this many messages of a lane
}
