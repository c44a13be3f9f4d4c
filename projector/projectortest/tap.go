package projectortest

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// tap is the provider of one runner: it records what the runner commits, and makes faults. After a crash it
// refuses everything that would change the store.
type tap[Tx any] struct {
	provider.Provider[Tx]
	record *record
	probe  func(ctx context.Context) (string, error) // see pass.probe
	dead   atomic.Bool
	died   chan struct{} // closed by the crash
}

var (
	errDead       = &provider.Error{Class: provider.ClassTransient, Code: "test", Err: errors.New("projectortest: the process has ended")}
	errRolledBack = &provider.Error{Class: provider.ClassTransient, Code: "test", Err: errors.New("projectortest: the transaction is rolled back")}
	errLostReply  = &provider.Error{Class: provider.ClassAmbiguous, Code: "test", Err: errors.New("projectortest: the reply to the commit is lost")}
)

func (t *tap[Tx]) crash() {
	if !t.dead.Swap(true) {
		close(t.died)
	}
}

// Do implements provider.Units.
func (t *tap[Tx]) Do(ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error)) error {
	if t.dead.Load() {
		return errDead
	}
	f := t.record.take(&u)
	if f == noFault {
		_, err := t.do(ctx, u, run, nil)
		return err
	}
	var before string
	if f == rolledBack {
		var err error
		if before, err = t.probe(ctx); err != nil {
			t.record.fail(&problem{kind: "rows", text: "the rows cannot be read: " + err.Error()})
			return errRolledBack
		}
	}
	fired, err := t.do(ctx, u, run, func(fresh bool, handlers func() error) error {
		if !fresh {
			return handlers()
		}
		switch f {
		case crashBefore:
			t.crash()
			return errDead
		case crashBeforeCommit:
			if err := handlers(); err != nil {
				return err
			}
			t.crash()
			runtime.Goexit() // as if the process had ended: nothing is committed
		case rolledBack:
			if err := handlers(); err != nil {
				return err
			}
			return errRolledBack
		}
		return handlers()
	})
	switch {
	case errors.Is(err, errRolledBack):
		t.compare(ctx, &u, before)
	case err != nil || !fired:
	case f == lostReply:
		return errLostReply
	case f == crashAfterCommit:
		t.crash()
		return errDead
	}
	return err
}

// do runs a unit, and records its commit. around, if not nil, is called instead of the handlers.
func (t *tap[Tx]) do(
	ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error),
	around func(fresh bool, handlers func() error) error,
) (fired bool, err error) {
	var closing provider.Closing
	var found provider.Found
	var took time.Duration
	err = t.Provider.Do(ctx, u, func(ctx context.Context, tx Tx, is provider.Found) (c provider.Closing, err error) {
		handlers := func() error {
			began := time.Now()
			c, err = run(ctx, tx, is)
			took = time.Since(began)
			return err
		}
		if fired = isFresh(is); around == nil {
			err = handlers()
		} else {
			err = around(fired, handlers)
		}
		closing, found = c, is
		return c, err
	})
	switch {
	case err != nil:
		t.record.failed(&u, err, took)
	case u.DryRun == nil && u.Switch == nil:
		t.record.committed(&u, found, closing)
	}
	return fired, err
}

func isFresh(f provider.Found) bool {
	for _, handlers := range f.Fresh {
		for _, fresh := range handlers {
			if fresh {
				return true
			}
		}
	}
	return false
}

// compare reports what a unit has left although it was rolled back.
func (t *tap[Tx]) compare(ctx context.Context, u *provider.Unit, before string) {
	after, err := t.probe(context.WithoutCancel(ctx))
	switch {
	case err != nil:
		t.record.fail(&problem{kind: "rows", text: "the rows cannot be read: " + err.Error()})
	case after != before:
		t.record.fail(&problem{kind: "outside", event: t.record.eventOf(u), text: "after the transaction was rolled back, this is left of it:\n" + diff(lines(before), lines(after))})
	}
}

// AcquireLease implements provider.Leases.
func (t *tap[Tx]) AcquireLease(ctx context.Context, name string, terms claim.Terms) (bool, error) {
	if t.dead.Load() {
		return false, errDead
	}
	return t.Provider.AcquireLease(ctx, name, terms)
}

// SetCheckpoint implements provider.Progress.
func (t *tap[Tx]) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	if t.dead.Load() {
		return false, errDead
	}
	return t.Provider.SetCheckpoint(ctx, b, from, to)
}

// InFlight implements provider.Liveness. It records nothing: a message that may have crashed a process is tried
// after a lease, and the events of a test are older than its runners.
func (t *tap[Tx]) InFlight(context.Context, provider.Build, provider.Worker, []string) error {
	return nil
}

// Try implements provider.Parking.
func (t *tap[Tx]) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	if t.dead.Load() {
		return false, errDead
	}
	return t.Provider.Try(ctx, p, limit, again)
}

// ReadyFor implements provider.ReadyChecker.
func (t *tap[Tx]) ReadyFor(ctx context.Context, s provider.Service) error {
	if c, ok := t.Provider.(provider.ReadyChecker); ok {
		return c.ReadyFor(ctx, s)
	}
	return nil
}

// restoringTap keeps the capability of a provider whose read model may go back.
type restoringTap[Tx any] struct {
	*tap[Tx]
	provider.Restorer
}

// storeOf returns t with the capabilities of its provider.
func storeOf[Tx any](t *tap[Tx]) provider.Provider[Tx] {
	if r, ok := t.Provider.(provider.Restorer); ok {
		return restoringTap[Tx]{t, r}
	}
	return t
}
