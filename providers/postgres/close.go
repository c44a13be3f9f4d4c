package postgres

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

const (
	// A message that is parked already keeps its row, and the row gets the handlers that it
	// lacks. A skipped one is not changed. An existing hold is not changed, but locked: a unit
	// that applies the last message of the lane must not delete the hold before it sees the
	// messages that this unit parks.
	parkSQL = `
with ck as materialized (select clock_timestamp() t),
parked as (
	insert into kinora.parked as p (projector, generation, ` + parkedAs + `)
	select $1::text, $2::int, ` + parkedAs + ` from json_populate_recordset(null::kinora.parked, $3::json)
	on conflict (marker_id, projector, generation) where state <> 'replayed' and marker_id <> '' do update
	set handlers = p.handlers || array(select h from unnest(excluded.handlers) h where h <> all(p.handlers))
	where p.state in ('waiting', 'stuck') and not excluded.handlers <@ p.handlers
	returning p.lane)
insert into kinora.holds as h (projector, generation, lane, due_at)
select $1::text, $2::int, l.lane, case when l.after < 0 then 'infinity' else ck.t + l.after / 1000 * interval '1 microsecond' end
from ck, unnest($4::bytea[], $5::bigint[]) l(lane, after) where l.lane in (select lane from parked) order by l.lane
on conflict on constraint holds_pkey do update set due_at = h.due_at`

	parkedAs = `handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, code, error, attempts, version, state`

	// Without new handlers, a message keeps its handlers.
	updateParkedSQL = `
update kinora.parked p set class = a.class, code = a.code, error = a.error, attempts = a.attempts, handler = a.handler, version = a.version, state = a.state,
	handlers = case when a.handlers = '{}' then p.handlers else a.handlers end
from json_populate_recordset(null::kinora.parked, $1::json) a where p.id = a.id`

	// A message with a person's decision is kept.
	resolveSQL = `
with gone as (delete from kinora.parked where id = any($1::bigint[]) and resolved_by = '')
update kinora.parked set state = 'replayed', resolved_at = clock_timestamp() where id = any($1::bigint[]) and resolved_by <> ''`

	// The caller has locked these lanes and changed messages in each; changed is the first of
	// them. A lane without messages is no longer held. If its first message is stuck, the lane
	// waits for a person. If its first message is one of $2, the lane is due after that message's
	// delay. Otherwise it is due now, unless its first message precedes all changed ones.
	releaseSQL = `
with ck as materialized (select clock_timestamp() t),
l as materialized (
	select l.*, f.* from json_to_recordset($1::json) l(projector text, generation int, lane bytea, changed bigint) left join lateral (
		select id, state from kinora.parked
		where parked.projector = l.projector and parked.generation = l.generation and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
		order by id limit 1) f on true),
gone as (delete from kinora.holds h using l where h.projector = l.projector and h.generation = l.generation and h.lane = l.lane and l.id is null)
update kinora.holds h set due_at = case
	when l.state = 'stuck' then 'infinity'
	when l.id < l.changed then h.due_at
	else ck.t + coalesce(a.after, 0) / 1000 * interval '1 microsecond' end
from ck, l left join json_to_recordset($2::json) a(id bigint, after bigint) on a.id = l.id
where h.projector = l.projector and h.generation = l.generation and h.lane = l.lane and l.id is not null`

	// Markers that the opening inserted for parked messages that are not live.
	unmarkSQL = `
delete from kinora.markers where ctid = any(array(
	select m.at from unnest($2::text[], $3::text[]) n(handler, message_id), lateral (
		select ctid as at from kinora.markers
		where handler = n.handler and generation = $1::int and message_id = n.message_id limit 1) m))`
)

// queueClosing queues the unit's own writes: output, and the parking or resolving of messages.
func (w *unit) queueClosing(ctx context.Context, c provider.Closing) error {
	w.begin(ofOutput)
	if err := w.db.queueEnqueue(ctx, &w.Batch, c.Output); err != nil {
		return err
	}
	w.begin(ofUnit)
	if w.IsReplay() {
		w.queueResolved(c)
	} else if len(c.Park) > 0 {
		holds := c.Holds(&w.Unit, w.found)
		w.Queue(w.db.q(parkSQL), w.Projector, w.Generation, w.rows(c.Park),
			mapSlice(holds, func(a *provider.Aside) []byte { return a.Parked.Lane[:] }),
			mapSlice(holds, func(a *provider.Aside) int64 { return int64(a.After) }))
	}
	w.queueAdvance()
	w.begin(ofCommit)
	return nil
}

func (w *unit) queueResolved(c provider.Closing) {
	for _, m := range w.Markers(&w.found) {
		delete(w.marked, m)
	}
	// markers of messages that are not live
	if len(w.marked) > 0 {
		handlers, messages := columns(slices.Collect(maps.Keys(w.marked)))
		w.Queue(noScanSQL)
		w.Queue(w.db.q(unmarkSQL), w.Generation, handlers, messages)
	}
	s := c.Resolution(&w.Unit, w.found)
	if len(s.Changed) == 0 {
		return
	}
	var changed []map[string]any
	for q, seq := range s.Changed {
		changed = append(changed, map[string]any{"projector": q.Projector, "generation": q.Generation, "lane": fmt.Sprintf(`\x%x`, q.Lane), "changed": seq})
	}
	stay := w.rows(s.Failed)
	w.Queue(noScanSQL)
	w.Queue(w.db.q(updateParkedSQL), stay)
	w.Queue(w.db.q(resolveSQL), s.Applied)
	w.Queue(w.db.q(releaseSQL), jsonList(changed), stay)
}

// rows returns a JSON list of rows of kinora.parked. A text that PostgreSQL refuses is encoded.
func (w *unit) rows(asides []provider.Aside) string {
	rows := make([]map[string]any, len(asides))
	for i, a := range asides {
		p, state := &a.Parked, provider.StateWaiting
		if a.After < 0 {
			state = provider.StateStuck
		}
		rows[i] = map[string]any{
			"handler": storable(p.Handler), "handlers": append([]string{}, p.Handlers...),
			"message_id": storable(p.MessageID), "marker_id": markerID(p.MessageID),
			"topic": storable(p.Topic), "key": storable(p.Key), "lane": fmt.Sprintf(`\x%x`, p.Lane), "type": storable(p.Type),
			"payload": fmt.Sprintf(`\x%x`, p.Payload), "headers": inHeaders(p.Headers, storable),
			"class": p.Class.String(), "code": storable(p.Code), "error": storable(p.Error), "attempts": p.Attempts, "version": storable(p.Version),
			"state": state.String(), "after": a.After,
		}
		if w.IsReplay() {
			rows[i]["id"] = w.Messages[a.Message].Parked.Seq
		}
	}
	return jsonList(rows)
}
