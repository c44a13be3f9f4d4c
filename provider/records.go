package provider

import (
	"context"
	"strings"
	"time"
)

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
