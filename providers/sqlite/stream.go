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
select position, '', version, id, type, schema_version, data, metadata, recorded_at
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
			page, more, err := eventsOf(ctx, q, pageSize, pageBytes, readStream, stream, after, pageSize)
			for _, e := range page {
				e.Stream = stream
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

// eventsOf returns the events of a query that selects the columns of readLog. If they are limit, or reach a number of bytes of
// data and metadata, the page is full, and there may be more.
func eventsOf(ctx context.Context, q querier, limit, most int, query string, args ...any) (page []eventstore.Raw, full bool, err error) {
	bytes := 0
	err = eachRow(ctx, q, func(rows *sql.Rows) error {
		e, size, err := scanRaw(rows)
		if err != nil {
			return err
		}
		page, bytes = append(page, e), bytes+size
		if len(page) == limit || bytes >= most {
			return errFull
		}
		return nil
	}, query, args...)
	if errors.Is(err, errFull) {
		return page, true, nil
	}
	return page, false, err
}

func scanRaw(rows *sql.Rows) (e eventstore.Raw, size int, err error) {
	var metadata string
	err = rows.Scan(&e.Position, &e.Stream, &e.Version, &e.ID, &e.Type, &e.Schema, &e.Data, &metadata, scanTime(&e.RecordedAt))
	if err == nil && metadata != noMetadata {
		// What other software wrote in another form is left out: an error would make the events behind
		// it unreadable.
		_ = json.Unmarshal([]byte(metadata), &e.Metadata)
	}
	return e, len(e.Data) + len(metadata), err
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
	return wrap("save the snapshot of "+stream, d.writeTx(ctx, func(u *unit) error { return u.saveSnapshot(ctx, stream, s) }))
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
	return wrap("save the snapshot of "+stream, t.atomically(ctx, func() error { return t.saveSnapshot(ctx, stream, s) }))
}

func snapshotOf(ctx context.Context, q querier, stream, schema string) (eventstore.Snapshot, error) {
	s := eventstore.Snapshot{Schema: schema}
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return eventstore.Snapshot{}, err
	}
	found, err := find(ctx, q, []any{&s.Version, &s.EventID, &s.State}, loadSnapshot, stream, schema)
	if err == nil && !found {
		return eventstore.Snapshot{}, nil
	}
	return result(s, "load the snapshot of "+stream, err)
}

func (s session) saveSnapshot(ctx context.Context, stream string, n eventstore.Snapshot) error {
	_, err := s.exec(ctx, saveSnapshot, stream, n.Schema, n.Version, n.EventID, n.State)
	if err == nil {
		_, err = s.exec(ctx, deleteOldSnapshots, stream, n.Schema)
	}
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
	at, found := eventstore.Appended{Count: 1}, false
	log, err := d.logID(ctx, q)
	if at.Log = log.Lineage; err == nil {
		found, err = find(ctx, q, []any{&at.Stream, &at.Version, &at.Position}, findEvent, strings.ToLower(id))
	}
	if err == nil && !found {
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
// version and the last event stay, and entries of the outbox and parked messages, which have copies.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it
//     takes. Nothing is deleted.
func (d *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	if err := provider.CheckStream(stream); err != nil {
		return 0, err
	}
	return update(ctx, d.Provider, "archive "+stream, nil, func(u *unit) (int64, error) { return u.archive(ctx, stream, o) })
}

func (u *unit) archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (int64, error) {
	log, err := u.db.logID(ctx, u)
	if err != nil {
		return 0, err
	}
	var version int64
	var ended bool
	if _, err = find(ctx, u, []any{&version, &ended}, readVersion, stream); err == nil && !ended {
		err = eventstore.ErrNotEnded
	}
	if err != nil {
		return 0, err
	}
	behind, err := column[string](ctx, u, behindStream, stream, log.Lineage, version)
	if err == nil {
		err = provider.Passed(behind, o)
	}
	if err == nil {
		_, err = u.exec(ctx, archiveSnapshots, stream)
	}
	if err != nil {
		return 0, err
	}
	n, err := u.changed(ctx, archiveEvents, stream, version)
	return int64(n), err
}
