package sqlite

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

const (
	readLive = `select generation from kinora_generations where projector = ?1 and state = 'live'`

	// A blob is greater than any text, so the range includes all projectors if ?1 is empty.
	listGenerations = `
select projector, generation, revision, state, data, created_at, changed_at from kinora_generations
where projector between ?1 and iif(?1 = '', x'', ?1) order by projector, generation`
)

// numbered returns b, with the live generation of its projector if its number is zero.
func numbered(ctx context.Context, q querier, b provider.Build) (provider.Build, error) {
	if b.Generation != 0 {
		return b, nil
	}
	b.Generation = 1
	_, err := find(ctx, q, []any{&b.Generation}, readLive, b.Projector)
	return b, err
}

func generationsOf(ctx context.Context, q querier, projector string) ([]provider.Generation, error) {
	return rowsOf(ctx, q, func(g *provider.Generation) []any {
		return []any{&g.Projector, &g.Generation, &g.Revision, &g.State, (*[]byte)(&g.Data), scanTime(&g.CreatedAt), scanTime(&g.ChangedAt)}
	}, listGenerations, projector)
}

// Generations implements provider.Builds.
func (d *Provider) Generations(ctx context.Context, projector string) (all []provider.Generation, err error) {
	if err = provider.CheckStorable("projector", projector); err == nil {
		all, err = generationsOf(ctx, d.reads, projector)
	}
	return result(all, "list generations", err)
}

// SetGeneration implements provider.Builds.
func (d *Provider) SetGeneration(ctx context.Context, all ...provider.Generation) (bool, error) {
	return update(ctx, d, "set a generation", provider.CheckGeneration(all...), func(u *unit) (set bool, err error) {
		stored, err := generationsOf(ctx, u, all[0].Projector)
		if set = err == nil && provider.CanSet(stored, all...); set {
			err = u.setGenerations(ctx, stored, all...)
		}
		return set, err
	})
}

const (
	// freeGenerations makes room in the unique indexes: the generations ?2 may change places.
	freeGenerations = `
update kinora_generations set state = 'standby' where projector = ?1 and generation in (select value from json_each(?2))`

	setGeneration = `
insert into kinora_generations (projector, generation, revision, state, data, created_at, changed_at)
values (?1, ?2, ?3, ?4, ?5, ` + clock + `, ` + clock + `)
on conflict (projector, generation) do update set revision = excluded.revision, state = excluded.state, data = excluded.data,
	changed_at = iif(?6, excluded.changed_at, changed_at)`

	standBy = `update kinora_checkpoints set mode = 'catch-up', token = null where ` + ofBuild

	standSegmentsBy = `update kinora_segments set token = null where ` + ofBuild

	retire = `
insert into kinora_checkpoints (projector, generation, position, event_id, lineage, mode, handlers)
values (?1, ?2, 0, '', '', 'ended', 'null')
on conflict (projector, generation) do update set mode = excluded.mode`
)

// setGenerations stores set. stored was read in this transaction, and provider.CanSet was true.
func (u *unit) setGenerations(ctx context.Context, stored []provider.Generation, set ...provider.Generation) error {
	states := map[int]provider.GenerationState{}
	for _, g := range stored {
		states[g.Generation] = g.State
	}
	if len(set) > 1 {
		numbers := mapSlice(set, func(g provider.Generation) int { return g.Generation })
		if _, err := u.exec(ctx, freeGenerations, set[0].Projector, jsonOf(numbers)); err != nil {
			return err
		}
	}
	for _, g := range set {
		if len(g.Data) == 0 {
			g.Data = json.RawMessage(`{}`)
		}
		isNew := states[g.Generation] != g.State
		_, err := u.exec(ctx, setGeneration, g.Projector, g.Generation, g.Revision+1, string(g.State), string(g.Data), isNew)
		switch {
		case err == nil && isNew && g.State == provider.GenerationStandby:
			err = u.execAll(ctx, []string{standBy, standSegmentsBy}, g.Projector, g.Generation)
		case err == nil && isNew && g.State == provider.GenerationRetired:
			_, err = u.exec(ctx, retire, g.Projector, g.Generation)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

const (
	clearMarkers = `
delete from kinora_markers where (handler, generation, message_id) in (
	select handler, generation, message_id from kinora_markers
	where handler in (select value from json_each(?1)) and generation = ?2 limit ?3)`

	clearParked = `
delete from kinora_parked where id in (
	select id from kinora_parked indexed by kinora_parked_lane where open = 1 and ` + ofBuild + `
	union all
	select id from kinora_parked indexed by kinora_parked_resolved where open = 0 and ` + ofBuild + `
	limit ?3)`
)

const unlogged = `
select message_id from kinora_markers where handler = ?1 and generation = ?2 and message_id > ?3 and position is null
order by message_id limit ?4`

// Unlogged implements provider.Builds.
func (d *Provider) Unlogged(ctx context.Context, b provider.Build, handler, after string, limit int) (ids []string, err error) {
	if err = provider.CheckPrune(b.Projector, []string{handler}); err == nil {
		ids, err = column[string](ctx, d.reads, unlogged, handler, b.Number(), after, limit)
	}
	return result(ids, "look up markers", err)
}

// ClearGeneration implements provider.Builds.
func (d *Provider) ClearGeneration(ctx context.Context, b provider.Build, handlers []string, tables []provider.TablePair, limit int) (int, error) {
	invalid := provider.CheckClear(b.Projector, handlers, tables)
	return update(ctx, d, "clear a generation", invalid, func(u *unit) (int, error) {
		n, err := u.clear(ctx, b, handlers, max(limit, 1))
		if err == nil && n == 0 {
			err = u.drop(ctx, tables)
		}
		return n, err
	})
}

func (u *unit) clear(ctx context.Context, b provider.Build, handlers []string, limit int) (int, error) {
	stored, err := generationsOf(ctx, u, b.Projector)
	if err != nil {
		return 0, err
	}
	isRetired := func(g provider.Generation) bool {
		return g.Generation == b.Number() && g.State == provider.GenerationRetired
	}
	if !slices.ContainsFunc(stored, isRetired) {
		return 0, fmt.Errorf("%w: generation %s is not retired: retire it first", provider.ErrInput, b)
	}
	markers, err := u.changed(ctx, clearMarkers, jsonOf(handlers), b.Number(), limit)
	if err != nil || markers == limit {
		return markers, err
	}
	parked, err := u.changed(ctx, clearParked, b.Projector, b.Number(), limit-markers)
	return markers + parked, err
}

// drop drops tables that exist, and the views that show them.
func (u *unit) drop(ctx context.Context, pairs []provider.TablePair) error {
	var tables []tableName
	for _, p := range pairs {
		t := tableOf(p.Table)
		is, err := u.isTable(ctx, t)
		if is {
			tables = append(tables, t)
		}
		if err == nil && p.Other != "" {
			err = u.dropView(ctx, p)
		}
		if err != nil {
			return err
		}
	}
	if len(tables) == 0 {
		return nil
	}
	return u.empty(ctx, `drop table `, tables)
}

// viewText selects the statement that has created a view, as SQLite keeps it.
func viewText(schema string) string {
	return `select sql from ` + nameSQL(schema) + `.sqlite_schema where type = 'view' and name = ?1 collate nocase`
}

// dropView drops the view of a table, if it shows that table.
func (u *unit) dropView(ctx context.Context, p provider.TablePair) error {
	view := tableOf(p.Other)
	texts, err := column[string](ctx, u, viewText(view.schema), view.name)
	if err != nil || len(texts) == 0 || !strings.HasSuffix(texts[0], asSelect(p.Table)) {
		return err
	}
	_, err = u.tx.ExecContext(ctx, `drop view `+view.sql())
	return err
}
