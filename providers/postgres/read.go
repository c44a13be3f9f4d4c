package postgres

import (
	"context"
	"fmt"
	"iter"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// A page ends when it reaches either of these.
const (
	pageRows  = 200
	pageBytes = 4 << 20 // of data and metadata
)

const readStreamSQL = `
select position, version, id, type, schema_version, data, metadata, recorded_at
from kinora.events where stream = $1::text and version > $2::bigint order by version limit $3::int`

// ReadStream implements eventstore.Store, in pages of up to 200 events. A page ends with the event
// that makes it 4 MiB of data and metadata or more.
func (db *DB) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return db.readStream(stream, afterVersion, func(after int64, limit int) ([]eventstore.Raw, int, error) {
		return db.readPage(ctx, db.pool, stream, after, limit)
	})
}

// ReadStream implements eventstore.TxStore. It includes the events that the transaction itself
// appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return t.db.readStream(stream, afterVersion, func(after int64, limit int) (page []eventstore.Raw, bytes int, err error) {
		err = t.in(ctx, func(q session) error {
			page, bytes, err = t.db.readPage(ctx, q, stream, after, limit)
			return err
		})
		return page, bytes, err
	})
}

// readStream reads pages by read, which gets the version after which a page begins and the greatest
// number of its events.
func (db *Provider) readStream(stream string, after int64, read func(after int64, limit int) ([]eventstore.Raw, int, error)) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		if err := provider.CheckStream(stream); err != nil {
			yield(eventstore.Raw{}, err)
			return
		}
		for rows, after := pageRows, after; ; {
			page, bytes, err := read(after, rows)
			if err != nil {
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

// readPage reads at most limit events, and stops at pageBytes. Then it receives and drops the
// remaining rows.
func (db *Provider) readPage(ctx context.Context, q querier, stream string, after int64, limit int) (page []eventstore.Raw, bytes int, err error) {
	rows, err := q.Query(ctx, db.q(readStreamSQL), stream, after, limit)
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close()
	for bytes < pageBytes && rows.Next() {
		raw := eventstore.Raw{Stream: stream}
		var id uuid.UUID
		var metadata []byte
		err := rows.Scan(&raw.Position, &raw.Version, &id, &raw.Type, &raw.Schema, &raw.Data, &metadata, &raw.RecordedAt)
		if err != nil {
			return nil, 0, err
		}
		raw.ID, raw.RecordedAt = id.String(), raw.RecordedAt.UTC()
		raw.Metadata = metadataOf(metadata)
		page, bytes = append(page, raw), bytes+len(raw.Data)+len(metadata)
	}
	rows.Close()
	return page, bytes, rows.Err()
}
