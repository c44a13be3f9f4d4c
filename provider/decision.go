package provider

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/eventstore"
)

// Decision is who decided about a parked message or a task, and why. It is stored with the message,
// or in the trail of the task. The zero Decision is that of a runner; for tasks it is refused.
type Decision struct {
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Validate returns ErrInput unless both By (at most 255 bytes) and Reason (at most 1000 bytes)
// are given.
func (d Decision) Validate() error {
	if d.By == "" || d.Reason == "" || len(d.By) > 255 || len(d.Reason) > 1000 {
		return fmt.Errorf("%w: decision: By has %d bytes and Reason %d: give who decides (1 to 255) and why (1 to 1000)",
			ErrInput, len(d.By), len(d.Reason))
	}
	return nil
}

// CheckDecision checks the arguments of Parking.Decide. It returns ErrInput unless to is
// StateWaiting or StateSkipped, and d is zero or valid. If the text of d is not UTF-8 or
// has a NUL, the error is also an *eventstore.InvalidError.
func CheckDecision(to ParkedState, d Decision) error {
	if to != StateWaiting && to != StateSkipped {
		return fmt.Errorf("%w: a decision can make messages waiting or skipped, not %s", ErrInput, to)
	}
	if d == (Decision{}) {
		return nil
	}
	if err := d.Validate(); err != nil {
		return err
	}
	for _, f := range []struct{ field, text string }{{"decision.by", d.By}, {"decision.reason", d.Reason}} {
		if !utf8.ValidString(f.text) || strings.Contains(f.text, "\x00") {
			return fmt.Errorf("%w: %w", ErrInput, &eventstore.InvalidError{Field: f.field, Reason: "must be UTF-8 without NUL characters"})
		}
	}
	return nil
}
