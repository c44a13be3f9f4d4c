package provider

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// Records reports what happened to messages, and deletes old rows.
type Records interface {
	// Outcomes returns the outcome of each question.
	Outcomes(ctx context.Context, questions []Question) ([]Outcome, error)

	// Prune deletes at most limit markers of each of handlers, of any generation, and at most limit replayed or skipped
	// messages of projector, that are older than window on the store's clock, the oldest first. It returns the number
	// of deleted rows. Zero means that none is left, except those that other transactions are deleting. In the same
	// transaction it stores the time up to which markers of a handler may be missing.
	//   - Markers with a position, in a generation that has a checkpoint, are left to Progress.PruneApplied, or the reader
	//     of the log would apply their events again. In other generations they are deleted in any order.
	Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (int, error)
}

// Question identifies a message and a handler.
type Question struct {
	Generation int      // see Build; zero means the live one
	Handler    string   // "product-ratings/posted"
	Was        []string // earlier names of the handler: a marker under one of them counts
	MessageID  string
	RecordedAt time.Time // of the message; if zero or outside the years 1 to 9999, the outcome is never OutcomePruned
	Position   int64     // in the log of the projector's checkpoint; 0 if it has none
}

// Projector returns the name of the handler's projector.
func (q *Question) Projector() string {
	name, _, _ := strings.Cut(q.Handler, "/")
	return name
}

// Names returns all names of the handler, the current one first.
func (q *Question) Names() []string { return append([]string{q.Handler}, q.Was...) }

// Outcome is what a handler did with a message.
type Outcome int

const (
	OutcomeUnseen  Outcome = iota // no marker, and not parked
	OutcomeApplied                // it has a marker or is not behind the checkpoint, and is not parked
	OutcomeWaiting                // parked, and a runner tries it again, or a program that meets its needs
	OutcomeStuck                  // parked, and stuck or behind a stuck message
	OutcomeSkipped                // it was parked, and an operator gave it up
	// OutcomePruned: no marker, and those of its age may be deleted. Never for a Position in a build with a checkpoint.
	OutcomePruned
)

// Marker is a row that records that a handler has applied a message. Handler is one of its names.
type Marker struct{ Handler, MessageID string }

// Liveness records which runners are alive, and which messages they have in flight. A crash of the database may lose
// these records; a crash of a runner does not. Each method is a separate transaction.
type Liveness interface {
	// Beat records that runner is alive until lease from now, on the store's clock. A lease of zero is a clean end.
	// After that, or when a lease ended longer than record ago, the runner and its messages in flight are deleted.
	Beat(ctx context.Context, runner string, lease, record time.Duration) (Health, error)

	// InFlight records the messages that w is about to run. They replace those of the call before.
	InFlight(ctx context.Context, b Build, w Worker, messages []string) error
}

// Worker identifies a worker of a runner.
type Worker struct {
	Runner string
	Number int
}

// Health is what Liveness.Beat returns, on the store's clock.
type Health struct {
	Now     time.Time
	Crashed time.Time // the latest end of a lease of the recorded runners that crashed, before it; zero: none
}

// Leases grants leases on names. At most one token has a name at a time, on the store's clock.
type Leases interface {
	// AcquireLease leases name to t.Token for t.Lease from now on, or extends its lease. It returns false if another
	// token has a lease that has not ended. Leases on other names that ended more than an hour ago are deleted.
	// t is complete (claim.Terms.WithDefaults).
	AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error)

	// ReleaseLease ends the lease of a token. It changes nothing if the token does not have it.
	ReleaseLease(ctx context.Context, name string, token claim.Token) error

	LeaseLister
}

// LeaseLister lists leases.
type LeaseLister interface {
	// LeaseNames returns the names that begin with prefix and that a token has a lease on, in order of their bytes.
	LeaseNames(ctx context.Context, prefix string) ([]string, error)
}

// Facts are what a store knows about the message of a Question.
type Facts struct {
	Parked     *Parked // the message, if it is parked or skipped
	First      *Parked // the first message of its lane
	Checkpoint Checkpoint
	// Marked reports whether a handler has a marker of the message.
	Marked func(handler string) bool
	// Pruned returns the time up to which markers of a handler may have been deleted.
	Pruned func(handler string) time.Time
}

// Outcome returns the answer.
func (q *Question) Outcome(f Facts) Outcome {
	names := q.Names()
	if p := f.Parked; p != nil {
		isAsked := func(handler string) bool { return slices.Contains(names, handler) }
		switch {
		case len(p.Handlers) > 0 && !slices.ContainsFunc(p.Handlers, isAsked): // parked for other handlers
		case p.State == StateSkipped:
			return OutcomeSkipped
		case p.State == StateStuck, f.First.State == StateStuck:
			return OutcomeStuck
		default:
			return OutcomeWaiting
		}
	}
	isPlaced := q.Position > 0 && f.Checkpoint.Mode != 0
	if isPlaced && q.Position <= f.Checkpoint.Place.Position || slices.ContainsFunc(names, f.Marked) {
		return OutcomeApplied
	}
	recorded, _ := StoredTime(q.RecordedAt)
	for _, name := range names {
		if !isPlaced && !recorded.IsZero() && !recorded.After(f.Pruned(name)) {
			return OutcomePruned
		}
	}
	return OutcomeUnseen
}
