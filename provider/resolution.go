package provider

// Resolution is the changes of the parked messages of a unit.
type Resolution struct {
	Failed  []Aside // messages that have failed again
	Applied []int64 // Seqs of messages that were applied
	// Changed has the lanes of both. Such a lane is due after Aside.After if its first message is
	// in Failed, and due now if its first message was behind a changed one. It is stuck if its
	// first message is, and no longer held if it has no message.
	Changed Changed
}

// Changed has the Seq of the first changed message of each lane.
type Changed map[Queue]int64

// Add records that a message was changed.
func (c Changed) Add(b Build, lane Lane, seq int64) {
	q := Queue{b.Projector, b.Number(), lane}
	if first, ok := c[q]; !ok || seq < first {
		c[q] = seq
	}
}

// Queue is a lane of a generation.
type Queue struct {
	Projector  string `json:"projector"`
	Generation int    `json:"generation"`
	Lane       Lane   `json:"lane"`
}
