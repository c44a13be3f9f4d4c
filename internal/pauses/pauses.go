// Package pauses has pauses that double, waits that end early, and signals that end them.
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

// Wait waits for d, for one of at most two channels, which may be nil, or for the end of ctx. It reports whether one of the
// channels ended it.
func Wait(ctx context.Context, d time.Duration, wake ...<-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	var wakes [2]<-chan struct{}
	copy(wakes[:], wake)
	select {
	case <-wakes[0]:
		return true
	case <-wakes[1]:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// Returns reports whether done is closed before the grace after the end of ctx is over.
func Returns(ctx context.Context, done <-chan struct{}, grace time.Duration) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	return Wait(context.WithoutCancel(ctx), grace, done)
}

// Signal asks a loop to look at once.
type Signal chan struct{}

// NewSignal returns a Signal that no one has sent.
func NewSignal() Signal { return make(Signal, 1) }

// Send sends the signal, unless it waits to be received.
func (s Signal) Send() {
	select {
	case s <- struct{}{}:
	default:
	}
}
