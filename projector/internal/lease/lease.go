// Package lease keeps a lease while a function runs.
package lease

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

// ErrLost is the cause of a context that ended because the lease could not be extended in time, or
// another program has it.
var ErrLost = errors.New("the lease was lost")

// Keeper acquires leases for one runner.
type Keeper struct {
	Leases  provider.Leases
	Holder  string        // the id of the runner
	Length  time.Duration // of a lease
	Timeout time.Duration // of a statement
	Clock   func() time.Time
}

// While calls fn while it holds a lease, and extends it three times per lease. The context of fn ends,
// with ErrLost as its cause, when the lease is lost. had is false if another program has the lease, or if
// the store does not say: then fn is not called.
func (k *Keeper) While(ctx context.Context, name string, token claim.Token, fn func(context.Context) error) (had bool, err error) {
	if had, err = k.Acquire(ctx, name, token); err != nil || !had {
		return false, err
	}
	return true, k.Hold(ctx, name, token, fn)
}

// Hold is While for a lease that was acquired. It releases it after fn.
func (k *Keeper) Hold(ctx context.Context, name string, token claim.Token, fn func(context.Context) error) error {
	held, lost := context.WithCancelCause(ctx)
	var extending sync.WaitGroup
	extending.Go(func() {
		Extend(held, k.Clock, k.Length/3, k.Length, func(ctx context.Context) (bool, error) {
			return k.Leases.AcquireLease(ctx, name, k.terms(token))
		}, func() { lost(ErrLost) })
	})
	defer func() {
		lost(nil)
		extending.Wait()
		k.Release(ctx, name, token)
	}()
	return fn(held)
}

// Acquire acquires a lease, or extends it. If ctx ends meanwhile, it waits for the reply, and releases the
// lease: a statement that was canceled may still acquire it, and then no program had it until it expires.
func (k *Keeper) Acquire(ctx context.Context, name string, token claim.Token) (bool, error) {
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(k.Length/3, k.Timeout))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
	has, err := k.Leases.AcquireLease(patient, name, k.terms(token))
	if err = cmp.Or(ctx.Err(), err); err != nil {
		k.Release(ctx, name, token)
		return false, err
	}
	return has, nil
}

// Release releases a lease, also after the end of ctx. If that fails, the lease expires.
func (k *Keeper) Release(ctx context.Context, name string, token claim.Token) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = k.Leases.ReleaseLease(limited, name, token)
}

// Extend calls extend each time that the pause every is over, until ctx ends, for at most a third of the length of a lease. It calls
// lost when extend returns false, or has not succeeded in time.
func Extend(
	ctx context.Context, clock func() time.Time, every, length time.Duration, extend func(context.Context) (bool, error), lost func(),
) {
	for last := clock(); ; {
		if pauses.Wait(ctx, every); ctx.Err() != nil {
			return
		}
		limited, cancel := context.WithTimeout(ctx, length/3)
		has, err := extend(limited)
		cancel()
		if err == nil {
			last = clock()
		}
		if err == nil && !has || clock().Sub(last) > length*2/3 {
			lost()
			return
		}
	}
}

func (k *Keeper) terms(token claim.Token) claim.Terms {
	return claim.Terms{Holder: k.Holder, Token: token, Lease: k.Length}
}
