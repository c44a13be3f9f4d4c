package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

const (
	loadSnapshot = `
select version, event_id, state from kinora_snapshots where stream = ?1 and schema = ?2`

	saveSnapshot = `
insert into kinora_snapshots (stream, schema, version, event_id, state, saved_at)
select ?1, ?2, ?3, ?4, ?5, ` + clock + ` where not exists (select 1 from kinora_streams where stream = ?1 and ended)
on conflict (stream, schema) do update set
	version = excluded.version, event_id = excluded.event_id, state = excluded.state, saved_at = excluded.saved_at`

	deleteOldSnapshots = `
delete from kinora_snapshots where stream = ?1 and schema <> ?2 and saved_at < ` + clock + ` - 86400000`
)

// LoadSnapshot implements eventstore.SnapshotStore.
func (d *DB) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	return snapshotOf(ctx, d.reads, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (d *DB) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	err := d.writeTx(ctx, func(u *unit) error { return u.saveSnapshot(ctx, stream, s) })
	if err != nil {
		return fmt.Errorf("save the snapshot of %s: %w", stream, err)
	}
	return nil
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (t *Tx) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	return snapshotOf(ctx, t.session, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore. If it fails, it has changed nothing, and the
// transaction can go on.
func (t *Tx) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	if err := t.atomically(ctx, func() error { return t.saveSnapshot(ctx, stream, s) }); err != nil {
		return fmt.Errorf("save the snapshot of %s: %w", stream, err)
	}
	return nil
}

func snapshotOf(ctx context.Context, q querier, stream, schema string) (eventstore.Snapshot, error) {
	s := eventstore.Snapshot{Schema: schema}
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return eventstore.Snapshot{}, err
	}
	err := one(ctx, q, []any{&s.Version, &s.EventID, &s.State}, loadSnapshot, stream, schema)
	if errors.Is(err, sql.ErrNoRows) {
		return eventstore.Snapshot{}, nil
	}
	return result(s, fmt.Sprintf("load the snapshot of %s", stream), err)
}

func (s session) saveSnapshot(ctx context.Context, stream string, n eventstore.Snapshot) error {
	if _, err := s.exec(ctx, saveSnapshot, stream, n.Schema, n.Version, n.EventID, n.State); err != nil {
		return err
	}
	_, err := s.exec(ctx, deleteOldSnapshots, stream, n.Schema)
	return err
}
