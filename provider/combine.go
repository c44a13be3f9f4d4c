package provider

import (
	"context"
	"errors"
	"slices"
)

// Combine returns a Provider with the units of a store that has nothing else, such as Redis, and
// the parked messages, leases and generations of another store, such as PostgreSQL.
//
// A unit of the second store is open while the handlers run, so holds and parked messages are as exact as in one
// store. It commits after the first store.
//
// If units keep markers (MarkerUnits), the markers and the checkpoint are next to the read model:
//   - If the second commit does not happen, the messages come again, and their markers show that they are applied.
//   - Output is committed first, in the second store, with a marker for each message of it.
//   - If the read model goes back to an earlier state, so does its checkpoint, and the reader of the log applies the
//     rest again. For that, the second store has a copy of the checkpoint's handlers. If it is a Log, runners read it.
//
// Otherwise there are no markers and no output, and if the second commit does not happen, the messages take effect again.
//
// There are no dry runs, and no snapshots except for comparisons.
func Combine[Tx, Outer any](units Units[Tx], store Provider[Outer]) Provider[Tx] {
	if m, ok := units.(MarkerUnits[Tx]); ok && m.Keeps().Markers {
		return newMarkedPair(m, store)
	}
	return &combined[Tx, Outer]{Parking: store, Liveness: store, Records: store, Progress: store, Builds: store, Leases: store, units: units, store: store}
}

type combined[Tx, Outer any] struct {
	Parking
	Liveness
	Records
	Progress
	Builds
	Leases
	units Units[Tx]
	store Provider[Outer]
}

var errNotCombined = &Error{
	Class: ClassPermanent, Code: "not_kept", Err: errors.New("units of two stores have no output, no dry runs and no snapshots"),
}

func (b *combined[Tx, Outer]) Do(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) error {
	if u.DryRun != nil || u.Switch != nil && u.Switch.Snapshot {
		return errNotCombined
	}
	inner := Unit{Projector: u.Projector, Generation: u.Generation, Messages: u.Messages, Once: true}
	u.Messages, u.Once = slices.Clone(u.Messages), true
	for i := range u.Messages {
		u.Messages[i].Mark = false // a marker in one store does not prove the commit of the other
	}
	return b.store.Do(ctx, u, func(ctx context.Context, _ Outer, found Found) (c Closing, err error) {
		err = b.units.Do(ctx, inner, func(ctx context.Context, tx Tx, own Found) (Closing, error) {
			found.Begin = own.Begin // statements of the handlers are in this store
			if c, err = run(ctx, tx, found); err == nil && len(c.Output) > 0 {
				err = errNotCombined
			}
			return Closing{}, err
		})
		return c, err
	})
}

func (b *combined[Tx, Outer]) Keeps() Keeps { return Keeps{} }

func (b *combined[Tx, Outer]) recorder() any { return b.store }

// LogOf returns the log of a store: the store itself, or the second store of Combine if the first one keeps markers;
// else nil.
func LogOf(store any) Log {
	if pair, ok := store.(interface{ second() any }); ok {
		store = pair.second()
	}
	log, _ := store.(Log)
	return log
}

// ReadyFor implements ReadyChecker.
func (b *combined[Tx, Outer]) ReadyFor(ctx context.Context, service Service) error {
	return readyFor(ctx, service, b.store, b.units)
}

// readyFor calls ReadyChecker of the stores that have it.
func readyFor(ctx context.Context, service Service, stores ...any) (err error) {
	for _, store := range stores {
		if c, ok := store.(ReadyChecker); ok {
			err = errors.Join(err, c.ReadyFor(ctx, service))
		}
	}
	return err
}
