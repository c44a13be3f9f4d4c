package provider

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"
)

// Unit describes one transaction of a projector. Its messages are all deliveries, or all parked ones.
type Unit struct {
	Projector  string
	Generation int       // see Build
	Messages   []Message // in order; no id twice
	// Careful, if not nil, is the worker that runs the unit. Then Found.Suspect reports the messages that
	// other runners have in flight (Liveness.InFlight), and the commit deletes those of this worker.
	Careful *Worker
	// Reader, if not nil, is the reader of the log that read the messages. They are applied in every mode.
	// The error is ErrFenced unless the checkpoint has its mode and token until the unit ends.
	Reader *Reader
	// Advance, if not nil, moves the checkpoint in the same transaction. Then no markers are inserted: a
	// message is fresh for a handler that has no marker of it. The unit may have no messages.
	Advance *Advance
	// Segment, if not zero, makes Reader and Advance concern the position and the token of a segment, with
	// the mode of the checkpoint. The error is ErrFenced also if the current Split does not have it.
	Segment int
	// Restore: the messages are recorded as parked next to the read model, but they are not parked: they were
	// applied once, and the read model has gone back to an earlier state. They are applied again.
	Restore bool
	// Checkpointed: the projector has a checkpoint. If the read model's store has none, it has lost it.
	Checkpointed bool
	// Timeout, if not zero, is how long each handler may take. A store whose statements wait for locks lets one wait for
	// half of it, at most: the error is then ClassTransient, as the message is not to blame.
	Timeout time.Duration
	Serial  bool    // wait until no other serial unit of the projector is open; runners set it after deadlocks
	Switch  *Switch // if not nil, change the live generation, or compare two generations
	Once    bool    // run is called only once, after the opening, because its effects cannot be undone
	// DryRun, if not nil, makes the unit a dry run: it is rolled back, and unless Do returns an error, DryRun
	// is called with the rows that the handlers changed, without those of the provider's own tables, ordered
	// by table and key. In a dry run a parked message may be stuck.
	DryRun func([]Change)
}

// Message is one message of a unit.
type Message struct {
	ID       string    // may be empty
	Lane     Lane      // the lane that is held if the message is parked
	Handlers []Handler // the handlers to run, in order; may be empty
	Mark     bool      // insert a marker for each of Handlers
	// Position is that of an event of the projector's log, which is stored with its marker; 0: it is none.
	Position int64
	Parked   *Parked // the parked message as it was listed; nil for a delivery
}

// Handler has the names of a handler.
type Handler struct {
	Name string   // the full name, such as "product-ratings/posted"
	Was  []string // its earlier full names: a marker with one of them counts, and new markers have all names
}

// Units runs units of work. All errors are *Error, also those of handlers.
type Units[Tx any] interface {
	// Do opens u, calls run with the result of the opening, and commits the writes of run through tx, the
	// Closing that it returned, and the markers: all of these, or nothing.
	//   - The opening has these steps, each with a new snapshot: the shared lock of the projector (see
	//     Switch); the markers, sorted, while each insert waits for a concurrent unit that writes the same
	//     marker; which lanes are held, and they stay held until the unit ends; which messages other runners
	//     have in flight.
	//   - If the projector has a checkpoint, its mode and position are read in the same step as the markers.
	//     They decide about messages with Mark and a Position (Found.Left, Found.Fresh). The position is read
	//     again in a later step, because Progress.PruneApplied may have deleted markers in between.
	//     Unit.Advance locks the checkpoint.
	//   - A unit of a generation whose checkpoint has ModeEnded fails with ErrEnded, whatever its messages are.
	//   - The unit locks the lanes of parked messages. If another unit has the lane, the message is not
	//     fresh, but if it has attempts (Parking.Try), the unit waits for the lane.
	//   - Without u.Once and u.Careful, run may be called again after its earlier writes are undone, and the first
	//     call may be before any statement is sent, with a Found in which all messages are fresh.
	//   - If run ends tx, the error is permanent. If it panics or calls runtime.Goexit, nothing is committed.
	//   - In a store with one writer, a call with run's ctx that would wait for the unit is ErrInTransaction.
	//   - If run does not return within a second after ctx ends, its writes and locks end; Do returns when run does.
	//   - If run only queues statements, and ctx ends before they finish, the error is ClassUnknown with
	//     CodeDeadline if they are undone, and ClassAmbiguous if they may have been committed.
	//   - An error without a class becomes permanent or unknown (HandlerError). The end of ctx is never
	//     permanent. A deadlock is transient with CodeDeadlock. The error contains a *MessageError if the
	//     statement that failed belongs to a message (Found.Begin).
	Do(ctx context.Context, u Unit, run func(ctx context.Context, tx Tx, found Found) (Closing, error)) error

	// Keeps returns what Do commits together with the writes of run. A wrapper must pass it on.
	Keeps() Keeps
}

// Provider is a store for runners. Tx is the transaction type of its handlers.
type Provider[Tx any] interface {
	Units[Tx]
	Parking
	Liveness
	Records
	Progress
	Builds
	Leases
}

// Keeps lists what Units.Do can commit together with the writes of handlers.
type Keeps struct {
	// Atomic: a unit that fails has no effect. If false, messages are applied one after another, and a unit
	// that fails may have applied some: their markers show which, or without markers MessageError.Others.
	Atomic  bool
	Markers bool // markers of Message.Mark
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is supported
	Tables  bool // Unit.Switch can rename, show and compare tables
	Reset   bool // Unit.Switch can empty tables
}

// Change is a row that a dry run inserted (no Before), updated, or deleted (no After).
type Change struct {
	Table  string          `json:"table"`            // with its schema unless that is the default schema
	Before json.RawMessage `json:"before,omitempty"` // an object of the columns
	After  json.RawMessage `json:"after,omitempty"`
}

// Found is the result of opening a unit, by the index of the message.
type Found struct {
	// Fresh reports for each handler of a message whether it must run.
	//   - A message with Mark: the handler had no marker of it. If the projector has a checkpoint,
	//     and the message a Position, the Position is behind the checkpoint.
	//   - A message without Mark: always true, unless the message is parked.
	//   - A parked message: false for all handlers, unless the message is live (see Live).
	Fresh [][]bool
	// Left reports whether a delivery is left to the reader of the log: the projector is in ModeCatchUp, and
	// its Position is behind the checkpoint. It is not fresh, and has no marker. Nil if no message is.
	Left     []bool
	Held     []bool // whether the lane is held, until the unit ends; false for parked messages
	Suspect  []bool // whether another runner has the message in flight; only with Unit.Careful
	Recorded []bool // whether the message is recorded as parked (MarkerUnits); nil if none is
	// Partly: an earlier unit has applied a part, and could not undo it. It must be set aside with CodePartly. Nil if none is.
	Partly []bool
	// Live reports whether a parked message can run: it waits as it was listed (Unchanged), no other unit has its
	// lane, and all messages before it in the lane are in this unit before it. Nil for deliveries.
	Live []bool
	// Begin must be called with the index of a message before its handlers run, or -1 if the statements that
	// follow belong to several. Then a *MessageError reports the message of a failed statement.
	Begin func(message int)
}

// The functions below are the same in every store: which rows a unit writes and locks, and which handlers run.

// Build returns the generation that the unit belongs to.
func (u *Unit) Build() Build { return Build{u.Projector, max(u.Generation, 1)} }

// IsReplay reports whether the messages of u are parked ones.
func (u *Unit) IsReplay() bool { return len(u.Messages) > 0 && u.Messages[0].Parked != nil }

// Names returns all names of the handler, the current one first.
func (h *Handler) Names() []string { return append([]string{h.Name}, h.Was...) }

// Markers returns the markers of the messages with Mark, one for each name of each of their
// handlers. If found is not nil, those of parked messages that are not live are left out.
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

// Lanes returns the lanes of the messages, each once, in the order in which all units lock them.
func (u *Unit) Lanes() []Lane {
	lanes := make([]Lane, len(u.Messages))
	for i := range u.Messages {
		lanes[i] = u.Messages[i].Lane
	}
	slices.SortFunc(lanes, func(a, b Lane) int { return bytes.Compare(a[:], b[:]) })
	return slices.Compact(lanes)
}

// NewFound returns a Found in which no lane is held, and Fresh is the given value for all handlers.
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

// SetFresh sets Fresh: a message is fresh for a handler if the opening has inserted the markers of all its names.
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

// SetProgress compares the unit with the checkpoint of its projector, the zero Checkpoint if there is none.
// Call it after SetFresh, with a checkpoint that was read after the markers.
func (f *Found) SetProgress(u *Unit, c Checkpoint) error {
	a, r := u.Advance, u.Reader
	if c.Mode == ModeEnded {
		return &Error{Class: ClassTransient, Code: CodeEnded, Err: ErrEnded}
	}
	if a != nil && (c.Mode == 0 || a.From != c.Place.Position || a.Mode != c.Mode || a.Token != c.Token) ||
		r != nil && (r.Mode != c.Mode || r.Token != c.Token) {
		return &Error{Class: ClassTransient, Code: CodeFenced, Err: ErrFenced}
	}
	isDelivery := r == nil && a == nil
	for i := range u.Messages {
		switch m := &u.Messages[i]; {
		case !c.concerns(m):
			continue
		case isDelivery && c.Mode == ModeClosing:
			return errClosing
		case isDelivery && c.Mode == ModeCatchUp && !c.Covers(m):
			if f.Left == nil {
				f.Left = make([]bool, len(u.Messages))
			}
			f.Left[i] = true
		case !c.Covers(m):
			continue
		}
		clear(f.Fresh[i])
	}
	return nil
}

// concerns reports whether the checkpoint has a say about m: not if m is parked, as it passes these.
func (c *Checkpoint) concerns(m *Message) bool {
	return c.Mode != 0 && m.Mark && m.Position > 0 && m.Parked == nil
}

// Covers reports whether m is a duplicate because its event is not behind the checkpoint.
func (c *Checkpoint) Covers(m *Message) bool {
	return c.concerns(m) && m.Position <= c.Place.Position
}

var errClosing = &Error{Class: ClassTransient, Code: CodeClosing, Err: errors.New("the reader of the log applies the last events")}

// SetHeld sets Held for the messages of a lane.
func (f *Found) SetHeld(u *Unit, held Lane) {
	for i := range u.Messages {
		f.Held[i] = f.Held[i] || u.Messages[i].Lane == held
	}
}

// SetLive sets Live. front are the first waiting or stuck messages of the unit's lanes: of each lane at least
// as many as the unit has, in order of Seq. due has the lanes that the unit has locked, and whether each is due.
func (f *Found) SetLive(u *Unit, front []Parked, due map[Lane]bool) {
	f.Live = make([]bool, len(u.Messages))
	at := make(map[int64]int, len(u.Messages))
	for i := range u.Messages {
		at[u.Messages[i].Parked.Seq] = i
	}
	next := map[Lane]int{} // the first message of the unit that may follow in the lane
	for _, is := range front {
		isDue, locked := due[is.Lane]
		if _, seen := next[is.Lane]; !seen && locked && is.Class == ClassUnable { // the program meets its needs
			isDue, due[is.Lane] = true, true
		}
		i, asked := at[is.Seq]
		// With attempts, Try has delayed the lane for this unit.
		live := asked && locked && i >= next[is.Lane] && is.Unchanged(u.Messages[i].Parked) &&
			(u.DryRun != nil || is.State == StateWaiting && (isDue || is.Attempts > 0))
		if next[is.Lane] = i + 1; !live {
			next[is.Lane] = len(u.Messages) // no message behind it can run
			continue
		}
		f.Live[i] = true
	}
}

// Unchanged reports whether p has the same attempts and handlers as when it was listed.
func (p *Parked) Unchanged(listed *Parked) bool {
	return p.Attempts == listed.Attempts && slices.Equal(p.Handlers, listed.Handlers)
}

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
	// Park lists messages to set aside. A delivery is parked behind those of its lane, which is held from then on. A
	// parked message stays parked, with the Class, Needs, Code, Attempts, Handler, Handlers and Version of the Aside. All other
	// live ones of the unit are deleted or, if an operator decided about them (Parked.By), kept as replayed.
	Park []Aside
}

// Aside is a message to set aside.
type Aside struct {
	Message int // index in Unit.Messages
	// Parked is the message as it is set aside. The provider sets Seq, At, DueAt and State. If one with the same id is
	// parked for the projector, no row is added: its Handlers are. A skipped message stays skipped.
	Parked Parked
	// After is the time until its lane is due, if it is the first message of the lane. Negative means stuck. If Parked.IsUnable,
	// the lane has no due time, and After counts only on a version of the schema that does not store Parked.Needs.
	After time.Duration
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
