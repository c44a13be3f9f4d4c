package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

const payload = `{"product_id":"p1","rating":5,"title":"Great","body":"Works exactly as described, would buy again and again."}`

// The limit has its own tables with guarantees like Kinora's: the stream's row, the gap lock taken
// by a statement trigger, unique ids, an outbox entry with a copy of the payload. It does not check
// ids, encodes nothing and validates nothing.
const limitTables = `
create schema lim;
create table lim.streams (stream text collate "C" primary key, version bigint not null) with (fillfactor = 50);
create table lim.events (position bigint generated always as identity primary key, stream text collate "C" not null, version bigint not null,
	id uuid not null unique, type text not null, schema_version int not null, data jsonb not null, metadata jsonb not null,
	recorded_at timestamptz not null, unique (stream, version));
create function lim.hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(77, tg_relid::int); return null; end $$;
create trigger hold before insert on lim.events for each statement execute function lim.hold();
create table lim.outbox (id bigint generated always as identity primary key, message_id text collate "C" not null, topic text collate "C" not null,
	key text collate "C" not null, payload bytea not null, headers jsonb not null, open boolean not null default true,
	status text not null default 'pending', attempts int not null default 0, token uuid, published_at timestamptz, next_attempt_at timestamptz not null, created_at timestamptz not null,
	unique (topic, message_id)) with (fillfactor = 50);
create index on lim.outbox (id) where open;
create index on lim.outbox (topic, key, id) where open;`

const limitOne = `
with s as (insert into lim.streams as s (stream, version) values ($1, 1)
	on conflict (stream) do update set version = s.version + 1 where s.version = $2 returning version),
e as (insert into lim.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select $1, version, $3, 'review.posted', 1, $4, '{}', now() from s)
insert into lim.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
select $3::text, 'review', $1, $5, $6, now(), now() from s`

const limitTen = `
with s as (insert into lim.streams as s (stream, version) values ($1, 10)
	on conflict (stream) do update set version = s.version + 10 where s.version = $2 returning version),
i as (select * from unnest($3::uuid[], $4::jsonb[], $5::bytea[], $6::jsonb[]) with ordinality u(id, data, payload, headers, o)),
e as (insert into lim.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select $1, version - 10 + o, id, 'review.posted', 1, data, '{}', now() from s, i order by o)
insert into lim.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
select id::text, 'review', $1, payload, headers, now(), now() from s, i order by o`

func appendLines(ctx context.Context, b *bed) ([]line, error) {
	db, err := postgres.New(b.pool, &postgres.Config{Route: outbox.ByCategory})
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		return nil, err
	}
	if _, err := b.pool.Exec(ctx, limitTables); err != nil {
		return nil, err
	}
	peer, err := newForwarder(b)
	if err != nil {
		return nil, err
	}
	snapshots, err := snapshotLines(db)
	if err != nil {
		return nil, err
	}
	const name = "Watermill forwarder, publishing in a transaction"
	return append([]line{
		{"append/1", "appends/s", name, program{work: ours(db, 1, 1)}, program{work: peer(1)}, program{work: limit(1, 1)}},
		{"append/1x8", "appends/s", name, program{work: ours(db, 8, 1)}, program{work: peer(8)}, program{work: limit(8, 1)}},
		{"append/1x64", "appends/s", name, program{work: ours(db, 64, 1)}, program{work: peer(64)}, program{work: limitShared(64)}},
		{"append/10", "events/s", "", program{work: ours(db, 4, 10)}, program{}, program{work: limit(4, 10)}},
		publishLine(db, peer(publishers)),
	}, snapshots...), nil
}

// many calls step in that many goroutines until ctx ends, each with its own numbers from 0, and
// returns the total.
func many(ctx context.Context, workers, each int, step func(ctx context.Context, worker string, i int64) error) (int64, error) {
	var all sync.WaitGroup
	var done atomic.Int64
	errs := make(chan error, workers)
	for range workers {
		all.Go(func() {
			worker := uuid.NewString()
			for i := int64(0); ctx.Err() == nil; i++ {
				if err := step(context.WithoutCancel(ctx), worker, i); err != nil {
					errs <- err
					return
				}
				done.Add(int64(each))
			}
		})
	}
	all.Wait()
	close(errs)
	var err error
	for e := range errs {
		err = errors.Join(err, e)
	}
	return done.Load(), err
}

// perStream is the number of appends to a stream before the next stream begins.
const perStream = 10

func ours(db *postgres.DB, workers, n int) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		return many(ctx, workers, n, func(ctx context.Context, worker string, i int64) error {
			stream := fmt.Sprintf("review-%s-%d", worker, i/perStream)
			_, err := db.Append(ctx, stream, eventstore.Expected(i%perStream*int64(n)), posted(n))
			return err
		})
	}
}

// posted returns n events.
func posted(n int) []eventstore.Draft {
	drafts := make([]eventstore.Draft, n)
	for k := range drafts {
		drafts[k] = eventstore.Draft{ID: uuid.Must(uuid.NewV7()).String(), Type: "review.posted", Schema: 1, Data: []byte(payload)}
	}
	return drafts
}

const headers = `{"kinora_type":"review.posted","kinora_schema":"1","kinora_stream":"review-1","kinora_version":"1"}`

func limit(workers, n int) work {
	return func(ctx context.Context, b *bed) (int64, error) {
		return many(ctx, workers, n, func(ctx context.Context, worker string, i int64) error {
			stream, at := fmt.Sprintf("review-%s-%d", worker, i/perStream), i%perStream*int64(n)
			if n == 1 {
				_, err := b.pool.Exec(ctx, limitOne, stream, at, uuid.Must(uuid.NewV7()), []byte(payload), []byte(payload), []byte(headers))
				return err
			}
			ids, data, head := make([]uuid.UUID, n), make([][]byte, n), make([][]byte, n)
			for k := range ids {
				ids[k], data[k], head[k] = uuid.Must(uuid.NewV7()), []byte(payload), []byte(headers)
			}
			_, err := b.pool.Exec(ctx, limitTen, stream, at, ids, data, data, head)
			return err
		})
	}
}

// newForwarder is the peer as its users run it: the service begins a transaction and publishes
// through the forwarder into a watermill-sql topic in that transaction. It stores no events.
func newForwarder(b *bed) (func(workers int) work, error) {
	db := stdlib.OpenDBFromPool(b.pool)
	log := watermill.NopLogger{}
	init, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}, log)
	if err != nil {
		return nil, err
	}
	if err := init.Publish("forward", message.NewMessage(watermill.NewUUID(), []byte(payload))); err != nil {
		return nil, err
	}
	return func(workers int) work {
		return func(ctx context.Context, _ *bed) (int64, error) {
			return many(ctx, workers, 1, func(ctx context.Context, _ string, _ int64) error { return publishInTx(ctx, db, log) })
		}
	}, nil
}

func publishInTx(ctx context.Context, db *sql.DB, log watermill.LoggerAdapter) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	pub, err := wsql.NewPublisher(tx, wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, log)
	if err != nil {
		return err
	}
	forward := forwarder.NewPublisher(pub, forwarder.PublisherConfig{ForwarderTopic: "forward"})
	if err := forward.Publish("review", message.NewMessage(watermill.NewUUID(), []byte(payload))); err != nil {
		return err
	}
	return tx.Commit()
}
