package provider

import (
	"context"
	"strings"
	"time"
)

// Provider is all that a runner needs of a store.
type Provider[Tx any] interface {
	Units[Tx]
	Parking
	Liveness
	Records
}

// Units runs units of work. All errors are *Error, also those that handlers return.
type Units[Tx any] interface {
	// Do opens u, calls run with what the opening found, and commits all of it: what run wrote through tx, what it
	// returned, the markers. Or it commits nothing.
	//   - The opening is, each step with a snapshot of its own: the projector's fence, shared (see Switch); the
	//     generation; the markers, sorted, each of which waits for a concurrent unit that writes the same one;
	//     which lanes are held, which they stay until the unit ends; which messages other runners have named.
	//   - A parked message is opened by locking its lane. If another unit has the lane, the message is not fresh;
	//     but if it has attempts (Parking.Try), the unit waits for the lane.
	//   - run may be called again, with its earlier writes undone, and before anything is sent with a Found in which
	//     all is fresh; not if u.Once or u.Careful is set.
	//   - run must not end tx: then the unit fails with a permanent *Error.
	//   - If run panics or calls runtime.Goexit, nothing is committed.
	//   - If ctx ends and run does not return within a second, the transaction is broken off: nothing is committed,
	//     and others can have what it locked. Do returns when run does.
	//   - If run only queues statements, and these take until ctx ends and are undone, the error is ClassUnknown
	//     with CodeDeadline. If they may have been committed, it is ClassAmbiguous.
	//   - An error without a class becomes permanent if it is eventstore.ErrInvalid or ErrEventIDReused, else
	//     unknown. The end of ctx is never permanent. A deadlock is transient with CodeDeadlock.
	//   - The error contains a *MessageError if a statement that failed belongs to a message (Found.Begin).
	Do(ctx context.Context, u Unit, run func(ctx context.Context, tx Tx, found Found) (Closing, error)) error

	// Keeps says what Do commits together with run's writes. A wrapper passes it on.
	Keeps() Keeps

	// Switch calls fn while no unit of the projector is open, and makes the generation that fn returns the live one,
	// in the transaction of what fn writes. live is the generation until then; the first one is 1.
	// A unit waits for it, and runs in the new generation.
	Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx Tx, live int) (int, error)) error
}

// Parking keeps messages that were set aside, as a queue for each lane. Each method is a transaction of its own.
type Parking interface {
	// Due lists the first messages of lanes whose time has come, by projector, lane by lane, the lanes in order of
	// their time: of each lane a single message, or up to f.Each if these are ClassHeld. A lane with a stuck message at
	// its front is never due.
	Due(ctx context.Context, f DueFilter) ([]Parked, error)

	// Try counts an attempt at p, which Due has listed, and puts its lane off: nobody else tries it for again, and
	// the attempt counts even if its process ends.
	//   - It is false if p is not as it was listed, its lane is not due, or another unit has its lane.
	//   - It is false, and p is stuck, if p has limit attempts already; a negative limit is none.
	Try(ctx context.Context, p Parked, limit int, again time.Duration) (bool, error)

	// Parked lists what f selects in order of Seq. DueAt is that of the lane.
	Parked(ctx context.Context, f ParkedFilter) ([]Parked, error)

	// Decide makes what f selects, of the messages that are waiting or stuck, due now with no attempts counted
	// (StateWaiting), or skips it (StateSkipped), and returns how many. It keeps d with them unless d is zero.
	//   - What waits behind a skipped message is due.
	//   - Any other state is ErrInput; so is a d that is not zero and that Validate refuses. Nothing is changed then.
	Decide(ctx context.Context, f ParkedFilter, to ParkedState, d Decision) (int, error)
}

// Liveness knows which runners are alive, and what careful workers are about to run. What it knows may be lost in a
// crash of the database, and never in one of a runner. Each method is a transaction of its own.
type Liveness interface {
	// Beat says that runner is alive until lease from now, on the store's clock. A lease of zero says that it ended
	// well: its names are deleted, and it is forgotten. Other runners are forgotten, with their names, when their
	// lease ended longer than record ago.
	Beat(ctx context.Context, runner string, lease, record time.Duration) (Health, error)

	// Name says which messages w is about to run, in place of those that it named before.
	Name(ctx context.Context, projector string, w Worker, messages []string) error
}

// Worker identifies a worker of a runner.
type Worker struct {
	Runner string
	Number int
}

// Health is what Liveness.Beat returns, on the store's clock.
type Health struct {
	Now time.Time
	// Crashed is when the lease of the last runner ended that did not end well, of those not forgotten yet; zero if
	// there is none. That runner ended before it.
	Crashed time.Time
}

// Records reports what became of messages, and deletes what is old.
type Records interface {
	// Outcomes answers each question, in the live generation.
	Outcomes(ctx context.Context, questions []Question) ([]Outcome, error)

	// Prune deletes at most limit markers of each of handlers, of any generation, and at most limit replayed or
	// skipped messages of projector, that are older than window on the store's clock, the oldest first. It returns
	// how many it deleted; zero means that none is left, except those that others delete at this moment. In the
	// same transaction it remembers the time up to which markers of a handler may be missing.
	Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (int, error)
}

// Question asks what became of a message at a handler.
type Question struct {
	Handler    string   // "product-ratings/posted"
	Was        []string // earlier names of the handler: a marker under one of them counts
	MessageID  string
	RecordedAt time.Time // of the message; zero: OutcomePruned is never the answer
}

// Projector is the name of the handler's projector.
func (q *Question) Projector() string {
	name, _, _ := strings.Cut(q.Handler, "/")
	return name
}

// Names are all names of the handler.
func (q *Question) Names() []string { return append([]string{q.Handler}, q.Was...) }

// Outcome is what became of a message at a handler.
type Outcome int

const (
	OutcomeUnseen  Outcome = iota // there is no trace of it
	OutcomeApplied                // its marker is there, and it is not parked
	OutcomeWaiting                // parked, and tried again by itself
	OutcomeStuck                  // parked, and it waits for a person, or behind a message that does
	OutcomeSkipped                // it was parked, and a person gave it up
	OutcomePruned                 // there is no trace of it, and markers of its time may have been deleted
)
