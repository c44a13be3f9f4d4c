package provider

import "time"

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

// Closing is what a unit writes with its commit, besides what the handlers wrote.
type Closing struct {
	Output []OutboxMessage // into the outbox of the same transaction
	// Park lists messages to be set aside. Deliveries become parked messages behind those of their lane, which is
	// held from then on; a parked message stays, with the Class, Code, Attempts, Handler, Handlers and Version of the
	// Aside. All other live parked messages of the unit are resolved: deleted or, if a person decided on them
	// (Parked.By), kept as replayed.
	Park []Aside
}

// Aside is a message to be set aside.
type Aside struct {
	Message int // index in Unit.Messages
	// Parked is the message as it is set aside. The provider fills in Seq, At, DueAt and State.
	//   - A message that is parked for the projector already, by its id, is not parked twice: Handlers is added to
	//     that of the row that is there. One that was skipped stays so.
	Parked Parked
	// After is how long until its lane is due, if it is the first of its lane. Negative: it is stuck.
	After time.Duration
}
