package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A page ends when it reaches either of these.
const (
	pageSize  = 200
	pageBytes = 4 << 20 // of data and metadata
)

const readStream = `
select position, version, id, type, schema_version, data, metadata, recorded_at
from kinora_events where stream = ?1 and version > ?2 order by version limit ?3`

// ReadStream implements eventstore.Store. Each page shows the commits up to its read. A page has up
// to 200 events, and ends after the event with which it reaches 4 MiB of data and metadata.
func (d *DB) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return streamOf(ctx, d.reads, stream, afterVersion)
}

func streamOf(ctx context.Context, q querier, stream string, after int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		if err := provider.CheckStream(stream); err != nil {
			yield(eventstore.Raw{}, err)
			return
		}
		for after := after; ; {
			page, more, err := readPage(ctx, q, stream, after)
			for _, e := range page {
				if !yield(e, nil) {
					return
				}
				after = e.Version
			}
			if err != nil {
				yield(eventstore.Raw{}, fmt.Errorf("read %s: %w", stream, err))
				return
			}
			if !more {
				return
			}
		}
	}
}

var errFull = errors.New("the page is full")

// readPage reads a page. more is whether there may be another one.
func readPage(ctx context.Context, q querier, stream string, after int64) (page []eventstore.Raw, more bool, err error) {
	bytes := 0
	err = eachRow(ctx, q, func(rows *sql.Rows) error {
		e := eventstore.Raw{Stream: stream}
		var metadata string
		if err := rows.Scan(&e.Position, &e.Version, &e.ID, &e.Type, &e.Schema, &e.Data, &metadata, scanTime(&e.RecordedAt)); err != nil {
			return err
		}
		page = append(page, e)
		if metadata != noMetadata {
			_ = json.Unmarshal([]byte(metadata), &page[len(page)-1].Metadata) // as scanRaw
		}
		if bytes += len(e.Data) + len(metadata); bytes >= pageBytes {
			return errFull
		}
		return nil
	}, readStream, stream, after, pageSize)
	if errors.Is(err, errFull) {
		return page, true, nil
	}
	return page, len(page) == pageSize, err
}

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

const findEvent = `select stream, version, position from kinora_events where id = ?1`

// FindEvent implements provider.EventFinder.
func (d *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return d.findEvent(ctx, d.reads, id)
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return t.db.findEvent(ctx, t.session, id)
}

func (d *Provider) findEvent(ctx context.Context, q querier, id string) (eventstore.Appended, error) {
	log, err := d.logName(ctx, q)
	if err != nil {
		return eventstore.Appended{}, fmt.Errorf("find an event: %w", err)
	}
	at := eventstore.Appended{Count: 1}
	at.Log, _, _ = strings.Cut(log, "/")
	err = one(ctx, q, []any{&at.Stream, &at.Version, &at.Position}, findEvent, strings.ToLower(id))
	if errors.Is(err, sql.ErrNoRows) {
		return eventstore.Appended{}, nil
	}
	return result(at, "find an event", err)
}

const (
	// behindStream selects the projectors that take an event of stream ?1, before version ?3, that is
	// after their checkpoint. An ended checkpoint is that of a retired generation.
	behindStream = `
select c.projector from kinora_checkpoints c
where c.mode <> 'ended' and c.lineage in (?2, '') and exists (
	select 1 from kinora_events e join json_each(c.handlers) h on h.value ->> 'type' = e.type
	where e.stream = ?1 and e.version < ?3 and e.position > c.position)`

	archiveSnapshots = `delete from kinora_snapshots where stream = ?1`
	archiveEvents    = `delete from kinora_events where stream = ?1 and version < ?2`
)

// Archive deletes the events of an ended stream before its last one, and its snapshots, in one transaction.
// It returns the number of deleted events. To keep them elsewhere, read them with ReadStream before. The
// version of the stream and its last event stay. So do the entries of the outbox and parked messages,
// which have copies of events.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it
//     takes. Nothing is deleted.
func (d *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	if err := provider.CheckStream(stream); err != nil {
		return 0, err
	}
	err = d.writeTx(ctx, func(u *unit) error {
		deleted, err = u.archive(ctx, d.Provider, stream, o)
		return err
	})
	return result(deleted, fmt.Sprintf("archive %s", stream), err)
}

func (s session) archive(ctx context.Context, d *Provider, stream string, o eventstore.ArchiveOptions) (int64, error) {
	log, err := d.logName(ctx, s)
	if err != nil {
		return 0, err
	}
	var version int64
	var ended bool
	err = one(ctx, s, []any{&version, &ended}, readVersion, stream)
	if errors.Is(err, sql.ErrNoRows) || err == nil && !ended {
		return 0, eventstore.ErrNotEnded
	}
	if err != nil {
		return 0, err
	}
	lineage, _, _ := strings.Cut(log, "/")
	behind, err := column[string](ctx, s, behindStream, stream, lineage, version)
	if err == nil {
		err = provider.Passed(behind, o)
	}
	if err == nil {
		_, err = s.exec(ctx, archiveSnapshots, stream)
	}
	if err != nil {
		return 0, err
	}
	n, err := s.changed(ctx, archiveEvents, stream, version)
	return int64(n), err
}
