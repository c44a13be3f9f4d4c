package provider

import "time"

// Resolution returns the changes of the live parked messages of u.
func (c *Closing) Resolution(u *Unit, f Found) Resolution {
	r := Resolution{Changed: Changed{}}
	stays := map[int]bool{}
	for _, a := range c.Park {
		if f.Live[a.Message] {
			stays[a.Message], r.Failed = true, append(r.Failed, a)
		}
	}
	for i := range u.Messages {
		if m := &u.Messages[i]; f.Live[i] {
			if r.Changed.Add(u.Build(), m.Lane, m.Parked.Seq); !stays[i] {
				r.Applied = append(r.Applied, m.Parked.Seq)
			}
		}
	}
	return r
}

// Holds returns, for each lane that becomes held because deliveries are parked, the message that it then waits for.
func (c *Closing) Holds(u *Unit, f Found) (holds []Aside) {
	held := map[Lane]bool{}
	for i := range u.Messages {
		if f.Held[i] { // it stays held
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

// Closing is what the provider writes at the commit of a unit, in addition to the writes of the handlers.
type Closing struct {
	Output []OutboxMessage // for the outbox, in the same transaction
	// Park lists messages to set aside. A delivery becomes a parked message behind those of its lane, which is held from
	// then on. A parked message stays parked, with the Class, Code, Attempts, Handler, Handlers and Version of the
	// Aside. All other live parked messages of the unit are deleted or, if an operator decided about them
	// (Parked.By), kept as replayed.
	Park []Aside
}

// Aside is a message to set aside.
type Aside struct {
	Message int // index in Unit.Messages
	// Parked is the message as it is set aside. The provider sets Seq, At, DueAt and State. If one with the same id is
	// parked for the projector, no row is added: its Handlers are. A skipped message stays skipped.
	Parked Parked
	After  time.Duration // until its lane is due, if it is the first message of the lane; negative means stuck
}

// Resolution is the changes of the parked messages of a unit.
type Resolution struct {
	Failed  []Aside // messages that have failed again
	Applied []int64 // Seqs of messages that were applied
	// Changed has the lanes of both. Such a lane is due after Aside.After if its first message is in Failed, and now if
	// that was behind a changed one. It is stuck if its first message is, and no longer held without messages.
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
