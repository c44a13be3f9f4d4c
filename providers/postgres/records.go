package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// The numbers are those of provider.Outcome. A parked or skipped message counts for its handlers,
// or for all if it has none.
const outcomesSQL = `
with q as materialized (
	select n.*, coalesce(nullif(n.generation, 0),
		(select g.generation from kinora.generations g where g.projector = n.projector and g.state = 'live'), 1) as build
	from json_to_recordset($1::json) n(o int, projector text, generation int, names text[], message_id text, recorded_at bigint, position bigint))
select coalesce(
	(select case
		when p.state = 'skipped' then 4
		when p.state = 'stuck' then 3
		when (select due_at from kinora.holds h where h.projector = p.projector and h.generation = p.generation and h.lane = p.lane limit 1) = 'infinity' then 3
		else 2 end
	from kinora.parked p
	where p.state <> 'replayed' and p.marker_id <> '' and p.marker_id = q.message_id and p.projector = q.projector and p.generation = q.build
		and (p.handlers = '{}' or p.handlers && q.names) limit 1),
	case
		when (select c.position from kinora.checkpoints c where c.projector = q.projector and c.generation = q.build limit 1) >= q.position then 1
		when exists (
			select from kinora.markers m where m.message_id = q.message_id and m.handler = any(q.names) and m.generation = q.build) then 1
		when q.position is not null and (
			select c.position from kinora.checkpoints c where c.projector = q.projector and c.generation = q.build limit 1) is not null then 0
		when 'epoch'::timestamptz + q.recorded_at * interval '1 microsecond' <= (select max(f.pruned_before) from kinora.low_water_marks f where f.handler = any(q.names)) then 5
		else 0 end)
from q order by q.o`

// Outcomes implements provider.Records.
func (db *Provider) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	asked := make([]map[string]any, len(questions))
	for i, q := range questions {
		asked[i] = map[string]any{"o": i, "projector": q.Projector(), "generation": q.Generation, "names": q.Names(), "message_id": markerID(q.MessageID)}
		if recorded, _ := provider.StoredTime(q.RecordedAt); !recorded.IsZero() {
			asked[i]["recorded_at"] = recorded.UnixMicro()
		}
		if q.Position > 0 {
			asked[i]["position"] = q.Position
		}
	}
	return read(ctx, db, "read outcomes", provider.CheckQuestions(questions), pgx.RowTo[provider.Outcome], outcomesSQL, planned, jsonList(asked))
}

const (
	// One statement deletes the markers and raises the handler's low-water mark, so that no other
	// transaction sees only one of these.
	pruneSQL = `
with recursive ck as materialized (select clock_timestamp() - $3::bigint * interval '1 microsecond' as t),
-- The walk skips from generation to generation of resolved messages.
builds as (
	select min(generation) as generation from kinora.parked where state in ('replayed', 'skipped') and projector = $1::text
	union all
	select (
		select min(generation) from kinora.parked
		where state in ('replayed', 'skipped') and projector = $1::text and generation > b.generation)
	from builds b where b.generation is not null),
c as materialized (select array(select generation from kinora.checkpoints where projector = $1::text) as generations),
gone as (
	delete from kinora.markers where ctid = any(array(
		select m.at from unnest($2::text[]) h(name), lateral (
			select m.at from (
				(select ctid as at, processed_at from kinora.markers
				where handler = h.name and position is null and processed_at < (select t from ck)
				order by handler, position, processed_at limit $4::bigint)
				union all
				(select ctid, processed_at from kinora.markers
				where handler = h.name and position > 0 and processed_at < (select t from ck)
					and generation <> all((select generations from c)::int[])
				order by handler, position limit $4::bigint)) m
			order by m.processed_at limit $4::bigint) m))
	returning handler, processed_at),
raised as (
	insert into kinora.low_water_marks as f (handler, pruned_before)
	select handler, max(processed_at) from gone group by handler order by handler
	on conflict on constraint low_water_marks_pkey do update set pruned_before = greatest(f.pruned_before, excluded.pruned_before)),
resolved as (
	delete from kinora.parked where state in ('replayed', 'skipped') and id = any(array(
		select p.id from builds b, lateral (
			select id, resolved_at from kinora.parked
			where state in ('replayed', 'skipped') and projector = $1::text and generation = b.generation and resolved_at < (select t from ck)
			order by projector, generation, resolved_at limit $4::bigint) p
		order by p.resolved_at limit $4::bigint))
	returning 1)
select (select count(*) from gone) + (select count(*) from resolved)`

	// The walk skips from handler to handler by the key; null ends it.
	markedHandlersSQL = `
with recursive h as (
	select min(handler) as name from kinora.markers
	union all
	select (select min(handler) from kinora.markers where handler > h.name) from h where h.name is not null)
select name from h where name is not null`

	dropMarkersSQL = `
delete from kinora.markers where ctid = any(array(
	select ctid from kinora.markers where handler = $1::text order by handler, position, processed_at limit $2::int))`
)

// Prune implements provider.Records.
func (db *Provider) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (n int, err error) {
	if err := provider.CheckPrune(projector, handlers); err != nil {
		return 0, wrap("prune", err)
	}
	crash.Point("prune: before")
	err = db.inOrder(ctx, db.pool, &n, pruneSQL, projector, handlers, window.Microseconds(), max(limit, 0))
	crash.Point("prune: after")
	return n, classifyOwn(ctx, wrap("prune", err))
}

// MarkedHandlers implements provider.MarkerMaintainer.
func (db *Provider) MarkedHandlers(ctx context.Context) ([]string, error) {
	return read(ctx, db, "list handlers with markers", nil, pgx.RowTo[string], markedHandlersSQL, planned)
}

// DropMarkers implements provider.MarkerMaintainer.
func (db *Provider) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	crash.Point("drop markers: before")
	n, err := db.exec(ctx, "drop markers", provider.CheckStorable("handler", handler), dropMarkersSQL, planned, handler, limit)
	crash.Point("drop markers: after")
	return n, err
}
