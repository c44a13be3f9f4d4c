package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

const (
	loadSnapshotSQL = `
select version, event_id, state from kinora.snapshots where stream = $1::text and schema = $2::text`

	saveSnapshotSQL = `
with saved as (
	insert into kinora.snapshots (stream, schema, version, event_id, state, saved_at)
	select $1::text, $2::text, $3::bigint, $4::text, $5::bytea, clock_timestamp()
	where not exists (select from kinora.streams where stream = $1::text and ended)
	on conflict (stream, schema) do update set
		version = excluded.version, event_id = excluded.event_id, state = excluded.state, saved_at = excluded.saved_at)
delete from kinora.snapshots
where stream = $1::text and schema <> $2::text and saved_at < clock_timestamp() - interval '1 day'`
)

// LoadSnapshot implements eventstore.SnapshotStore.
func (db *DB) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	return db.loadSnapshot(ctx, db.pool, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (db *DB) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	return db.saveSnapshot(ctx, db.pool, stream, s)
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (t *Tx) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	var s eventstore.Snapshot
	err := t.in(ctx, func(q session) (err error) {
		s, err = t.db.loadSnapshot(ctx, q, stream, schema)
		return err
	})
	return s, err
}

// SaveSnapshot implements eventstore.SnapshotStore. Like any statement that fails, it leaves the
// transaction aborted if it fails.
func (t *Tx) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	return t.in(ctx, func(q session) error { return t.db.saveSnapshot(ctx, q, stream, s) })
}

func (db *Provider) loadSnapshot(ctx context.Context, q querier, stream, schema string) (eventstore.Snapshot, error) {
	s := eventstore.Snapshot{Schema: schema}
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return eventstore.Snapshot{}, err
	}
	err := q.QueryRow(ctx, db.q(loadSnapshotSQL), stream, schema).Scan(&s.Version, &s.EventID, &s.State)
	if errors.Is(err, pgx.ErrNoRows) {
		return eventstore.Snapshot{}, nil
	}
	if err != nil {
		return eventstore.Snapshot{}, fmt.Errorf("load the snapshot of %s: %w", stream, explain(err))
	}
	return s, nil
}

func (db *Provider) saveSnapshot(ctx context.Context, q querier, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	if _, err := q.Exec(ctx, db.q(saveSnapshotSQL), stream, s.Schema, s.Version, s.EventID, s.State); err != nil {
		return fmt.Errorf("save the snapshot of %s: %w", stream, explain(err))
	}
	return nil
}
