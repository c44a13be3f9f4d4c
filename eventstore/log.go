package eventstore

import (
	"errors"
	"time"
)

// From says where reading of a log begins. The zero value is the beginning. Set at most one field.
type From struct {
	Position int64     // after this position
	Time     time.Time // at the first event that was recorded at this time or later; in the years 1 to 9999
	Now      bool      // after the events that exist now
}

// LogFilter selects events of a log. The zero value selects all.
type LogFilter struct {
	Categories []string // nil means all, empty means none
	Types      []string // stored names; nil means all, empty means none
}

// ErrUnsafeLog: a log cannot be read here without the risk to skip events, for example on a
// replica.
var ErrUnsafeLog = errors.New("the log cannot be read safely here")
