package sqlite

import (
	"context"
	"database/sql"
	"fmt"
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
