package claim

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Backoff is the one source of truth for a retry schedule and for its limit of attempts.
// The defaults suit external calls.
type Backoff struct {
	Base     time.Duration // after the first attempt; zero means 30s
	Max      time.Duration // never longer; zero means 1h
	Attempts int           // the limit; zero means 8, negative means none
	Jitter   float64       // 0 to 1: up to this share is taken off each delay, at random; zero means none
}

// WithDefaults fills in what is zero and refuses what makes no schedule with ErrTerms.
func (b Backoff) WithDefaults() (Backoff, error) {
	if b.Base == 0 {
		b.Base = 30 * time.Second
	}
	if b.Max == 0 {
		b.Max = max(time.Hour, b.Base)
	}
	if b.Attempts == 0 {
		b.Attempts = 8
	}
	if b.Base < 0 || b.Max < b.Base || !(b.Jitter >= 0 && b.Jitter <= 1) {
		return b, fmt.Errorf("%w: backoff base %s, max %s (at least base), jitter %g (0 to 1)", ErrTerms, b.Base, b.Max, b.Jitter)
	}
	return b, nil
}

// Delay is min(Base·2^(n-1), Max), less its jitter, after the n-th attempt. n < 1 is ErrTerms.
func (b Backoff) Delay(n int) (time.Duration, error) {
	b, err := b.WithDefaults()
	if err != nil {
		return 0, err
	}
	if n < 1 {
		return 0, fmt.Errorf("%w: delay after attempt %d: attempts count from 1", ErrTerms, n)
	}
	d := b.Max
	if shift := n - 1; shift < 62 && b.Base <= b.Max>>shift {
		d = b.Base << shift
	}
	return d - time.Duration(b.Jitter*rand.Float64()*float64(d)), nil
}

// Exhausted reports whether n attempts are the limit or more.
func (b Backoff) Exhausted(n int) bool {
	limit := b.Attempts
	if limit == 0 {
		limit = 8
	}
	return limit > 0 && n >= limit
}
