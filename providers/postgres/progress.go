package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	(excluded.position, excluded.event_id, excluded.recorded_at, excluded.lineage, excluded.mode, excluded.token,
		case when $15::bool then c.handlers else excluded.handlers end, excluded.splits)
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

	// Pruning reads the first markers in the order of an index. Without these settings, if the statistics are from an empty
	// table, the planner sorts all markers. With them the plans have high costs, for which the server would compile them.
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

// ordered is inOrder on the pool. doing and invalid are those of read.
func (db *Provider) ordered(ctx context.Context, doing string, invalid error, value any, sql string, args ...any) error {
	if invalid != nil {
		return wrap(doing, invalid)
	}
	return classifyOwn(ctx, wrap(doing, db.inOrder(ctx, db.pool, value, sql, args...)))
}

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

// queueCheckpoint queues a statement that reads the checkpoint, if there is one, into c.
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
	err = row.Scan(&c.Generation, &c.Place.Position, &c.Place.ID, scanTime(&c.Place.RecordedAt), &c.Lineage, &mode, &token,
		&handlers, &splits, &list)
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
	was.Number = number
	err = db.fenced(ctx, of.Projector, false, func(b *pgx.Batch) {
		queueRows(b, []any{&was.Place.Position, &was.Place.ID, scanTime(&was.Place.RecordedAt)}, func() { ok = true },
			db.q(takeSegmentSQL), of.Projector, of.Generation, number, uuid.UUID(token))
	})
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

// SetCheckpoint implements provider.Progress. A new mode takes the fence exclusively, so it waits for the units that have it,
// for at most a second at a time, because units that open meanwhile wait too.
func (db *Provider) SetCheckpoint(ctx context.Context, of provider.Build, from, to provider.Checkpoint) (set bool, err error) {
	invalid := provider.CheckSetCheckpoint(of.Projector, to)
	for _, h := range to.Handlers {
		invalid = cmp.Or(invalid, provider.CheckStorable("checkpoint.handlers", h.Handler, h.Type))
	}
	if invalid != nil {
		return false, wrap("set the checkpoint", invalid)
	}
	exclusive := from.Mode != to.Mode || from.Split() != to.Split()
	err = db.fenced(ctx, of.Projector, exclusive, func(b *pgx.Batch) {
		b.Queue(db.q(setCheckpointSQL), of.Projector, of.Generation,
			to.Place.Position, to.Place.ID, recordedAt(to.Place), to.Lineage, to.Mode.String(), uuid.UUID(to.Token), jsonList(to.Handlers),
			from.Place.Position, from.Mode.String(), uuid.UUID(from.Token), jsonList(to.Splits), jsonList(from.Splits), provider.KeepsHandlers(from, to),
		).Exec(func(tag pgconn.CommandTag) error {
			set = tag.RowsAffected() == 1
			return nil
		})
		if len(from.Splits) > 0 && from.Oldest() != to.Oldest() {
			b.Queue(db.q(dropSegmentsSQL), of.Projector, of.Generation, to.Oldest())
		}
	})
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
		crash.Point("set checkpoint: before")
		err := db.pool.SendBatch(ctx, b).Close() // after an error, the pool closes the connection
		crash.Point("set checkpoint: after")
		if e := pgError(err); e == nil || e.Code != lockNotAvailable || pause(ctx, try) != nil {
			return err
		}
	}
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
	crash.Point("prune applied: before")
	err = db.ordered(ctx, "prune applied", provider.CheckPrune(of.Projector, handlers),
		&n, pruneAppliedSQL, of.Projector, of.Generation, handlers, max(limit, 0))
	crash.Point("prune applied: after")
	return n, err
}

const (
	generationsSQL = `
select projector, generation, revision, state, data, created_at, changed_at from kinora.generations
where $1::text = '' or projector = $1::text order by projector, generation`

	lockGenerationsSQL = generationsSQL + ` for no key update`

	// If another transaction changes the row at the same time, the revision differs after the wait,
	// and nothing is changed. Otherwise was has the former state.
	setGenerationSQL = `
with ck as materialized (select clock_timestamp() t),
was as materialized (
	select state from kinora.generations where projector = $1::text and generation = $2::int),
put as (
	insert into kinora.generations as g (projector, generation, revision, state, data, created_at, changed_at)
	select $1::text, $2::int, 1, $4::text, $5::jsonb, t, t from ck where $3::bigint = 0 or exists (select from was)
	on conflict on constraint generations_pkey do update set
		revision = g.revision + 1, state = excluded.state, data = excluded.data,
		changed_at = case when g.state = excluded.state then g.changed_at else excluded.changed_at end
	where g.revision = $3::bigint and (g.state <> 'retired' or excluded.state = 'retired')
	returning g.state is distinct from (select state from was) as isnew),
standby as (
	update kinora.checkpoints set mode = 'catch-up', token = '00000000-0000-0000-0000-000000000000'
	where projector = $1::text and generation = $2::int and $4::text = 'standby' and (select isnew from put)),
segments as (
	update kinora.segments set token = '00000000-0000-0000-0000-000000000000'
	where projector = $1::text and generation = $2::int and $4::text = 'standby' and (select isnew from put)),
retired as (
	insert into kinora.checkpoints (projector, generation, position, event_id, lineage, mode, token, handlers)
	select $1::text, $2::int, 0, '', '', 'ended', '00000000-0000-0000-0000-000000000000', '[]'
	from put where isnew and $4::text = 'retired'
	on conflict on constraint checkpoints_pkey do update set mode = 'ended')
select exists (select from put)`

	retiredSQL = `
select true from kinora.generations where projector = $1::text and generation = $2::int and state = 'retired' for share`

	// The views that show their tables, and nothing else.
	viewsSQL = `
select p.view from unnest($1::text[], $2::text[]) p(tbl, view)
where (select relkind from pg_class where oid = to_regclass(p.view)) = 'v'
	and (select array_agg(distinct d.refobjid) from pg_rewrite w
		join pg_depend d on d.classid = 'pg_rewrite'::regclass and d.objid = w.oid and d.refclassid = 'pg_class'::regclass
		where w.ev_class = to_regclass(p.view) and d.refobjid <> w.ev_class) = array[to_regclass(p.tbl)::oid]`

	unloggedSQL = `
select array(
	select message_id from kinora.markers where handler = $1::text and generation = $2::int and message_id > $3::text and position is null
	order by handler, generation, message_id limit $4::bigint)`

	// The hold of a lane is deleted with the first of its messages.
	clearGenerationSQL = `
with m as (
	delete from kinora.markers where ctid = any(array(
		select m.at from unnest($3::text[]) h(name), lateral (
			select ctid as at from kinora.markers where handler = h.name and generation = $2::int
			order by handler, generation, message_id limit $4::bigint) m
		limit $4::bigint))
	returning 1),
p as (
	delete from kinora.parked where id = any(array(
		select id from (
			(select id from kinora.parked where projector = $1::text and generation = $2::int and state in ('waiting', 'stuck') and id > 0
			order by projector, generation, id limit $4::bigint)
			union all
			(select id from kinora.parked where projector = $1::text and generation = $2::int and state in ('replayed', 'skipped')
			order by projector, generation, resolved_at limit $4::bigint)) p
		limit $4::bigint - (select count(*) from m)))
	returning lane),
h as (
	delete from kinora.holds where ctid = any(array(
		select h.at from (select distinct lane from p) p, lateral (
			select ctid as at from kinora.holds
			where projector = $1::text and generation = $2::int and holds.lane = p.lane limit 1) h)))
select (select count(*) from m) + (select count(*) from p)`
)

// Generations implements provider.Builds.
func (db *Provider) Generations(ctx context.Context, projector string) ([]provider.Generation, error) {
	all, err := read(ctx, db, "list generations", provider.CheckStorable("projector", projector),
		into(generationColumns), generationsSQL, planned, projector)
	return all, classifyOwn(ctx, err)
}

func generationColumns(g *provider.Generation) []any {
	return []any{&g.Projector, &g.Generation, &g.Revision, &g.State, (*[]byte)(&g.Data), scanTime(&g.CreatedAt), scanTime(&g.ChangedAt)}
}

// SetGeneration implements provider.Builds. To change the mode of a checkpoint it waits for units as SetCheckpoint does.
func (db *Provider) SetGeneration(ctx context.Context, all ...provider.Generation) (set bool, err error) {
	if err := provider.CheckGeneration(all...); err != nil {
		return false, wrap("set the generation", err)
	}
	if g := all[0]; len(all) == 1 {
		exclusive := g.State == provider.GenerationStandby || g.State == provider.GenerationRetired
		var is []bool
		err = db.fenced(ctx, g.Projector, exclusive, func(b *pgx.Batch) { is = db.queueGenerations(b, all) })
		set = err == nil && is[0]
	} else {
		err = db.setTogether(ctx, all)
		set = err == nil
	}
	if isSecond(err) || errors.Is(err, provider.ErrFenced) {
		return false, nil
	}
	return set, classifyOwn(ctx, wrap("set the generation", err))
}

// setTogether stores several generations while no unit of the projector is open, or returns ErrFenced.
func (db *Provider) setTogether(ctx context.Context, all []provider.Generation) error {
	for try := 1; ; try++ {
		err := db.inTx(ctx, func(tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(`set local lock_timeout = '1s'`)
			b.Queue(exclusiveSQL, lockClassFence, db.fence(all[0].Projector))
			set := db.queueGenerations(b, all)
			err := tx.SendBatch(ctx, b).Close()
			if err == nil && slices.Contains(set, false) {
				err = errFenced
			}
			return err
		})
		if e := pgError(err); e == nil || e.Code != lockNotAvailable || pause(ctx, try) != nil {
			return err
		}
	}
}

// queueGenerations queues statements that store generations: first those that are no longer live or building. The result
// says of each whether it was stored, after the batch.
func (db *Provider) queueGenerations(b *pgx.Batch, all []provider.Generation) (set []bool) {
	order := []provider.GenerationState{provider.GenerationRetired, provider.GenerationStandby, provider.GenerationLive, provider.GenerationBuilding, provider.GenerationRequested}
	rank := func(g provider.Generation) int { return slices.Index(order, g.State) }
	set = make([]bool, len(all))
	for i, g := range slices.SortedStableFunc(slices.Values(all), func(a, b provider.Generation) int { return cmp.Compare(rank(a), rank(b)) }) {
		queueRow(b, []any{&set[i]}, db.q(setGenerationSQL), g.Projector, g.Generation, g.Revision, string(g.State), cmp.Or(string(g.Data), "{}"))
	}
	return set
}

// isSecond reports whether a generation would be the second one that is live, or that is requested or being built.
func isSecond(err error) bool {
	return violates(err, "generations_live_key") || violates(err, "generations_built_key")
}

// Unlogged implements provider.Builds.
func (db *Provider) Unlogged(ctx context.Context, of provider.Build, handler, after string, limit int) (ids []string, err error) {
	err = db.ordered(ctx, "look up markers", provider.CheckPrune(of.Projector, []string{handler}), &ids, unloggedSQL, handler, of.Number(), markerID(after), max(limit, 0))
	return ids, err
}

// ClearGeneration implements provider.Builds. The role must own the tables. To drop them it waits for
// at most a second for transactions that use them: then the error is ClassTransient with CodeBusy.
func (db *Provider) ClearGeneration(
	ctx context.Context, of provider.Build, handlers []string, tables []provider.TablePair, limit int,
) (n int, err error) {
	err = provider.CheckClear(of.Projector, handlers, tables)
	if err == nil && limit < 1 {
		err = fmt.Errorf("%w: limit is %d: it must be at least 1", provider.ErrInput, limit)
	}
	if err != nil {
		return 0, wrap("clear the generation", err)
	}
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		retired, err := collect(ctx, tx, pgx.RowTo[bool], db.q(retiredSQL), planned, of.Projector, of.Number())
		if err == nil && len(retired) == 0 {
			return fmt.Errorf("%w: generation %d of %s is not retired: retire it first", provider.ErrInput, of.Number(), of.Projector)
		}
		if err != nil {
			return err
		}
		err = db.inOrder(ctx, tx, &n, clearGenerationSQL, of.Projector, of.Number(), handlers, limit)
		if err == nil && n == 0 && len(tables) > 0 {
			err = db.drop(ctx, tx, tables)
		}
		return err
	})
	if err != nil {
		return 0, wrap("clear the generation", referenced(busy(explain(err))))
	}
	return n, nil
}

// drop drops tables that exist, and the views that show them.
func (db *Provider) drop(ctx context.Context, tx pgx.Tx, pairs []provider.TablePair) error {
	tables := mapSlice(pairs, func(p *provider.TablePair) string { return quoted(p.Table) })
	shown := slices.DeleteFunc(slices.Clone(pairs), func(p provider.TablePair) bool { return p.Other == "" })
	views, err := collect(ctx, tx, pgx.RowTo[string], viewsSQL, planned,
		mapSlice(shown, func(p *provider.TablePair) string { return quoted(p.Table) }),
		mapSlice(shown, func(p *provider.TablePair) string { return quoted(p.Other) }))
	if err != nil {
		return err
	}
	b := &pgx.Batch{}
	b.Queue(`set local lock_timeout = '1s'`)
	if len(views) > 0 {
		b.Queue(`drop view ` + strings.Join(views, ", "))
	}
	b.Queue(`drop table if exists ` + strings.Join(tables, ", "))
	return tx.SendBatch(ctx, b).Close()
}
