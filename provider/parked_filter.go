package provider

// ParkedFilter selects parked messages. The zero filter selects all that are waiting or stuck.
type ParkedFilter struct {
	Projector string
	// Generation is one of the projector's. Zero means all.
	Generation int
	Handler    string // the full name of the handler that failed: "balances/deposited"
	Key        string
	Class      *Class
	Code       string
	Types      []string      // event types; nil means all, empty means none
	States     []ParkedState // nil means waiting and stuck, empty means none
	Seqs       []int64       // nil means all, empty means none
	After      int64         // only greater Seqs; for the next page, the last Seq of this one
	Limit      int           // zero means 100 for Parking.Parked, and no limit for Parking.Decide
}

// InStates returns f.States, or waiting and stuck if it is nil.
func (f *ParkedFilter) InStates() []ParkedState {
	if f.States == nil {
		return []ParkedState{StateWaiting, StateStuck}
	}
	return f.States
}

// DueFilter selects the messages that Parking.Due returns.
type DueFilter struct {
	Builds []Build
	Lanes  []Lane // nil means all, empty means none
	Keys   int    // the most lanes of each projector
	Each   int    // the most messages of a lane
}
