package unit

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// panicError is the error of a handler that has panicked. Its text has no stack, so that logs are short.
type panicError struct {
	value any
	stack []byte // of debug.Stack in a deferred function
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// at returns the stack from the function that has panicked on.
func (e *panicError) at() string {
	_, below, found := bytes.Cut(e.stack, []byte("\npanic("))
	if !found {
		return string(e.stack)
	}
	for range 2 { // the rest of this line, and the place of panic
		_, below, _ = bytes.Cut(below, []byte("\n"))
	}
	return string(below)
}

// TextOf returns the text of an error for Parked.Error: with the stack of a panic, and cut to its limit.
func TextOf(err error) string {
	text := err.Error()
	if p, ok := errors.AsType[*panicError](err); ok {
		text += "\n" + p.at()
	}
	if text = strings.ToValidUTF8(text, "\uFFFD"); len(text) > provider.MaxParkedError {
		text = strings.ToValidUTF8(text[:provider.MaxParkedError], "") // without a part of a rune
	}
	return text
}
