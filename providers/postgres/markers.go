package postgres

import (
	"context"
	"fmt"

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
delete from kinora.markers where (handler, generation, message_id) in (
	select handler, generation, message_id from kinora.markers where handler = $1::text limit $2::int)`
)

// MarkedHandlers implements marker.Keeper.
func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	rows, err := db.pool.Query(ctx, db.q(markedHandlersSQL))
	if err == nil {
		var names []string
		if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return names, nil
		}
	}
	return nil, fmt.Errorf("list handlers with markers: %w", clear(err))
}

// DropMarkers implements marker.Keeper. Its role is the owner's: the others have no right to delete markers.
func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	tag, err := db.pool.Exec(ctx, db.q(dropMarkersSQL), handler, limit)
	if err != nil {
		return 0, fmt.Errorf("drop markers: %w", clear(err))
	}
	return int(tag.RowsAffected()), nil
}
