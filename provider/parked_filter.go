package provider

// ParkedFilter selects parked messages. The zero filter selects all that are waiting or stuck.
type ParkedFilter struct {
	Projector string `json:"projector,omitempty"`
	// Generation is one of the projector's. Zero means all.
	Generation int           `json:"generation,omitempty"`
	Handler    string        `json:"handler,omitempty"` // the full name of the handler that failed: "balances/deposited"
	Key        string        `json:"key,omitempty"`
	Class      *Class        `json:"class,omitempty"`
	Code       string        `json:"code,omitempty"`
	Types      []string      `json:"types,omitzero"`  // event types; nil means all, empty means none
	States     []ParkedState `json:"states,omitzero"` // nil means waiting and stuck, empty means none
	Seqs       []int64       `json:"seqs,omitzero"`   // nil means all, empty means none
	After      int64         `json:"after,omitempty"` // only greater Seqs; for the next page, the last Seq of this one
	Limit      int           `json:"limit,omitempty"` // zero means 100 for Parking.Parked, and no limit for Parking.Decide
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
