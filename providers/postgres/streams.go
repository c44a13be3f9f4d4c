package postgres

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// A page ends when it reaches either of these.
const (
	pageRows  = 200
	pageBytes = 4 << 20 // of data and metadata
)

const readStreamSQL = `
select position, ''::text, version, id, type, schema_version, data, metadata, recorded_at
from kinora.events where stream = $1::text and version > $2::bigint order by version limit $3::int`

// ReadStream implements eventstore.Store, in pages of up to 200 events. A page ends with the event
// that makes it 4 MiB of data and metadata or more.
func (db *DB) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return db.onPool.ReadStream(ctx, stream, afterVersion)
}

// ReadStream implements eventstore.TxStore. It includes what the transaction itself appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		if err := provider.CheckStream(stream); err != nil {
			yield(eventstore.Raw{}, err)
			return
		}
		for rows, after := pageRows, afterVersion; ; {
			var page []eventstore.Raw
			var bytes int
			if err := t.in(ctx, func(q session) (err error) {
				page, bytes, err = t.db.readPage(ctx, q, stream, after, rows)
				return err
			}); err != nil {
				yield(eventstore.Raw{}, fmt.Errorf("read %s: %w", stream, explain(err)))
				return
			}
			for _, raw := range page {
				if !yield(raw, nil) {
					return
				}
				after = raw.Version
			}
			switch {
			case bytes >= pageBytes:
				rows = len(page) // the remaining rows of a larger page would be dropped
			case len(page) < rows:
				return
			case bytes < pageBytes/2:
				rows = min(2*rows, pageRows)
			}
		}
	}
}

// readPage reads at most limit events up to pageBytes, and drops the remaining rows.
func (db *Provider) readPage(ctx context.Context, q querier, stream string, after int64, limit int) (page []eventstore.Raw, bytes int, err error) {
	rows, err := q.Query(ctx, db.q(readStreamSQL), stream, after, limit)
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close()
	for bytes < pageBytes && rows.Next() {
		raw, size, err := scanRaw(rows)
		if err != nil {
			return nil, 0, err
		}
		raw.Stream = stream
		page, bytes = append(page, raw), bytes+size
	}
	rows.Close()
	return page, bytes, rows.Err()
}

const findEventSQL = `select stream, version, position from kinora.events where id = $1::uuid`

// FindEvent implements provider.EventFinder. An id that is no UUID is that of no event.
func (db *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return db.onPool.FindEvent(ctx, id)
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (at eventstore.Appended, err error) {
	of, err := uuid.Parse(id)
	if err != nil {
		return at, nil
	}
	err = t.in(ctx, func(q session) error {
		log, err := t.db.logName(ctx, q)
		if err != nil {
			return err
		}
		at.Count = 1
		at.Log, _, _ = strings.Cut(log, "/")
		return q.QueryRow(ctx, t.db.q(findEventSQL), of.String()).Scan(&at.Stream, &at.Version, &at.Position)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return eventstore.Appended{}, nil
	}
	return at, wrap("find an event", explain(err))
}

const (
	loadSnapshotSQL = `
select schema, version, event_id, state from kinora.snapshots where stream = $1::text and schema = $2::text`

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
	return db.onPool.LoadSnapshot(ctx, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (db *DB) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	return db.onPool.SaveSnapshot(ctx, stream, s)
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (t *Tx) LoadSnapshot(ctx context.Context, stream, schema string) (s eventstore.Snapshot, err error) {
	if err := provider.CheckSnapshot(stream, eventstore.Snapshot{Schema: schema}); err != nil {
		return s, err
	}
	err = t.in(ctx, func(q session) error {
		return q.QueryRow(ctx, t.db.q(loadSnapshotSQL), stream, schema).Scan(&s.Schema, &s.Version, &s.EventID, &s.State)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return s, nil
	}
	return s, wrap("load the snapshot of "+stream, explain(err))
}

// SaveSnapshot implements eventstore.SnapshotStore. An error of it leaves the transaction aborted.
func (t *Tx) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	return wrap("save the snapshot of "+stream, explain(t.in(ctx, func(q session) error {
		_, err := q.Exec(ctx, t.db.q(saveSnapshotSQL), stream, s.Schema, s.Version, s.EventID, s.State)
		return err
	})))
}

const (
	endOfStreamSQL = `select version, ended from kinora.streams where stream = $1::text`

	archiveSnapshotsSQL = `delete from kinora.snapshots where stream = $1::text`

	// It returns the number of deleted events, their types, and the last position of each type.
	archiveEventsSQL = `
with gone as (
	delete from kinora.events where stream = $1::text and version < $2::bigint returning type, position),
last as (select type, max(position) as position, count(*) as n from gone group by type)
select coalesce(sum(n), 0)::bigint, coalesce(array_agg(type), '{}'), coalesce(array_agg(position), '{}') from last`

	// Run it after the delete: a reader that began meanwhile counts. Retired generations have an ended checkpoint.
	behindSQL = `
select c.projector from kinora.checkpoints c
where c.mode <> 'ended' and c.lineage in (select id::text from kinora.incarnation union all select '') and exists (
	select from unnest($1::text[], $2::bigint[]) gone(type, position), jsonb_array_elements(c.handlers) h
	where gone.position > c.position and h ->> 'type' = gone.type)`
)

// Archive deletes the events of an ended stream before its last one, and its snapshots, in one transaction. It returns the
// number of deleted events. To keep them elsewhere, read them with ReadStream before. The version of the stream and its last
// event stay, and entries of the outbox and parked messages, which have copies of events. It needs the rights of the role
// kinora_archiver.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it takes. Nothing
//     is deleted.
func (db *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	if err := provider.CheckStream(stream); err != nil {
		return 0, err
	}
	if err = pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		deleted, err = db.archive(ctx, tx, stream, o)
		return err
	}); err != nil {
		return 0, wrap("archive "+stream, explain(err))
	}
	return deleted, nil
}

func (db *Provider) archive(ctx context.Context, tx pgx.Tx, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	var version int64
	var ended bool
	err = tx.QueryRow(ctx, db.q(endOfStreamSQL), stream).Scan(&version, &ended)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && !ended {
		return 0, eventstore.ErrNotEnded
	}
	if err != nil {
		return 0, err
	}
	var types, behind []string
	var positions []int64
	crash.Point("archive: before")
	_, err = tx.Exec(ctx, db.q(archiveSnapshotsSQL), stream)
	if err == nil {
		err = tx.QueryRow(ctx, db.q(archiveEventsSQL), stream, version).Scan(&deleted, &types, &positions)
	}
	if err == nil {
		behind, err = collect(ctx, tx, pgx.RowTo[string], db.q(behindSQL), types, positions)
	}
	crash.Point("archive: after")
	if err != nil {
		return 0, err
	}
	return deleted, provider.Passed(behind, o)
}
