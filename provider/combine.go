package provider

import (
	"context"
	"errors"
	"slices"

	"github.com/kinora-go/kinora/claim"
)

// Combine returns a Provider with the units of a store that has nothing else, such as Redis, and
// the parked messages and records of another store, such as PostgreSQL.
//
//   - A unit of the second store is open while the handlers run, so holds and parked messages are
//     as exact as in one store. It commits after the first store. If its commit fails, or the
//     process ends between the two commits, the messages of the unit take effect again. So Keeps
//     is zero, and units have one message.
//   - There are no markers, no output, no dry runs and no snapshots.
//   - Generations are those of the second store.
func Combine[Tx, Outer any](units Units[Tx], store Provider[Outer]) Provider[Tx] {
	return &combined[Tx, Outer]{Parking: store, Liveness: store, Records: store, Progress: store, Builds: store, Leases: store, units: units, store: store}
}

type combined[Tx, Outer any] struct {
	Parking
	Liveness
	Records
	Progress
	Builds
	claim.Leases
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

// ReadyFor calls ReadyChecker of both stores.
func (b *combined[Tx, Outer]) ReadyFor(ctx context.Context, service Service) error {
	for _, s := range []any{b.store, b.units} {
		if c, ok := s.(ReadyChecker); ok {
			if err := c.ReadyFor(ctx, service); err != nil {
				return err
			}
		}
	}
	return nil
}
