package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// pageSize is how many events are read at a time.
const pageSize = 200

const readStream = `
select position, version, id, type, schema_version, data, metadata, recorded_at
from kinora_events where stream = ?1 and version > ?2 order by version limit ?3`

// ReadStream implements eventstore.Store. Each page shows the commits up to its read.
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
			page, err := readPage(ctx, q, stream, after)
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
			if len(page) < pageSize {
				return
			}
		}
	}
}

func readPage(ctx context.Context, q querier, stream string, after int64) ([]eventstore.Raw, error) {
	var page []eventstore.Raw
	err := each(ctx, q, func(rows *sql.Rows) error {
		e := eventstore.Raw{Stream: stream}
		var metadata string
		var at int64
		if err := rows.Scan(&e.Position, &e.Version, &e.ID, &e.Type, &e.Schema, &e.Data, &metadata, &at); err != nil {
			return err
		}
		e.RecordedAt = timeOf(at)
		page = append(page, e)
		if metadata == noMetadata {
			return nil
		}
		return json.Unmarshal([]byte(metadata), &page[len(page)-1].Metadata)
	}, readStream, stream, after, pageSize)
	return page, err
}
