package eventstore

import (
	"context"
	"fmt"
	"reflect"
)

// target returns what json.Unmarshal sets.
func target[A Aggregate](a *A) any {
	if reflect.TypeFor[A]().Kind() == reflect.Pointer {
		return *a
	}
	return a
}

// loadSnapshot loads the aggregate from its snapshot and the events after it. used is false if there is
// no snapshot, or it does not belong to the stream: then all events must be read.
func (r *Repository[A]) loadSnapshot(ctx context.Context, store Store, id string, l *loaded[A]) (used bool, err error) {
	from, ok := store.(SnapshotStore)
	if !ok {
		return false, nil
	}
	stream := l.at.Stream
	stored, err := from.LoadSnapshot(ctx, stream, r.snaps.schema)
	if err != nil {
		return false, fmt.Errorf("load %s: snapshot: %w", stream, err)
	}
	if stored.Version == 0 {
		return false, nil
	}
	discard := func(why error) (bool, error) {
		*l = loaded[A]{at: Appended{Stream: stream}}
		r.snaps.onError(stream, why)
		return false, nil
	}
	state, err := r.snaps.open(stream, stored)
	if err != nil {
		return discard(err)
	}
	l.aggregate = r.fresh(id)
	if err := restore(target(&l.aggregate), state); err != nil {
		return discard(err)
	}
	for raw, err := range store.ReadStream(ctx, stream, stored.Version-1) {
		switch {
		case err != nil:
			*l = loaded[A]{at: Appended{Stream: stream}}
			return false, fmt.Errorf("load %s: %w", stream, err)
		case !used && (raw.Version != stored.Version || raw.ID != stored.EventID):
			return discard(fmt.Errorf("%w: version %d of the stream is another event", ErrSnapshot, stored.Version))
		case !used:
			used = true
			l.at.Version, l.at.Position, l.eventID = raw.Version, raw.Position, raw.ID
		default:
			if err := r.apply(l, raw); err != nil {
				*l = loaded[A]{at: Appended{Stream: stream}}
				return false, fmt.Errorf("load %s: %w", stream, err)
			}
		}
	}
	if !used {
		return discard(fmt.Errorf("%w: the stream has no version %d", ErrSnapshot, stored.Version))
	}
	return true, nil
}

// snapshot returns a snapshot of a loaded aggregate if one is due, else the zero Snapshot.
func (r *Repository[A]) snapshot(id string, l *loaded[A]) Snapshot {
	if r.snaps == nil || l.applied < r.snaps.every {
		return Snapshot{}
	}
	again := r.fresh(id)
	s, err := r.snaps.encode(l.aggregate, target(&again), l.at.Stream, l.eventID, l.at.Version)
	if err != nil {
		r.snaps.onError(l.at.Stream, err)
		return Snapshot{}
	}
	return s
}

// saveSnapshot stores s, unless it is zero. at is the result of the update.
func (r *Repository[A]) saveSnapshot(ctx context.Context, store Store, at Appended, s Snapshot) error {
	to, ok := store.(SnapshotStore)
	if !ok || s.Version == 0 {
		return nil
	}
	if at.Count == 0 {
		return nil // without the lock of an append, it could wait for another transaction
	}
	_, inTx := store.(TxStore)
	err := to.SaveSnapshot(ctx, at.Stream, s)
	switch {
	case err == nil:
		return nil
	case inTx:
		return fmt.Errorf("update %s: save the snapshot: %w", at.Stream, err)
	}
	r.snaps.onError(at.Stream, fmt.Errorf("save the snapshot: %w", err))
	return nil
}
