package patience

import (
	"context"
	"sync"
	"testing"
)

// Deadline returns a context that ends as with a deadline, when pass is called. A test passes it when the call that it is
// about has come far enough: on a busy machine, a deadline in real time may pass before.
func Deadline(t testing.TB) (ctx context.Context, pass func()) {
	d := deadline{t.Context(), make(chan struct{})}
	return d, sync.OnceFunc(func() { close(d.passed) })
}

type deadline struct {
	context.Context
	passed chan struct{}
}

func (d deadline) Done() <-chan struct{} { return d.passed }

func (d deadline) Err() error {
	select {
	case <-d.passed:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
