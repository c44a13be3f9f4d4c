package sqlite

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// outcomes answers questions: arrays of a message's id, a projector, the names of a handler, the
// time at which the message was recorded, its position, and a generation. It looks for the parked
// message, for the checkpoint and a marker, and for the low-water mark of the handler.
const outcomes = `
with q (i, id, projector, names, recorded, position, generation) as materialized (
	select key, value ->> 0, value ->> 1, value -> 2, value ->> 3, value ->> 4, coalesce(nullif(value ->> 5, 0), (
		select generation from kinora_generations where projector = value ->> 1 and state = 'live'), 1)
	from json_each(?1))
select coalesce(
	(select case when p.state = 'skipped' then 'skipped' when 'stuck' in (p.state, (
			select f.state from kinora_parked f indexed by kinora_parked_lane
			where f.open = 1 and f.projector = p.projector and f.generation = p.generation and f.lane = p.lane order by f.id limit 1)) then 'stuck'
		else 'waiting' end
		from kinora_parked p indexed by kinora_parked_message
		where p.state <> 'replayed' and p.message_id <> '' and p.projector = q.projector and p.generation = q.generation and p.message_id = q.id
			and (p.handlers = '[]' or exists (
				select 1 from json_each(p.handlers) a join json_each(q.names) b on a.value = b.value))),
	(select 'applied' from kinora_checkpoints c
		where c.projector = q.projector and c.generation = q.generation and q.position between 1 and c.position),
	(select 'applied' from json_each(q.names) n cross join kinora_markers m
		where m.handler = n.value and m.generation = q.generation and m.message_id = q.id),
	(select 'unseen' from kinora_checkpoints c
		where c.projector = q.projector and c.generation = q.generation and q.position >= 1),
	(select 'pruned' from json_each(q.names) n cross join kinora_low_water_marks f
		where f.handler = n.value and f.pruned_before >= q.recorded and q.recorded > ` + yearOne + `),
	'unseen')
from q order by q.i`

// outcomeNames are the results of outcomes by their provider.Outcome.
var outcomeNames = []string{"unseen", "applied", "waiting", "stuck", "skipped", "pruned"}

// Outcomes implements provider.Records.
func (d *Provider) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	if err := provider.CheckQuestions(questions); err != nil {
		return nil, wrap("look up outcomes", err)
	}
	asked, answers := make([]any, len(questions)), make([]provider.Outcome, len(questions))
	for i, q := range questions {
		// rounded up: low-water marks are inclusive
		recorded := q.RecordedAt.Add(time.Millisecond - 1).UnixMilli()
		asked[i] = []any{q.MessageID, q.Projector(), q.Names(), recorded, q.Position, q.Generation}
	}
	names, err := column[string](ctx, d.reads, outcomes, jsonOf(asked))
	for i, name := range names {
		answers[i] = provider.Outcome(slices.Index(outcomeNames, name))
	}
	return result(answers, "look up outcomes", err)
}

const (
	// At most ?3 markers of handler ?1, of projector ?4, that are older than ?2 ms: those without a
	// position, the oldest first, then those with one in generations without a checkpoint.
	oldMarkers = `
	select * from (
		select * from (
			select handler, generation, message_id from kinora_markers indexed by kinora_markers_position
			where handler = ?1 and position is null and processed_at < ` + clock + ` - ?2 order by processed_at limit ?3)
		union all
		select handler, generation, message_id from kinora_markers m indexed by kinora_markers_position
		where handler = ?1 and position > 0 and processed_at < ` + clock + ` - ?2
			and not exists (select 1 from kinora_checkpoints c where c.projector = ?4 and c.generation = m.generation)
		limit ?3)`
	// At most ?3 resolved messages of projector ?1 that are older than ?2 ms, the oldest first.
	oldResolved = `
	select id from kinora_parked indexed by kinora_parked_resolved
	where open = 0 and projector = ?1 and resolved_at < ` + clock + ` - ?2 order by resolved_at limit ?3`

	pruneMarkers = `
delete from kinora_markers where (handler, generation, message_id) in (` + oldMarkers + `) returning processed_at`
	pruneResolved = `delete from kinora_parked where id in (` + oldResolved + `) returning resolved_at`

	// raiseLowWater never lowers the mark.
	raiseLowWater = `
insert into kinora_low_water_marks (handler, pruned_before) values (?1, ?2)
on conflict (handler) do update set pruned_before = max(pruned_before, ?2)`
)

// Prune implements provider.Records. Each handler has a transaction: others can write in between.
func (d *Provider) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (pruned int, err error) {
	if err := provider.CheckPrune(projector, handlers); err != nil {
		return 0, wrap("prune", err)
	}
	for _, handler := range handlers {
		n, err := d.prune(ctx, oldMarkers, pruneMarkers, handler, window, limit, projector)
		if pruned += n; err != nil {
			return pruned, wrap("prune markers of "+handler, err)
		}
	}
	n, err := d.prune(ctx, oldResolved, pruneResolved, projector, window, limit)
	return pruned + n, wrap("prune resolved messages of "+projector, err)
}

// prune takes the write lock only if old selects rows to delete.
func (d *Provider) prune(ctx context.Context, old, query, name string, window time.Duration, limit int, more ...any) (int, error) {
	args, exists := append([]any{name, millis(window), max(limit, 0)}, more...), false
	if err := one(ctx, d.reads, []any{&exists}, `select exists (`+old+`)`, args...); err != nil || !exists {
		return 0, err
	}
	return update(ctx, d, "delete", nil, func(u *unit) (int, error) {
		times, err := column[int64](ctx, u, query, args...)
		if err == nil && len(times) > 0 && query == pruneMarkers {
			_, err = u.exec(ctx, raiseLowWater, name, slices.Max(times))
		}
		return len(times), err
	})
}

const (
	// The walk skips from handler to handler by the key; null ends it.
	markedHandlers = `
with recursive h (name) as (
	select min(handler) from kinora_markers
	union all
	select (select min(handler) from kinora_markers where handler > h.name) from h where h.name is not null)
select name from h where name is not null`

	dropMarkers = `
delete from kinora_markers where (handler, generation, message_id) in (
	select handler, generation, message_id from kinora_markers where handler = ?1 limit ?2)`
)

// MarkedHandlers implements provider.MarkerMaintainer.
func (d *Provider) MarkedHandlers(ctx context.Context) ([]string, error) {
	names, err := column[string](ctx, d.reads, markedHandlers)
	return result(names, "list handlers with markers", err)
}

// DropMarkers implements provider.MarkerMaintainer.
func (d *Provider) DropMarkers(ctx context.Context, handler string, limit int) (n int, err error) {
	if err = provider.CheckStorable("handler", handler); err == nil {
		n, err = d.changed(ctx, dropMarkers, handler, limit)
	}
	return result(n, "drop markers", err)
}

const (
	extendLease = `
insert into kinora_runners (runner, expires_at) values (?1, ` + clock + ` + ?2)
on conflict (runner) do update set expires_at = ` + clock + ` + ?2`

	// The leases and messages in flight of runners whose leases ended more than ?3 ms ago, and of
	// runner ?1 if ?4.
	deleteInFlight = `delete from kinora_in_flight where runner in (` + ended + `)`
	deleteRunner   = `delete from kinora_runners where runner in (` + ended + `)`

	ended = `
	select ?1 where ?4
	union all
	select runner from kinora_runners where runner <> ?1 and expires_at < ` + clock + ` - ?3`

	lastCrash = `select ` + clock + `, (select max(expires_at) from kinora_runners where runner <> ?1 and expires_at < ` + clock + `)`
)

// Beat implements provider.Liveness. Its commit is not synced, except on a DB from New. Like every write
// it waits for running handlers in any process: leases should be longer than handlers take.
func (d *Provider) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	return update(unsynced(ctx), d, "renew the lease of runner "+runner, nil, func(u *unit) (h provider.Health, err error) {
		err = u.execAll(ctx, []string{extendLease, deleteInFlight, deleteRunner}, runner, millis(lease), millis(record), lease == 0)
		if err == nil {
			err = one(ctx, u, []any{scanTime(&h.Now), scanTime(&h.Crashed)}, lastCrash, runner)
		}
		return h, err
	})
}

const insertInFlight = `
insert into kinora_in_flight (message_id, build, runner, worker)
select value, ?1, ?2, ?3 from json_each(?4)
where true
on conflict do nothing`

// InFlight implements provider.Liveness. Its commit is not synced, except on a DB from New.
func (d *Provider) InFlight(ctx context.Context, b provider.Build, w provider.Worker, messages []string) error {
	err := d.writeTx(unsynced(ctx), func(u *unit) error {
		if _, err := u.exec(ctx, clearInFlight, w.Runner, w.Number); err != nil {
			return err
		}
		_, err := u.exec(ctx, insertInFlight, b.String(), w.Runner, w.Number, anyOf(messages))
		return err
	})
	return wrap("record the messages in flight of runner "+w.Runner, err)
}
