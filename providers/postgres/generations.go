package postgres

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

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

	unloggedSQL = `
select exists (
	select from unnest($2::text[]) h(name), lateral (
		select from kinora.markers where handler = h.name and generation = $1::int and position is null
		order by handler, generation, message_id limit 1) m)`

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
	all, err := read(ctx, db, "list generations", provider.CheckStorable("projector", projector), into(generationColumns), generationsSQL, planned, projector)
	return all, classifyOwn(ctx, err)
}

func generationColumns(g *provider.Generation) []any {
	return []any{&g.Projector, &g.Generation, &g.Revision, &g.State, (*[]byte)(&g.Data), scanTime(&g.CreatedAt), scanTime(&g.ChangedAt)}
}

// SetGeneration implements provider.Builds. If it changes the mode of a checkpoint, it waits for open
// units as SetCheckpoint does.
func (db *Provider) SetGeneration(ctx context.Context, g provider.Generation) (set bool, err error) {
	if err := provider.CheckGeneration(g); err != nil {
		return false, wrap("set the generation", err)
	}
	crash.Point("set checkpoint: before")
	exclusive := g.State == provider.GenerationStandby || g.State == provider.GenerationRetired
	err = db.fenced(ctx, g.Projector, exclusive, func(b *pgx.Batch) { db.queueGeneration(b, g, &set) })
	crash.Point("set checkpoint: after")
	if isSecond(err) {
		return false, nil
	}
	return set && err == nil, classifyOwn(ctx, wrap("set the generation", err))
}

func (db *Provider) queueGeneration(b *pgx.Batch, g provider.Generation, set *bool) {
	queueRow(b, []any{set}, db.q(setGenerationSQL), g.Projector, g.Generation, g.Revision, string(g.State), cmp.Or(string(g.Data), "{}"))
}

// isSecond reports whether a generation would be the second one of its projector that is live, or
// that is requested or being built.
func isSecond(err error) bool {
	return violates(err, "generations_live_key") || violates(err, "generations_built_key")
}

// Unlogged implements provider.Builds. It reads the markers of the generation until it finds one.
func (db *Provider) Unlogged(ctx context.Context, of provider.Build, handlers []string) (unlogged bool, err error) {
	if err := provider.CheckPrune(of.Projector, handlers); err != nil {
		return false, wrap("look up markers", err)
	}
	err = db.inOrder(ctx, db.pool, &unlogged, unloggedSQL, of.Number(), handlers)
	return unlogged, classifyOwn(ctx, wrap("look up markers", err))
}

// ClearGeneration implements provider.Builds. The role must own the tables. To drop them it waits for
// at most a second for transactions that use them: then the error is ClassTransient with CodeBusy.
func (db *Provider) ClearGeneration(ctx context.Context, of provider.Build, handlers, tables []string, limit int) (n int, err error) {
	err = cmp.Or(provider.CheckPrune(of.Projector, handlers), provider.CheckTables(tables...))
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
			b := &pgx.Batch{}
			b.Queue(`set local lock_timeout = '1s'`)
			b.Queue(`drop table if exists ` + quoted(tables...))
			err = tx.SendBatch(ctx, b).Close()
		}
		return err
	})
	if err != nil {
		return 0, wrap("clear the generation", referenced(busy(explain(err))))
	}
	return n, nil
}
