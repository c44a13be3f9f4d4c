package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

const (
	endOfStreamSQL = `select version, ended from kinora.streams where stream = $1::text`

	archiveSnapshotsSQL = `delete from kinora.snapshots where stream = $1::text`

	// It returns the number of deleted events, their types, and the last position of each type.
	archiveEventsSQL = `
with gone as (
	delete from kinora.events where stream = $1::text and version < $2::bigint returning type, position),
last as (select type, max(position) as position, count(*) as n from gone group by type)
select coalesce(sum(n), 0)::bigint, coalesce(array_agg(type), '{}'), coalesce(array_agg(position), '{}') from last`

	// Run it after the delete: a reader that began meanwhile counts. An ended checkpoint is that of a
	// retired generation.
	behindSQL = `
select c.projector from kinora.checkpoints c
where c.mode <> 'ended' and c.lineage in (select id::text from kinora.incarnation union all select '') and exists (
	select from unnest($1::text[], $2::bigint[]) gone(type, position), jsonb_array_elements(c.handlers) h
	where gone.position > c.position and h ->> 'type' = gone.type)`
)

// Archive deletes the events of an ended stream before its last one, and its snapshots, in one transaction.
// It returns the number of deleted events. To keep them elsewhere, read them with ReadStream before. The
// version of the stream and its last event stay. So do the entries of the outbox and parked messages,
// which have copies of events.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it
//     takes. Nothing is deleted.
//
// It needs the rights of the role kinora_archiver. An appender cannot delete events.
func (db *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	if err := provider.CheckStream(stream); err != nil {
		return 0, err
	}
	err = pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		deleted, err = db.archive(ctx, tx, stream, o)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("archive %s: %w", stream, explain(err))
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
