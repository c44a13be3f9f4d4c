package provider

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"
)

// Unit describes one transaction of a projector. Its messages are either all deliveries or all parked ones.
type Unit struct {
	Projector string
	Messages  []Message // in order; no id twice
	// Careful, if not nil, is the worker that runs the unit: Found.Suspect reports the messages that workers of
	// other runners have named (Liveness.Name), and this worker's own names are deleted with the commit.
	Careful *Worker
	// Serial: the unit waits until no other serial unit of the projector is open. Runners set it after deadlocks.
	Serial bool
	// Once: run is called once, after the opening, because what it does cannot be undone.
	Once bool
	// DryRun, if not nil, makes the unit a dry run: it is rolled back instead of committed. Then DryRun gets the
	// rows that the handlers changed, without those of the provider's own tables, ordered by table and key.
	// It is not called if Do returns an error. In a dry run a parked message may be stuck.
	DryRun func([]Change)
}

// Message is one message of a unit.
type Message struct {
	ID       string    // empty if it has none
	Lane     Lane      // what a hold of it holds
	Handlers []Handler // that are to run it, in order; none if no handler takes it
	Mark     bool      // insert a marker for each of Handlers
	Parked   *Parked   // the parked message that it is, as it was listed; nil for a delivery
}

// Handler names a handler.
type Handler struct {
	Name string   // in full: "product-ratings/posted"
	Was  []string // its earlier names, in full: a marker under one of them counts, and a new one is left under each
}

// Lane identifies a queue of messages that wait for each other: those of one ordering key, or a single message.
type Lane [sha256.Size]byte

// MarshalText makes a Lane hexadecimal digits.
func (l Lane) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, l[:]), nil }

// Scan implements sql.Scanner for bytes. Of those of a lane that Kinora did not make it takes what fits.
func (l *Lane) Scan(src any) error {
	b, ok := src.([]byte)
	if !ok {
		return fmt.Errorf("a lane of type %T", src)
	}
	*l = Lane{}
	copy(l[:], b)
	return nil
}

// LaneOfKey is the lane of the messages with this ordering key.
func LaneOfKey(key string) Lane { return sha256.Sum256([]byte("key\x00" + key)) }

// LaneOfMessage is the lane of a message that waits for no other, and no other for it.
func LaneOfMessage(id string) Lane { return sha256.Sum256([]byte("id\x00" + id)) }

// Found is what the opening of a unit found, by the index of the message.
type Found struct {
	// Fresh says for each handler whether it is to run.
	//   - A message with Mark: its marker was not there.
	//   - A message without Mark: always, unless it is a parked one.
	//   - A parked message is fresh for no handler unless it is still waiting as it was listed (same Attempts, same
	//     Handlers), its lane is not taken by another unit, and all messages before it in its lane are earlier
	//     messages of this unit.
	Fresh [][]bool
	// Held: its lane is held, and stays held until the unit ends. Always false for parked messages.
	Held []bool
	// Suspect: another runner has named it. Only set if Unit.Careful is.
	Suspect []bool
	// Live says of parked messages whether they are still there, and first: see Fresh. Nil for deliveries.
	Live []bool
	// Begin must be called with the message's index before its handlers run, so that the provider can say in a
	// *MessageError which message a failing statement belongs to.
	Begin func(message int)
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

// Change is a row that a dry run inserted (no Before), changed, or deleted (no After).
type Change struct {
	Table  string          // with its schema unless that is the usual one
	Before json.RawMessage // an object of its columns
	After  json.RawMessage
}

// Keeps says what Units.Do commits together with what handlers write.
type Keeps struct {
	// Atomic: a unit that fails has no effect. Without it runners make units of one message.
	Atomic  bool
	Markers bool
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is possible
}
