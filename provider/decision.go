package provider

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/eventstore"
)

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

// CheckDecision returns ErrInput unless Parking.Decide can make messages to, as d says. If By or Reason is not UTF-8 or
// has a NUL, the error is an *eventstore.InvalidError too.
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
