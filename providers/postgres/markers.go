package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// It leaps from handler to handler by the key; null is the end.
	markedHandlersSQL = `
with recursive h as (
	select min(handler) as name from kinora.markers
	union all
	select (select min(handler) from kinora.markers where handler > h.name) from h where h.name is not null)
select name from h where name is not null`

	dropMarkersSQL = `
delete from kinora.markers where ctid = any(array(
	select ctid from kinora.markers where handler = $1::text order by handler, processed_at limit $2::int))`

	// A floor is raised in the statement that deletes, so that nobody sees a marker gone and the floor as it was.
	pruneMarkersSQL = `
with ck as materialized (select clock_timestamp() - $2::bigint * interval '1 microsecond' as t),
gone as (
	delete from kinora.markers where ctid = any(array(
		select ctid from kinora.markers where handler = $1::text and processed_at < (select t from ck)
		order by handler, processed_at limit $3::int))
	returning processed_at),
raised as (
	insert into kinora.floors as f (handler, pruned_before)
	select $1::text, max(processed_at) from gone having count(*) > 0
	on conflict on constraint floors_pkey do update set pruned_before = greatest(f.pruned_before, excluded.pruned_before))
select count(*) from gone`

	floorSQL = `select pruned_before from kinora.floors where handler = $1::text`
)

// MarkedHandlers implements marker.Keeper.
func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	rows, err := db.pool.Query(ctx, db.q(markedHandlersSQL), planned)
	if err == nil {
		var names []string
		if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return names, nil
		}
	}
	return nil, fmt.Errorf("list handlers with markers: %w", clear(err))
}

// PruneMarkers implements marker.Keeper.
func (db *DB) PruneMarkers(ctx context.Context, handler string, window time.Duration, limit int) (n int, err error) {
	if err := db.pool.QueryRow(ctx, db.q(pruneMarkersSQL), planned, handler, window.Microseconds(), max(limit, 0)).Scan(&n); err != nil {
		return 0, fmt.Errorf("prune markers: %w", clear(err))
	}
	return n, nil
}

// Floor implements marker.Keeper.
func (db *DB) Floor(ctx context.Context, handler string) (floor time.Time, err error) {
	err = db.pool.QueryRow(ctx, db.q(floorSQL), handler).Scan(&floor)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return time.Time{}, fmt.Errorf("read the floor of markers: %w", clear(err))
	}
	if !floor.IsZero() {
		floor = floor.UTC()
	}
	return floor, nil
}

// DropMarkers implements marker.Keeper.
func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	tag, err := db.pool.Exec(ctx, db.q(dropMarkersSQL), planned, handler, limit)
	if err != nil {
		return 0, fmt.Errorf("drop markers: %w", clear(err))
	}
	return int(tag.RowsAffected()), nil
}
