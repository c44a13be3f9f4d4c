package provider

// Settlement is what a unit of parked messages writes about them.
type Settlement struct {
	Stay []Aside // they have failed again: Parked says how
	Done []int64 // the Seqs of those that were applied
	// Changed are the lanes of both: each is due now if its first message is in Stay (then after Aside.After) or was behind
	// one that changed, stuck if its first message is, and held no more if it has none.
	Changed Changed
}

// Changed has the first message, by its Seq, that was changed in each lane.
type Changed map[Queue]int64

// Add notes that a message was changed.
func (c Changed) Add(projector string, lane Lane, seq int64) {
	q := Queue{projector, lane}
	if first, ok := c[q]; !ok || seq < first {
		c[q] = seq
	}
}

// Queue is a lane of a projector.
type Queue struct {
	Projector string `json:"projector"`
	Lane      Lane   `json:"lane"`
}
