package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// snapshot is a stored snapshot.
type snapshot struct {
	eventstore.Snapshot
	savedAt time.Time
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (db *DB) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	return db.committed.Load().snapshot(ctx, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (db *DB) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	return db.tx(ctx, func(tx *Model) error { return db.InTx(tx).SaveSnapshot(ctx, stream, s) })
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (t *Tx) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	if err := t.usable(ctx); err != nil {
		return eventstore.Snapshot{}, fmt.Errorf("load the snapshot of %s: %w", stream, err)
	}
	return t.tx.staged.snapshot(ctx, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (t *Tx) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	if err := t.usable(ctx); err != nil {
		return fmt.Errorf("save the snapshot of %s: %w", stream, err)
	}
	now, to := t.db.now(), &t.tx.staged
	if to.ended(stream) {
		return nil
	}
	s.State = slices.Clone(s.State)
	all, _ := to.snapshots.get(stream)
	for schema, old := range all.from("") {
		if old.savedAt.Before(now.Add(-24 * time.Hour)) {
			all = all.drop(schema)
		}
	}
	to.snapshots = to.snapshots.put(stream, all.put(s.Schema, snapshot{s, now}))
	return nil
}

func (s *state) snapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	if err := provider.CheckSnapshot(stream, eventstore.Snapshot{Schema: schema}); err != nil {
		return eventstore.Snapshot{}, err
	}
	all, _ := s.snapshots.get(stream)
	found, _ := all.get(schema)
	found.State = slices.Clone(found.State)
	return found.Snapshot, ctx.Err()
}
