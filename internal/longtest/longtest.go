// Package longtest chooses between the two forms of a test: the short form, which make test runs, and the long form,
// which make long runs with KINORA_LONG=1. Both forms check the same rules.
package longtest

import "os"

// On reports whether tests run in their long form.
func On() bool { return os.Getenv("KINORA_LONG") != "" }

// Or returns short, or long if tests run in their long form.
func Or[T any](short, long T) T {
	if On() {
		return long
	}
	return short
}
