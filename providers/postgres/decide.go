package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	// It locks the lanes as well, in the order in which units do.
	pickSQL = `
select p.id from (
	select * from (
		select p.id, p.projector, p.lane from kinora.parked p
		where p.state in ('waiting', 'stuck') and ` + parkedFilter + ` order by p.id limit $10::bigint) p
	order by projector, lane) p left join lateral (
	select from kinora.holds where holds.projector = p.projector and holds.lane = p.lane limit 1 for update) h on true`

	decideSQL = `
update kinora.parked set state = $2::text, attempts = case when $2::text = 'waiting' then 0 else attempts end,
	resolved_at = case when $2::text = 'skipped' then clock_timestamp() end,
	resolved_by = case when $3::text = '' then resolved_by else $3::text end, reason = case when $3::text = '' then reason else $4::text end
where id = any($1::bigint[]) and state in ('waiting', 'stuck')
returning id, projector, lane`
)

const decideTries = 5

// Decide implements provider.Parking. It waits for units that have the lanes of these messages. After a deadlock it begins again.
func (db *DB) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	if err := provider.CheckDecision(to, d); err != nil {
		return 0, fmt.Errorf("decide about parked messages: %w", err)
	}
	for range decideTries {
		n, err = db.decide(ctx, f, to, d)
		if e := pgError(err); e == nil || e.Code != deadlockDetected {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("decide about parked messages: %w", clear(err))
	}
	return n, nil
}

func (db *DB) decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		seqs, err := collect(ctx, tx, pgx.RowTo[int64], db.q(pickSQL), parkedArgs(f, noLimit)...)
		if err != nil {
			return err
		}
		var seq int64
		var projector string
		var lane []byte
		changed := provider.Changed{}
		rows, _ := tx.Query(ctx, db.q(decideSQL), planned, seqs, to.String(), storable(d.By), storable(d.Reason)) // they have its error
		if _, err = pgx.ForEachRow(rows, []any{&seq, &projector, &lane}, func() error {
			n++
			changed.Add(projector, laneOf(lane), seq)
			return nil
		}); err != nil || n == 0 {
			return err
		}
		projectors, lanes, first := lists(changed)
		_, err = tx.Exec(ctx, db.q(releaseSQL), planned, projectors, lanes, first, "[]")
		return err
	})
	return n, err
}
