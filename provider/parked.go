package provider

import (
	"errors"
	"slices"
	"time"
)

// Parked is a parked message (dead letter), with everything that is needed to inspect it and to
// apply it later.
type Parked struct {
	Seq       int64 // the order of parking
	Projector string
	// Generation is that of the read model; see Build.
	Generation int
	// Handler is the full name of the handler that failed, or "".
	Handler string
	// Handlers are the full names of the handlers that must run. Empty means all handlers of its
	// type that have not applied it.
	Handlers  []string
	MessageID string // empty if the message had none
	Topic     string // the topic of the delivery
	Key       string // its ordering key, or ""
	Lane      Lane   // the lane that it holds until it is resolved
	Type      string // of its event, or ""
	Payload   []byte
	Headers   map[string]string
	Class     Class  // ClassHeld: the message has not failed, but waits behind an earlier one
	Code      string // a SQLSTATE or a word; see docs/operations.md
	Error     string // the text of the last error, with the stack of a panic; at most MaxParkedError bytes
	Attempts  int    // attempts that failed or have begun, in any process
	Version   string // projector.RunnerConfig.Version of the program that parked it or failed last
	At        time.Time
	DueAt     time.Time // when a runner tries its lane again; zero if it waits for an operator

	State      ParkedState
	ResolvedAt time.Time // when it was replayed or skipped
	Decision             // the last decision of an operator
}

// MaxParkedError is the most bytes of Parked.Error. Runners cut longer texts.
const MaxParkedError = 4096

// ParkedState is the state of a parked message.
type ParkedState int

const (
	StateWaiting  ParkedState = iota // a runner tries it again
	StateStuck                       // it waits for an operator
	StateReplayed                    // it was applied after the decision of an operator
	StateSkipped                     // an operator gave it up
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

// MarshalText returns String.
func (s ParkedState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is ParseParkedState.
func (s *ParkedState) UnmarshalText(text []byte) error {
	*s = ParseParkedState(string(text))
	return nil
}

// ErrInput: an argument is invalid, and nothing was changed.
var ErrInput = errors.New("invalid input")

// IsOpen reports whether a message is waiting or stuck.
func (s ParkedState) IsOpen() bool { return s == StateWaiting || s == StateStuck }
