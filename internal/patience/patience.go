// Package patience bounds the waits of tests. A wait polls for a condition or listens, and ends as soon as
// that is there. The limit only ends a test that hangs, so it is far beyond what a slow or busy machine needs. Tests that
// compare times compare the fastest of many calls, which such a machine does not make slower.
package patience

import (
	"context"
	"fmt"
	"math"
	"os"
	"testing"
	"time"
)

// Env names the environment variable that sets another Limit, such as "20s". Tests of mutants use it: they wait for
// things that never happen.
const Env = "KINORA_PATIENCE"

// Limit is how long a test waits for something that must happen: 10 minutes, or the duration in Env.
func Limit() time.Duration {
	if d, err := time.ParseDuration(os.Getenv(Env)); err == nil && d > 0 {
		return d
	}
	return 10 * time.Minute
}

// Context returns the context of t, with Limit as its timeout.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), Limit())
	t.Cleanup(cancel)
	return ctx
}

// Until polls until done returns true. It calls done in the test's goroutine, so done may end the test: at once, and then
// after a twentieth of the time that has passed, at least 2 ms and at most 25 ms, so that waits leave the machine to what
// they wait for. Until ends the test if done does not return true within Limit; what describes the condition.
func Until(t testing.TB, done func() bool, what string, args ...any) {
	t.Helper()
	NoError(t, func() error {
		if done() {
			return nil
		}
		return fmt.Errorf(what, args...)
	})
}

// NoError is like Until, and polls until try returns no error. The last error is in the message of the failure.
func NoError(t testing.TB, try func() error) {
	t.Helper()
	begin := time.Now()
	for err := try(); err != nil; err = try() {
		if limit := Limit(); time.Since(begin) > limit {
			t.Fatalf("waited %s for: %v", limit, err)
		}
		time.Sleep(min(max(time.Since(begin)/20, 2*time.Millisecond), 25*time.Millisecond)) // between two polls
	}
}

// Receive returns the next value of a channel, or the zero value if it is closed. It ends the test if none arrives within
// Limit; what describes the value.
func Receive[T any](t testing.TB, from <-chan T, what string, args ...any) (value T) {
	t.Helper()
	limit := time.NewTimer(Limit())
	defer limit.Stop()
	select {
	case value = <-from:
	case <-limit.C:
		t.Fatalf("waited %s for %s", Limit(), fmt.Sprintf(what, args...))
	}
	return value
}

// Fastest returns the shortest time of n calls. What else a machine does makes calls longer, and never shorter.
func Fastest(n int, call func()) time.Duration {
	fastest := time.Duration(math.MaxInt64)
	for range n {
		begin := time.Now()
		call()
		fastest = min(fastest, time.Since(begin)) // compared by tests that give a limit from other calls
	}
	return fastest
}

// attempts is how many calls Faster makes: on a machine on which each CPU has ten things to do, a call is still undisturbed
// once in a while.
const attempts = 1000

// Faster calls until a call takes less than limit, which comes from other calls of the same run, and returns its time. It
// ends the test if none does: whatever else a machine does, it is not the cause then.
func Faster(t testing.TB, limit time.Duration, call func()) time.Duration {
	t.Helper()
	fastest := time.Duration(math.MaxInt64)
	for range attempts {
		if fastest = min(fastest, Fastest(1, call)); fastest < limit {
			return fastest
		}
	}
	t.Fatalf("the fastest of %d calls took %s, not less than %s", attempts, fastest, limit)
	return 0
}
