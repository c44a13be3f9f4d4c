package provider

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kinora-go/kinora/eventstore"
)

// Parked is a message that was set aside, with all that is needed to look into it and to apply it later.
type Parked struct {
	Seq       int64 // the order of parking
	Projector string
	Handler   string   // the handler that failed, in full; empty if none did
	Handlers  []string // the handlers that are to run it, in full; empty: all that take it, as far as they have not applied it
	MessageID string   // empty if the message had none
	Topic     string   // where it came from
	Key       string   // its ordering key, if it had one
	Lane      Lane     // what it holds until it is resolved
	Type      string   // of its event, if the message says so
	Payload   []byte
	Headers   map[string]string
	Class     Class  // ClassHeld: nothing is wrong with it, it waits behind an earlier one
	Code      string // SQLSTATE, or a word: see docs/operations.md
	Attempts  int    // that failed or were begun, in any process
	Version   string // of the program that parked it or failed at it last (projector.RunnerConfig.Version)
	At        time.Time
	DueAt     time.Time // when its lane is tried again by itself; zero if that waits for a person

	State      ParkedState
	ResolvedAt time.Time // when it was replayed or skipped
	Decision             // a person's last decision about it
}

// ParkedState is what became of a message that was set aside.
type ParkedState int

const (
	StateWaiting  ParkedState = iota // it is tried again by itself
	StateStuck                       // it waits for a person
	StateReplayed                    // applied after a person's decision
	StateSkipped                     // given up by a person
)

var states = [...]string{"waiting", "stuck", "replayed", "skipped"}

func (s ParkedState) String() string {
	if s < 0 || int(s) >= len(states) {
		return states[StateWaiting]
	}
	return states[s]
}

// ParseParkedState is the inverse of ParkedState.String. Any other text is StateStuck.
func ParseParkedState(s string) ParkedState {
	if i := slices.Index(states[:], s); i >= 0 {
		return ParkedState(i)
	}
	return StateStuck
}

// ErrInput: what was asked for is not possible; nothing was done.
var ErrInput = errors.New("invalid input")

// Decision says who decided about a parked message, and why. It is kept with the message. The zero Decision is a
// runner's own.
type Decision struct{ By, Reason string }

// Validate returns ErrInput unless both By (at most 255 bytes) and Reason (at most 1000 bytes) are given.
func (d Decision) Validate() error {
	if d.By == "" || d.Reason == "" || len(d.By) > 255 || len(d.Reason) > 1000 {
		return fmt.Errorf("%w: decision by %q, reason of %d bytes: give who decides (at most 255 bytes) and why (at most 1000 bytes)", ErrInput, d.By, len(d.Reason))
	}
	return nil
}

// CheckDecision returns ErrInput unless Parking.Decide can make messages to, as d says. Text of d
// that is not UTF-8 or has a NUL is an *eventstore.InvalidError too.
func CheckDecision(to ParkedState, d Decision) error {
	if to != StateWaiting && to != StateSkipped {
		return fmt.Errorf("%w: a decision cannot make messages %s", ErrInput, to)
	}
	if d == (Decision{}) {
		return nil
	}
	if err := d.Validate(); err != nil {
		return err
	}
	for _, f := range []struct{ field, text string }{{"decision.by", d.By}, {"decision.reason", d.Reason}} {
		if !utf8.ValidString(f.text) || strings.Contains(f.text, "\x00") {
			return fmt.Errorf("%w: %w", ErrInput, &eventstore.InvalidError{Field: f.field, Reason: "want UTF-8 without NUL characters"})
		}
	}
	return nil
}

// ParkedFilter selects parked messages; the zero filter selects all that are not resolved. See
// CheckParkedFilter.
type ParkedFilter struct {
	Projector string
	Handler   string // the handler that failed
	Key       string
	Class     *Class
	Code      string
	Types     []string      // of these event types; nil: any; empty: none
	States    []ParkedState // in one of these; nil: waiting or stuck; empty: none
	Seqs      []int64       // these; nil: any; empty: none
	After     int64         // only greater Seqs: the last one of the page before
	Limit     int           // zero means 100 for Parking.Parked, and no limit for Parking.Decide
}

// InStates are the States of f: waiting and stuck if it has none.
func (f *ParkedFilter) InStates() []ParkedState {
	if f.States == nil {
		return []ParkedState{StateWaiting, StateStuck}
	}
	return f.States
}

// IsOpen says whether a message is waiting or stuck.
func (s ParkedState) IsOpen() bool { return s == StateWaiting || s == StateStuck }

// DueFilter selects what Parking.Due lists.
type DueFilter struct {
	Projectors []string
	Lanes      []Lane // only these; nil: any; empty: none
	Keys       int    // at most this many lanes of each projector
	Each       int    // at most this many messages of a lane
}
