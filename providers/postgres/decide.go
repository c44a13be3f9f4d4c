package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	pickSQL = `
select p.id, p.projector, p.lane from kinora.parked p
where p.state in ('waiting', 'stuck') and ` + parkedFilter + ` order by p.id limit $10::bigint`

	// Units lock lanes in this order as well.
	lockPickedSQL = `
select 1 from (
	select distinct projector collate "C" as projector, lane from unnest($1::text[], $2::bytea[]) l(projector, lane) order by 1, 2) l, lateral (
	select from kinora.holds where holds.projector = l.projector and holds.lane = l.lane limit 1 for update) h`

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
	if to != provider.StateWaiting && to != provider.StateSkipped {
		return 0, fmt.Errorf("decide about parked messages: %w: cannot make them %s", provider.ErrInput, to)
	}
	if d != (provider.Decision{}) {
		if err := d.Validate(); err != nil {
			return 0, fmt.Errorf("decide about parked messages: %w", err)
		}
	}
	for try := 1; ; try++ {
		n, err = db.decide(ctx, f, to, d)
		if e := pgError(err); e == nil || e.Code != deadlockDetected || try == decideTries {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("decide about parked messages: %w", clear(err))
	}
	return n, nil
}

// picked is a parked message that was decided about.
type picked struct {
	Seq       int64
	Projector string
	Lane      []byte
}

func (db *DB) decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (n int, err error) {
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		of, seqs, err := lanesOf(ctx, tx, db.q(pickSQL), parkedArgs(f, noLimit)...)
		if err != nil || len(seqs) == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, db.q(lockPickedSQL), planned, of.projectors, of.lanes); err != nil {
			return err
		}
		of, seqs, err = lanesOf(ctx, tx, db.q(decideSQL), planned, seqs, to.String(), storable(d.By), storable(d.Reason))
		if n = len(seqs); err != nil || n == 0 {
			return err
		}
		_, err = tx.Exec(ctx, db.q(releaseSQL), planned, of.projectors, of.lanes, of.changed, []int64{}, []int64{})
		return err
	})
	return n, err
}

// lanesOf runs a statement that returns parked messages, and returns their lanes as well.
func lanesOf(ctx context.Context, tx pgx.Tx, sql string, args ...any) (of laneList, seqs []int64, err error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return of, nil, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[picked])
	for _, p := range all {
		seqs = append(seqs, p.Seq)
		of.add(p.Projector, provider.Lane(p.Lane), p.Seq)
	}
	return of, seqs, err
}
