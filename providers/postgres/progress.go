package postgres

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

const (
	// The generation, or the live one if it is zero.
	build          = `coalesce(nullif($2::int, 0), ` + liveGeneration + `, 1)`
	liveGeneration = `(select generation from kinora.generations where projector = $1::text and state = 'live')`

	checkpointSQL = `
select generation, position, event_id, recorded_at, lineage, mode, token, handlers, splits, null::jsonb from kinora.checkpoint($1::text, $2::int, $3::text)`

	checkpointOfSQL = `
select b.generation, coalesce(c.position, 0), coalesce(c.event_id, ''), c.recorded_at, coalesce(c.lineage, ''), coalesce(c.mode, ''), c.token, c.handlers, c.splits,
	case when jsonb_array_length(c.splits) > 0 then kinora.segments_of($1::text, b.generation) end
from (select ` + build + ` as generation) b left join lateral kinora.checkpoint($1::text, b.generation, '') c on true`

	segmentSQL = `select segment, position, event_id, recorded_at, token from kinora.segment($1::text, $2::int, $3::int)`

	advanceSegmentSQL = `
select kinora.advance_segment($1::text, $2::int, $9::int, $3::bigint, $4::text, $5::uuid, $6::bigint, $7::text, $8::timestamptz)`

	// The checkpoint is locked, so that its current split stays.
	takeSegmentSQL = `
with c as materialized (
	select c.generation, c.position, c.event_id, c.recorded_at from (select ` + build + ` as generation) b, lateral kinora.checkpoint($1::text, b.generation, 'stay') c
	where c.mode = 'catch-up' and $3::int - (c.splits -> 0 ->> 'first')::int between 0 and (c.splits -> 0 ->> 'count')::int - 1)
insert into kinora.segments as s (projector, generation, segment, position, event_id, recorded_at, token)
select $1::text, c.generation, $3::int, c.position, c.event_id, c.recorded_at, $4::uuid from c
on conflict on constraint segments_pkey do update set token = excluded.token
returning position, event_id, recorded_at`

	dropSegmentsSQL = `
delete from kinora.segments s using (select ` + build + ` as generation) b
where s.projector = $1::text and s.generation = b.generation and s.segment < $3::int`

	advanceSQL = `select kinora.advance($1::text, $2::int, $3::bigint, $4::text, $5::uuid, $6::bigint, $7::text, $8::timestamptz)`

	markedSQL   = `select handler, message_id from kinora.marked($1::int, $2::bigint, $3::text[], $4::text[], $5::text[])`
	unmarkedSQL = `select kinora.unmarked($1::int, $2::bigint, $3::text[], $4::text[], $5::text[])`

	// $10 to $12, and $14, are the position, the mode, the token and the splits of the current checkpoint.
	setCheckpointSQL = `
insert into kinora.checkpoints as c (projector, generation, position, event_id, recorded_at, lineage, mode, token, handlers, splits)
select $1::text, b.generation, $3::bigint, $4::text, $5::timestamptz, $6::text, $7::text, $8::uuid, $9::jsonb, $13::jsonb
from (select ` + build + ` as generation) b
where ($10::bigint, $11::text, $12::uuid) = (0, '', '00000000-0000-0000-0000-000000000000')
	or exists (select from kinora.checkpoint($1::text, b.generation, ''))
on conflict on constraint checkpoints_pkey do update
set (position, event_id, recorded_at, lineage, mode, token, handlers, splits) =
	(excluded.position, excluded.event_id, excluded.recorded_at, excluded.lineage, excluded.mode, excluded.token, excluded.handlers, excluded.splits)
where (c.position, c.mode, c.token, c.splits) = ($10::bigint, $11::text, $12::uuid, $14::jsonb) and c.mode <> 'ended'`

	// One row for each name without a marker, unless the checkpoint has passed the message.
	unappliedSQL = `
with b as materialized (select ` + build + ` as generation),
passed as materialized (select c.position from b, kinora.checkpoint($1::text, b.generation, '') c)
select n.o from unnest($3::int[], $4::text[], $5::text[], $6::bigint[]) n(o, handler, id, position)
left join lateral (
	select true as found from kinora.markers m
	where m.handler = n.handler and m.generation = (select generation from b) and m.message_id = n.id limit 1) m on true
where m.found is null and (n.position = 0 or n.position > coalesce((select position from passed), 0))`

	// Pruning reads the first markers in the order of an index. Without these settings, if the
	// statistics are from an empty table, the planner reads and sorts all markers. The plans then have
	// high costs, for which the server would compile them.
	inOrderSQL = `
select set_config('jit', 'off', true), set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)`

	pruneAppliedSQL = `
with b as materialized (select ` + build + ` as generation),
passed as materialized (select c.position from b, kinora.checkpoint($1::text, b.generation, '') c),
gone as (
	delete from kinora.markers where ctid = any(array(
		select m.at from unnest($3::text[]) h(name), lateral (
			select ctid as at from kinora.markers
			where handler = h.name and position <= (select position from passed) and (generation = (select generation from b)) is true
			order by handler, position limit $4::bigint) m
		limit $4::bigint))
	returning 1)
select count(*) from gone`
)

// inOrder runs a statement that returns one value, with the settings of inOrderSQL.
func (db *Provider) inOrder(ctx context.Context, on session, value any, sql string, args ...any) error {
	b := &pgx.Batch{}
	b.Queue(inOrderSQL)
	queueRow(b, []any{value}, db.q(sql), args...)
	return on.SendBatch(ctx, b).Close()
}

// What a transaction does to the checkpoint that it reads.
const (
	unlocked  = ""
	mustStay  = "stay" // its mode and token stay until the end of the transaction
	isToBeSet = "move"
)

// queueCheckpoint queues a statement that reads the checkpoint into c. c is not changed if there is
// none.
func (db *Provider) queueCheckpoint(b *pgx.Batch, of provider.Build, locked string, c *provider.Checkpoint) {
	b.Queue(db.q(checkpointSQL), of.Projector, of.Number(), locked).Query(func(rows pgx.Rows) error {
		found, err := pgx.CollectRows(rows, scanCheckpoint)
		if len(found) > 0 {
			*c = found[0]
		}
		return err
	})
}

func scanCheckpoint(row pgx.CollectableRow) (c provider.Checkpoint, err error) {
	var mode string
	var token uuid.NullUUID
	var handlers, splits, list []byte
	err = row.Scan(&c.Generation, &c.Place.Position, &c.Place.ID, scanTime(&c.Place.RecordedAt), &c.Lineage, &mode, &token, &handlers, &splits, &list)
	c.Mode, c.Token = provider.ParseMode(mode), claim.Token(token.UUID)
	var segments []struct { // as kinora.segments_of returns them
		Segment    int
		Position   int64
		EventID    string    `json:"event_id"`
		RecordedAt time.Time `json:"recorded_at"`
		Token      uuid.UUID
	}
	for _, part := range []struct {
		text []byte
		into any
	}{{handlers, &c.Handlers}, {splits, &c.Splits}, {list, &segments}} {
		if err == nil && part.text != nil {
			err = json.Unmarshal(part.text, part.into)
		}
	}
	for _, s := range segments {
		place := provider.LogPlace{Position: s.Position, ID: s.EventID, RecordedAt: s.RecordedAt.UTC()}
		c.Segments = append(c.Segments, provider.Segment{Number: s.Segment, Place: place, Token: claim.Token(s.Token)})
	}
	c.Handlers, c.Splits = some(c.Handlers), some(c.Splits)
	return c, err
}

// queueSegment queues a statement that locks a segment and adds it to c.
func (db *Provider) queueSegment(b *pgx.Batch, of provider.Build, number int, c *provider.Checkpoint) {
	var is provider.Segment
	queueRows(b, []any{&is.Number, &is.Place.Position, &is.Place.ID, scanTime(&is.Place.RecordedAt), (*uuid.UUID)(&is.Token)}, func() {
		c.Segments = append(c.Segments, is)
	}, db.q(segmentSQL), of.Projector, of.Number(), number)
}

// TakeSegment implements provider.Progress.
func (db *Provider) TakeSegment(ctx context.Context, of provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	if err := provider.CheckStorable("projector", of.Projector); err != nil {
		return was, false, wrap("take a segment", err)
	}
	crash.Point("set checkpoint: before")
	was.Number = number
	err = db.fenced(ctx, of.Projector, false, func(b *pgx.Batch) {
		queueRows(b, []any{&was.Place.Position, &was.Place.ID, scanTime(&was.Place.RecordedAt)}, func() { ok = true },
			db.q(takeSegmentSQL), of.Projector, of.Generation, number, uuid.UUID(token))
	})
	crash.Point("set checkpoint: after")
	return was, ok && err == nil, classifyOwn(ctx, wrap("take a segment", err))
}

// Checkpoint implements provider.Progress.
func (db *Provider) Checkpoint(ctx context.Context, of provider.Build) (c provider.Checkpoint, err error) {
	if err = provider.CheckStorable("projector", of.Projector); err == nil {
		return db.checkpoint(ctx, db.pool, of)
	}
	return c, wrap("read the checkpoint", err)
}

func (db *Provider) checkpoint(ctx context.Context, on querier, of provider.Build) (provider.Checkpoint, error) {
	rows, _ := on.Query(ctx, db.q(checkpointOfSQL), planned, of.Projector, of.Generation) // the rows return its error too
	c, err := pgx.CollectExactlyOneRow(rows, scanCheckpoint)
	return c, classifyOwn(ctx, busy(wrap("read the checkpoint", err)))
}

// SetCheckpoint implements provider.Progress. A new mode takes the fence exclusively, so it waits
// for the units that have it. Units that open meanwhile wait too: therefore it waits for at most a
// second at a time.
func (db *Provider) SetCheckpoint(ctx context.Context, of provider.Build, from, to provider.Checkpoint) (set bool, err error) {
	if err := checkCheckpoint(of.Projector, to); err != nil {
		return false, wrap("set the checkpoint", err)
	}
	crash.Point("set checkpoint: before")
	exclusive := from.Mode != to.Mode || from.Split() != to.Split()
	err = db.fenced(ctx, of.Projector, exclusive, func(b *pgx.Batch) {
		b.Queue(db.q(setCheckpointSQL), of.Projector, of.Generation,
			to.Place.Position, to.Place.ID, recordedAt(to.Place), to.Lineage, to.Mode.String(), uuid.UUID(to.Token), jsonList(to.Handlers),
			from.Place.Position, from.Mode.String(), uuid.UUID(from.Token), jsonList(to.Splits), jsonList(from.Splits)).Exec(func(tag pgconn.CommandTag) error {
			set = tag.RowsAffected() == 1
			return nil
		})
		if len(from.Splits) > 0 && from.Oldest() != to.Oldest() {
			b.Queue(db.q(dropSegmentsSQL), of.Projector, of.Generation, to.Oldest())
		}
	})
	crash.Point("set checkpoint: after")
	return set && err == nil, classifyOwn(ctx, wrap("set the checkpoint", err))
}

// fenced runs statements in a transaction, if exclusive while no unit of the projector is open.
func (db *Provider) fenced(ctx context.Context, projector string, exclusive bool, queue func(b *pgx.Batch)) error {
	for try := 1; ; try++ {
		b := &pgx.Batch{}
		b.Queue(`begin isolation level read committed`)
		if exclusive {
			b.Queue(`set local lock_timeout = '1s'`)
			b.Queue(exclusiveSQL, lockClassFence, db.fence(projector))
		}
		queue(b)
		b.Queue(`commit`)
		err := db.pool.SendBatch(ctx, b).Close() // after an error, the pool closes the connection
		if e := pgError(err); e == nil || e.Code != lockNotAvailable || pause(ctx, try) != nil {
			return err
		}
	}
}

// checkCheckpoint returns an *eventstore.InvalidError for a checkpoint that cannot be stored.
func checkCheckpoint(projector string, c provider.Checkpoint) error {
	for _, h := range c.Handlers {
		if err := provider.CheckStorable("checkpoint.handlers", h.Handler, h.Type); err != nil {
			return err
		}
	}
	return provider.CheckSetCheckpoint(projector, c)
}

// recordedAt returns nil if the place has no time.
func recordedAt(p provider.LogPlace) *time.Time {
	if p.RecordedAt.IsZero() {
		return nil
	}
	return &p.RecordedAt
}

// Unapplied implements provider.Progress with one statement.
func (db *Provider) Unapplied(ctx context.Context, of provider.Build, messages []provider.Message) ([]bool, error) {
	return db.unapplied(ctx, db.pool, of, messages)
}

func (db *Provider) unapplied(ctx context.Context, on querier, b provider.Build, messages []provider.Message) ([]bool, error) {
	if err := provider.CheckUnapplied(b.Projector, messages); err != nil {
		return nil, wrap("look up markers", err)
	}
	var of []int32     // for each handler of the messages, the index of its message
	var unmarked []int // for each, the number of its names
	var number []int32 // for each name
	var names, ids []string
	var positions []int64
	for i := range messages {
		m := &messages[i]
		for j := range m.Handlers {
			all := m.Handlers[j].Names()
			for _, name := range all {
				number, names = append(number, int32(len(of))), append(names, name)
				ids, positions = append(ids, markerID(m.ID)), append(positions, m.Position)
			}
			of, unmarked = append(of, int32(i)), append(unmarked, len(all))
		}
	}
	unapplied := make([]bool, len(messages))
	if len(names) == 0 {
		return unapplied, nil
	}
	missing, err := collect(ctx, on, pgx.RowTo[int32], db.q(unappliedSQL), planned, b.Projector, b.Generation, number, names, ids, positions)
	for _, n := range missing {
		if unmarked[n]--; unmarked[n] == 0 {
			unapplied[of[n]] = true
		}
	}
	return unapplied, classifyOwn(ctx, wrap("look up markers", err))
}

// PruneApplied implements provider.Progress.
func (db *Provider) PruneApplied(ctx context.Context, of provider.Build, handlers []string, limit int) (n int, err error) {
	if err := provider.CheckPrune(of.Projector, handlers); err != nil {
		return 0, wrap("prune applied", err)
	}
	crash.Point("prune applied: before")
	err = db.inOrder(ctx, db.pool, &n, pruneAppliedSQL, of.Projector, of.Generation, handlers, max(limit, 0))
	crash.Point("prune applied: after")
	return n, classifyOwn(ctx, wrap("prune applied", err))
}
