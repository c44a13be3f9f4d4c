package projector

import (
	"context"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrParked: the event is parked for this projector, so waiting for it is in vain until it is replayed.
	ErrParked = errors.New("the event is parked")
	// ErrSkipped: it was parked, and somebody gave up on it for good.
	ErrSkipped = errors.New("the event was skipped")
	// ErrNotParked: what was to be replayed is not parked any more: somebody else has replayed or skipped it.
	ErrNotParked = errors.New("the message is not parked any more")
	// ErrHeld: an earlier parked message of its key is in the way.
	ErrHeld = errors.New("an earlier message of its key is parked")
	// ErrNotHeld: none is.
	ErrNotHeld = errors.New("no earlier message of its key is parked")
	// ErrHalted: a message of a projector with Halt is parked; the runner runs again once it is replayed or skipped.
	ErrHalted = errors.New("the projector is halted: a message is parked")
	// ErrPruned: markers of that time are gone, so nobody knows whether the message has taken effect since.
	ErrPruned = errors.New("markers of that time are pruned: it may have taken effect")
)

// Parked is a message set aside, with all that is needed to look into it and to handle it later.
type Parked struct {
	Seq       int64 // the order of parking
	Projector string
	Handler   string // "product-ratings/posted"; empty where the message did not get as far as a handler
	MessageID string // empty where the message had none
	Topic     string // where it came from
	Key       string // its ordering key, where it had one
	Type      string // of its event, where it says so
	Holds     bool   // until it is replayed or skipped, it is in the way of later ones of its key (Attempt)
	Payload   []byte
	Headers   map[string]string
	Class     Class  // HeldClass: nothing is wrong with it, it waits behind an earlier one
	Code      string // SQLSTATE, or a word: "malformed", "unregistered", "undecodable", "panic", "deadline", "vanished" (a process ended with its last attempt), …
	Attempts  int    // of the handler, in whatever process
	Version   string // of the program whose handler it was (RunnerConfig.Version)
	At        time.Time

	State      ParkedState
	ResolvedAt time.Time // when it was replayed or skipped
	Decision             // who did, and why
}

// ParkedState is what became of a message that was set aside.
type ParkedState int

const (
	StillParked ParkedState = iota
	Replayed
	Skipped
)

func (s ParkedState) String() string {
	switch s {
	case Replayed:
		return "replayed"
	case Skipped:
		return "skipped"
	default:
		return "parked"
	}
}

// Decision is a person's, or the runner's own, about a parked message. It is kept with it.
type Decision struct{ By, Reason string }

// Validate refuses a decision of nobody, without a reason, or of over 255 and 1,000 bytes.
func (d Decision) Validate() error {
	if d.By == "" || d.Reason == "" || len(d.By) > 255 || len(d.Reason) > 1000 {
		return fmt.Errorf("%w: by %q, reason of %d bytes: want who (at most 255 bytes) and why (at most 1000)", ErrInput, d.By, len(d.Reason))
	}
	return nil
}

// ErrInput: what was asked for cannot be; nothing was done.
var ErrInput = errors.New("invalid input")

// ParkedFilter picks parked messages; the zero filter picks all that are still parked.
type ParkedFilter struct {
	Projector string
	Handler   string
	Key       string
	Class     *Class
	Code      string
	State     ParkedState
	Seqs      []int64 // these; nil: any; empty: none
	After     int64   // only greater Seqs: the last one of the page before
	Limit     int     // zero means 100 for ParkedMessages and Rehearse, and no limit for SkipParked and Replay
}

// ParkedInspector is a capability of a provider: looking at what is parked, and giving up on it.
type ParkedInspector interface {
	// ParkedMessages lists what f picks, in order of Seq.
	ParkedMessages(ctx context.Context, f ParkedFilter) ([]Parked, error)
	// ParkedCount counts the messages that are still parked for projector, for all projectors where it is empty.
	ParkedCount(ctx context.Context, projector string) (int64, error)
	// SkipParked gives up for good on the messages that f picks of those that are still parked, and keeps d with them;
	// it returns how many. What waits behind them is due (Journal.DueParked). Redelivered, they are settled.
	// A d that Validate refuses is its error, nothing changed.
	SkipParked(ctx context.Context, f ParkedFilter, d Decision) (int, error)
}

// Replay is a parked message (Attempt.Seq) that a unit handles.
//   - One that is not parked any more fails the unit with ErrNotParked; one that another is in the way of, with ErrHeld; one
//     parked at a time of which markers of the handler, by any of its names, are pruned, unless Force, with ErrPruned. All of these are
//     permanent *Errors that wrap a *ReplayError, and nothing is recorded.
//   - With the unit's commit it is replayed, also where its mark was not new, and what waits behind it is due. Units with one
//     parked message follow one another.
type Replay struct {
	Attempt
	Stays bool // it stays parked: another of its handlers is still to come
	Force bool
	Decision
}

// ReplayError says which parked message made a unit fail.
type ReplayError struct {
	Seq int64
	Err error // ErrNotParked, ErrHeld, ErrPruned
}

func (e *ReplayError) Error() string { return fmt.Sprintf("parked message %d: %v", e.Seq, e.Err) }

// Unwrap is the error itself.
func (e *ReplayError) Unwrap() error { return e.Err }
