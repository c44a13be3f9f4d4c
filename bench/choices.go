package main

import (
	"context"
	"fmt"

	"github.com/google/uuid"
)

// A design that was not chosen: outbox entries that refer to their events instead of copying
// payload and headers. These lines compare the limit in that form with the limit.
const (
	referTables = `
create table lim.refer (id bigint generated always as identity primary key, position bigint not null, message_id text collate "C" not null,
	topic text collate "C" not null, key text collate "C" not null, open boolean not null default true,
	status text not null default 'pending', attempts int not null default 0, token uuid, published_at timestamptz, next_attempt_at timestamptz not null, created_at timestamptz not null,
	unique (topic, message_id)) with (fillfactor = 50);
create index on lim.refer (id) where open;
create index on lim.refer (topic, key, id) where open`

	referOne = `
with s as (insert into lim.streams as s (stream, version) values ($1, 1)
	on conflict (stream) do update set version = s.version + 1 where s.version = $2 returning version),
e as (insert into lim.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select $1, version, $3, 'review.posted', 1, $4, '{}', now() from s returning position)
insert into lim.refer (position, message_id, topic, key, next_attempt_at, created_at)
select position, $3::text, 'review', $1, now(), now() from e`

	referClaim = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id, o.topic, o.key from lim.refer o, ck
	where o.open and o.next_attempt_at <= ck.t
	order by o.id limit $2 for update of o skip locked),
safe as materialized (
	select p.id from picked p where not exists (
		select from lim.refer e where e.open and e.topic = p.topic and e.key = p.key and e.id < p.id
			and not exists (select from picked q where q.id = e.id)))
update lim.refer o set status = 'claimed', token = $1, attempts = attempts + 1, next_attempt_at = ck.t + interval '5 min'
from safe, ck, lim.events v where o.id = safe.id and v.position = o.position
returning o.id, o.message_id, o.topic, o.key, v.data, jsonb_build_object('kinora_type', v.type, 'kinora_schema', v.schema_version::text,
	'kinora_stream', v.stream, 'kinora_version', v.version::text)`

	referDelete = `delete from lim.refer where id = any($1) and token = $2`
)

func (r *relayBed) choiceLines(ctx context.Context) ([]line, error) {
	if _, err := r.pool.Exec(ctx, referTables); err != nil {
		return nil, err
	}
	appended := func(ctx context.Context, b *bed) (int64, error) {
		return many(ctx, 8, 1, func(ctx context.Context, worker string, i int64) error {
			_, err := b.pool.Exec(ctx, referOne, fmt.Sprintf("review-%s-%d", worker, i/perStream), i%perStream, uuid.Must(uuid.NewV7()), []byte(payload))
			return err
		})
	}
	referred := func(ctx context.Context, _ *bed) (int64, error) { return r.claimAndMark(ctx, referClaim, referDelete) }
	fill := func(ctx context.Context) error {
		for _, stmt := range []string{
			"truncate lim.refer, lim.events",
			fmt.Sprintf(`with e as (
				insert into lim.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
				select 'review-' || g %% %d, g, gen_random_uuid(), 'review.posted', 1, '%s', '{}', now() from generate_series(1, %d) g
				returning position, id, stream)
			insert into lim.refer (position, message_id, topic, key, next_attempt_at, created_at)
			select position, id::text, 'relayed', stream, now(), now() from e order by position`, relayKeys, payload, backlog),
			"vacuum analyze lim.refer", "vacuum analyze lim.events", "checkpoint",
		} {
			if _, err := r.pool.Exec(ctx, stmt); err != nil {
				return err
			}
		}
		return nil
	}
	return []line{
		{"choice/by-reference: append by eight writers", "appends/s", "", program{work: appended}, program{}, program{work: limit(8, 1)}},
		{"choice/by-reference: relay", "messages/s", "", program{fill, referred}, program{}, program{r.filled("lim", backlog), r.limit}},
	}, nil
}
