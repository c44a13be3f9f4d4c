package main

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
)

const logEvents = 1_000_000

// fillLog adds events to streams of 100, once.
const fillLog = `
insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
select 'log-' || g / 100, g % 100 + 1, gen_random_uuid(), 'review.posted', 1, jsonb_build_object('product_id', 'p' || g % 1000, 'rating', 5, 'text', repeat('x', $2::int)), '{}', clock_timestamp()
from generate_series(0, $1::int - 1) g where not exists (select from kinora.events where stream = 'log-0')`

func logLines(_ context.Context, b *bed) ([]line, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return nil, err
	}
	fill := func(ctx context.Context) error { return fillTheLog(ctx, b) }
	return []line{{"log/read", "events/s", "", program{fill, readLog(db)}, program{}, program{fill, readLogByHand}}}, nil
}

// readLog reads the log from the beginning, again and again.
func readLog(db *postgres.DB) work {
	return func(ctx context.Context, _ *bed) (done int64, err error) {
		for ctx.Err() == nil {
			for _, err := range db.ReadLog(context.WithoutCancel(ctx), eventstore.From{}, eventstore.LogFilter{}) {
				if err != nil {
					return done, err
				}
				if done++; done%500 == 0 && ctx.Err() != nil {
					break
				}
			}
		}
		return done, nil
	}
}

const logPage = `
select position, stream, version, id, type, schema_version, data, metadata, recorded_at
from kinora.events where position > $1 order by position limit 500`

// readLogByHand reads the same columns in pages of the same size, on one connection. It has no proof
// that no event is skipped, and decodes no metadata.
func readLogByHand(ctx context.Context, b *bed) (done int64, err error) {
	hard := context.WithoutCancel(ctx)
	conn, err := b.pool.Acquire(hard)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	for ctx.Err() == nil {
		for after, more := int64(0), true; more && ctx.Err() == nil; {
			more = false
			rows, err := conn.Query(hard, logPage, after)
			if err != nil {
				return done, err
			}
			var stream, kind string
			var version int64
			var schema int
			var id uuid.UUID
			var data, metadata []byte
			var at time.Time
			_, err = pgx.ForEachRow(rows, []any{&after, &stream, &version, &id, &kind, &schema, &data, &metadata, &at}, func() error {
				done, more = done+1, true
				return nil
			})
			if err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

func fillTheLog(ctx context.Context, b *bed) error {
	tag, err := b.pool.Exec(ctx, fillLog, logEvents, len(payload))
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	_, err = b.pool.Exec(ctx, "vacuum analyze kinora.events")
	return err
}
