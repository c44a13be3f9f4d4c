// Package pauses has pauses that double, and waits that end early.
package pauses

import (
	"context"
	"time"
)

// Doubled returns first, doubled n times, and at most longest.
func Doubled(first time.Duration, n int, longest time.Duration) time.Duration {
	if n < 62 && first <= longest>>n {
		return first << n
	}
	return longest
}

// Doubling are pauses from First to Longest. Each is twice as long as the one before.
type Doubling struct {
	First, Longest time.Duration
	n              int
}

// Next returns the next pause.
func (d *Doubling) Next() time.Duration {
	d.n++
	return Doubled(d.First, d.n-1, d.Longest)
}

// Reset makes First the next pause.
func (d *Doubling) Reset() { d.n = 0 }

// Wait waits for d, for wake, which may be nil, or for the end of ctx. It reports whether wake ended it.
func Wait(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-wake:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}
