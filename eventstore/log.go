package eventstore

import (
	"context"
	"errors"
	"iter"
	"time"
)

// Log is the log of a store: the events of all its streams, in the order of their positions.
type Log interface {
	// ReadLog yields the events that f selects, from a place on, up to the last one that is
	// visible when the loop begins.
	//   - It skips no event and keeps the order of each stream, also while appends are open, are
	//     rolled back, or commit in another order than that of their positions. For this it waits
	//     for open appends of this database, and for nothing else. If ctx ends while it waits, the
	//     error names them.
	//   - It reads in pages, and holds no cursor, lock or connection while the body of the
	//     caller's loop runs.
	//   - ErrUnsafeLog: this database cannot show which events are missing.
	//   - An error is yielded last, with a zero Raw.
	ReadLog(ctx context.Context, from From, f LogFilter) iter.Seq2[Raw, error]
}

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
