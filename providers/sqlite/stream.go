package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"

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
