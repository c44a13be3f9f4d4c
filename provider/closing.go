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

// Queue is a lane of a projector.
type Queue struct {
	Projector string `json:"projector"`
	Lane      Lane   `json:"lane"`
}

// Add notes that a message was changed.
func (c Changed) Add(projector string, lane Lane, seq int64) {
	q := Queue{projector, lane}
	if first, ok := c[q]; !ok || seq < first {
		c[q] = seq
	}
}

// Settle says what is to be written about the live messages of u.
func (c *Closing) Settle(u *Unit, f Found) Settlement {
	s := Settlement{Changed: Changed{}}
	stays := map[int]bool{}
	for _, a := range c.Park {
		if f.Live[a.Message] {
			stays[a.Message], s.Stay = true, append(s.Stay, a)
		}
	}
	for i := range u.Messages {
		if m := &u.Messages[i]; f.Live[i] {
			if s.Changed.Add(u.Projector, m.Lane, m.Parked.Seq); !stays[i] {
				s.Done = append(s.Done, m.Parked.Seq)
			}
		}
	}
	return s
}

// Holds are the lanes that the parking of deliveries holds anew, and the message that each then waits for.
func (c *Closing) Holds(u *Unit, f Found) (holds []Aside) {
	held := map[Lane]bool{}
	for i := range u.Messages {
		if f.Held[i] { // and it stays so
			held[u.Messages[i].Lane] = true
		}
	}
	for _, a := range c.Park {
		if lane := a.Parked.Lane; !held[lane] {
			held[lane], holds = true, append(holds, a)
		}
	}
	return holds
}
