package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kinora-go/kinora/providers/postgres"
)

// standby starts a streaming replica of the read models' server, and opens the totals in it.
func (d *demo) standby(ctx context.Context) (replica *postgres.DB, end func() error, err error) {
	s, err := startServer(ctx, d.read)
	if err != nil {
		return nil, nil, err
	}
	if replica, err = s.open(ctx, "totals", nil); err != nil {
		return nil, nil, errors.Join(err, s.stop())
	}
	return replica, func() error { replica.Close(); return s.stop() }, nil
}

// awaitStandby waits until a standby shows what its primary shows now. It is for data that is not
// the effect of an event: for that, Projector.Wait asks the standby itself.
func awaitStandby(ctx context.Context, primary, standby *pgxpool.Pool) error {
	var position string
	if err := primary.QueryRow(ctx, `select pg_current_wal_flush_lsn()::text`).Scan(&position); err != nil {
		return err
	}
	for {
		var shown bool
		// Null if the server is no standby any more.
		err := standby.QueryRow(ctx, `select coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)`, position).Scan(&shown)
		if err != nil || shown {
			return err
		}
		if !pause(ctx) {
			return ctx.Err()
		}
	}
}
