package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

const (
	// It leaps from handler to handler by the key; null is the end.
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

// MarkedHandlers implements marker.Keeper.
func (d *DB) MarkedHandlers(ctx context.Context) (names []string, err error) {
	err = each(ctx, d.reads, func(rows *sql.Rows) error {
		var name string
		err := rows.Scan(&name)
		names = append(names, name)
		return err
	}, markedHandlers)
	if err != nil {
		return nil, fmt.Errorf("list handlers with markers: %w", err)
	}
	return names, nil
}

// DropMarkers implements marker.Keeper.
func (d *DB) DropMarkers(ctx context.Context, handler string, limit int) (n int, err error) {
	err = d.inTurn(ctx, func(u *unit) error {
		n, err = u.changed(ctx, dropMarkers, handler, limit)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("drop markers: %w", err)
	}
	return n, nil
}

// pruneMarkers deletes at most ?3 of handler ?1 that are older than ?2 ms; raiseFloor never lowers a floor.
const (
	lookToPrune  = `select exists (select 1 from kinora_markers indexed by kinora_markers_age where ` + aged + `)`
	pruneMarkers = `
delete from kinora_markers where (handler, generation, message_id) in (
	select handler, generation, message_id from kinora_markers indexed by kinora_markers_age
	where ` + aged + ` order by processed_at limit ?3)
returning processed_at`

	aged = `handler = ?1 and processed_at < ` + clock + ` - ?2`

	raiseFloor = `
insert into kinora_floors (handler, pruned_before) values (?1, ?2)
on conflict (handler) do update set pruned_before = max(pruned_before, ?2)`
)

// PruneMarkers implements marker.Keeper. It begins to write only where there is something to delete.
func (d *DB) PruneMarkers(ctx context.Context, handler string, window time.Duration, limit int) (n int, err error) {
	var old bool
	err = one(ctx, d.reads, []any{&old}, lookToPrune, handler, millis(window))
	if err == nil && old && limit > 0 {
		err = d.inTurn(ctx, func(u *unit) error {
			n, err = u.pruneMarkers(ctx, handler, window, limit)
			return err
		})
	}
	if err != nil {
		return 0, fmt.Errorf("prune markers: %w", err)
	}
	return n, nil
}

func (u *unit) pruneMarkers(ctx context.Context, handler string, window time.Duration, limit int) (n int, err error) {
	var floor int64
	err = each(ctx, u, func(rows *sql.Rows) error {
		var at int64
		err := rows.Scan(&at)
		floor = max(floor, at)
		n++
		return err
	}, pruneMarkers, handler, millis(window), limit)
	if err == nil && n > 0 {
		_, err = u.exec(ctx, raiseFloor, handler, floor)
	}
	return n, err
}

const floorOf = `select max(pruned_before) from kinora_floors where handler = ?1`

// Floor implements marker.Keeper.
func (d *DB) Floor(ctx context.Context, handler string) (time.Time, error) {
	var at sql.NullInt64
	if err := one(ctx, d.reads, []any{&at}, floorOf, handler); err != nil {
		return time.Time{}, fmt.Errorf("floor of %s: %w", handler, err)
	}
	return timeOrZero(at), nil
}
