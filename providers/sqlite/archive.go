package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

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
