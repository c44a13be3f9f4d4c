package claim

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
)

// Backoff is a retry schedule with its limit of attempts. The defaults suit external calls.
type Backoff struct {
	Base     time.Duration // the delay after the first attempt, then doubled; zero means 30s
	Max      time.Duration // the longest delay; zero means 1h, or Base if that is longer
	Attempts int           // the limit of attempts; zero means 8, negative means no limit
	Jitter   float64       // 0 to 1: the largest share taken off a delay at random; zero means none
}

// WithDefaults returns b with its zero fields filled in. A negative Base, a Max shorter than
// Base, and a Jitter outside 0 to 1 are ErrTerms.
func (b Backoff) WithDefaults() (Backoff, error) {
	b.Base = cmp.Or(b.Base, 30*time.Second)
	b.Max, b.Attempts = cmp.Or(b.Max, max(time.Hour, b.Base)), cmp.Or(b.Attempts, 8)
	if b.Base < 0 || b.Max < b.Base || !(b.Jitter >= 0 && b.Jitter <= 1) {
		return b, fmt.Errorf("%w: backoff base %s (must not be negative), max %s (at least base), jitter %g (0 to 1)",
			ErrTerms, b.Base, b.Max, b.Jitter)
	}
	return b, nil
}

// Delay returns the delay after the n-th attempt: min(Base·2^(n-1), Max), less its jitter. An n
// below 1 and an invalid schedule are ErrTerms.
func (b Backoff) Delay(n int) (time.Duration, error) {
	b, err := b.WithDefaults()
	if err != nil {
		return 0, err
	}
	if n < 1 {
		return 0, fmt.Errorf("%w: delay after attempt %d: the first attempt is 1", ErrTerms, n)
	}
	d := pauses.Doubled(b.Base, n-1, b.Max)
	return d - time.Duration(b.Jitter*rand.Float64()*float64(d)), nil
}

// Exhausted reports whether n attempts have reached the limit.
func (b Backoff) Exhausted(n int) bool {
	b, _ = b.WithDefaults()
	return b.Attempts > 0 && n >= b.Attempts
}
