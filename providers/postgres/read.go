package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

const pageRows = 200

const readStreamSQL = `
select position, version, id, type, schema_version, data, metadata, recorded_at
from kinora.events where stream = $1::text and version > $2::bigint order by version limit $3::int`

// ReadStream implements eventstore.Store, in pages of 200 events.
func (db *DB) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return db.readStream(ctx, db.pool, stream, afterVersion)
}

// ReadStream implements eventstore.TxStore. It includes the events that the transaction itself
// appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return t.db.readStream(ctx, t.tx, stream, afterVersion)
}

func (db *Provider) readStream(ctx context.Context, q querier, stream string, after int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		if err := provider.CheckStream(stream); err != nil {
			yield(eventstore.Raw{}, err)
			return
		}
		for {
			page, err := db.readPage(ctx, q, stream, after)
			if err != nil {
				yield(eventstore.Raw{}, fmt.Errorf("read %s: %w", stream, clear(err)))
				return
			}
			for _, raw := range page {
				if !yield(raw, nil) {
					return
				}
				after = raw.Version
			}
			if len(page) < pageRows {
				return
			}
		}
	}
}

func (db *Provider) readPage(ctx context.Context, q querier, stream string, after int64) ([]eventstore.Raw, error) {
	rows, err := q.Query(ctx, db.q(readStreamSQL), stream, after, pageRows)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (eventstore.Raw, error) {
		raw := eventstore.Raw{Stream: stream}
		var id uuid.UUID
		var metadata []byte
		err := row.Scan(&raw.Position, &raw.Version, &id, &raw.Type, &raw.Schema, &raw.Data, &metadata, &raw.RecordedAt)
		if err != nil {
			return raw, err
		}
		raw.ID, raw.RecordedAt = id.String(), raw.RecordedAt.UTC()
		return raw, json.Unmarshal(metadata, &raw.Metadata)
	})
}
