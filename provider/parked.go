package provider

import (
	"errors"
	"slices"
	"time"
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

// IsOpen says whether a message is waiting or stuck.
func (s ParkedState) IsOpen() bool { return s == StateWaiting || s == StateStuck }
