package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/projector"
)

// Whoever replays or skips a parked message has its row locked; whoever relies on one being in the way (to park behind it, or to say
// of what waits that it is not due) locks that one too, shared. So either he comes first, and what waits is there to become
// due; or he waits, and looks again. Locks are taken in order of ids where that can be: a cycle is left to the server.
const (
	// In a case, so that no other index than that of ids will do.
	lockParkedSQL = `
select id from kinora.parked
where id = any($1::bigint[]) and case when projector = $2::text and state = 'parked' then true else false end
order by id for no key update`

	// The floor is read by a statement whose snapshot is newer than the marker: a pruning that took an earlier one away was waited for.
	checkReplaySQL = `
with recursive ` + laneCTE + `
select exists (select from lane l where ` + inTheWay + `),
	exists (
		select from kinora.parked p, kinora.floors f
		where p.id = $5::bigint and f.handler = any($3::text[]) and f.pruned_before >= p.parked_at)`

	behindSQL = `
with recursive ` + laneCTE + `,
found as materialized (select l.id from lane l where ` + inTheWay + ` order by l.id limit 1),
locked as materialized (
	select p.id from kinora.parked p where p.id = (select id from found) and p.state = 'parked' for share)
select exists (select from found), exists (select from locked)`

	resolveSQL = `
update kinora.parked p set state = 'replayed', due = false, resolved_at = clock_timestamp(), resolved_by = r.by, reason = r.reason
from unnest($1::bigint[], $2::text[], $3::text[]) r(id, by, reason)
where p.id = r.id and case when p.state = 'parked' then true else false end`

	// Of each lane of these, what waits first behind the first of them, of each handler: what comes later waits for that one. A lane
	// is walked once, however many of it are resolved.
	dueSQL = `
with r as materialized (
	select p.projector, p.key_hash, min(p.id) as id
	from unnest($1::bigint[]) u(id), lateral (select * from kinora.parked where id = u.id limit 1) p
	where p.key_hash <> '' group by p.projector, p.key_hash)
update kinora.parked set due = true
where state = 'parked' and class = 'held' and not due and id = any(array(
	select f.id from r, lateral (
		with recursive h as (
			(select p.handler from ` + waiting + ` order by p.handler limit 1)
			union all
			select n.handler from h, lateral (select p.handler from ` + waiting + ` and p.handler > h.handler order by p.handler limit 1) n)
		select p.id from h, lateral (
			select p.id from ` + waiting + ` and p.handler = h.handler and p.id > r.id order by p.id limit 1) p) f
	order by f.id))`

	waiting = `kinora.parked p
		where p.state = 'parked' and p.class = 'held' and p.key_hash <> '' and p.projector = r.projector and p.key_hash = r.key_hash`

	forgetSQL = `delete from kinora.attempts where handler = $1::text and message_hash = $2::bytea`
)

// errAgain: what was found in the way was replayed or skipped before it was locked.
var errAgain = errors.New("what was in the way is gone: look again")

// refused is why a unit cannot be.
func refused(code string, err error) error {
	return &projector.Error{Class: projector.PermanentClass, Code: code, Err: err}
}

// behind tells what behindSQL found.
func behind(row pgx.Row) error {
	var found, locked bool
	switch err := row.Scan(&found, &locked); {
	case err != nil:
		return err
	case !found:
		return refused("not_held", projector.ErrNotHeld)
	case !locked:
		return errAgain
	}
	return nil
}

// replays are the checks of what a unit replays.
type replays struct {
	of           []projector.Replay
	live         []int64
	held, pruned []bool
}

func (r *replays) seqs() []int64 {
	var seqs []int64
	for _, one := range r.of {
		seqs = append(seqs, one.Seq)
	}
	return seqs
}

// lock queues the statement that locks what is still parked.
func (r *replays) lock(db *DB, b *pgx.Batch, name string) {
	b.Queue(db.q(lockParkedSQL), r.seqs(), name).Query(func(rows pgx.Rows) (err error) {
		r.live, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return err
	})
}

// check queues the statements that look for what is against it.
func (r *replays) check(db *DB, b *pgx.Batch) {
	r.held, r.pruned = make([]bool, len(r.of)), make([]bool, len(r.of))
	for i, one := range r.of {
		b.Queue(db.q(checkReplaySQL), attemptArgs(one.Attempt, r.seqs()[:i])...).QueryRow(func(row pgx.Row) error {
			return row.Scan(&r.held[i], &r.pruned[i])
		})
	}
}

func (r *replays) err() error {
	for i, one := range r.of {
		switch {
		case !slices.Contains(r.live, one.Seq):
			return refused("not_parked", &projector.ReplayError{Seq: one.Seq, Err: projector.ErrNotParked})
		case r.held[i]:
			return refused("held", &projector.ReplayError{Seq: one.Seq, Err: projector.ErrHeld})
		case r.pruned[i] && !one.Force:
			return refused("pruned", &projector.ReplayError{Seq: one.Seq, Err: projector.ErrPruned})
		}
	}
	return nil
}

// resolve ends the parking of what the unit replays.
func (db *DB) resolve(ctx context.Context, tx pgx.Tx, of []projector.Replay) error {
	var seqs []int64
	var by, reasons []string
	for _, r := range of {
		if !r.Stays {
			seqs, by, reasons = append(seqs, r.Seq), append(by, storable(r.By)), append(reasons, storable(r.Reason))
		}
	}
	if len(seqs) == 0 {
		return nil
	}
	b := &pgx.Batch{}
	b.Queue(lookUpSQL)
	b.Queue(db.q(resolveSQL), seqs, by, reasons)
	b.Queue(db.q(dueSQL), seqs)
	b.Queue(resetSQL)
	crash.Point("resolve: before")
	err := tx.SendBatch(ctx, b).Close()
	crash.Point("resolve: after")
	if err != nil {
		return fmt.Errorf("resolve parked messages: %w", err)
	}
	return nil
}

const skipParkedSQL = `
with picked as materialized (
	select p.id from kinora.parked p where p.state = 'parked' and ` + parkedFilter + `
	order by p.id limit $8::bigint for no key update)
update kinora.parked p set state = 'skipped', due = false, resolved_at = clock_timestamp(), resolved_by = $9::text, reason = $10::text
where p.id = any(array(select id from picked))
returning p.id`

const skipTries = 5

// SkipParked implements projector.ParkedInspector. Where it is in a cycle of locks with a replay, it begins again.
func (db *DB) SkipParked(ctx context.Context, f projector.ParkedFilter, d projector.Decision) (n int, err error) {
	if err := d.Validate(); err != nil {
		return 0, err
	}
	if f.State != projector.StillParked {
		return 0, nil
	}
	for try := 1; ; try++ {
		n, err = db.skipParked(ctx, f, d)
		if e := pgError(err); e == nil || e.Code != deadlockDetected || try == skipTries {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("skip parked messages: %w", clear(err))
	}
	return n, nil
}

func (db *DB) skipParked(ctx context.Context, f projector.ParkedFilter, d projector.Decision) (n int, err error) {
	err = db.inTx(ctx, func(tx pgx.Tx) error {
		args := append([]any{planned}, parkedArgs(f, noLimit)...)
		rows, err := tx.Query(ctx, db.q(skipParkedSQL), append(args, storable(d.By), storable(d.Reason))...)
		if err != nil {
			return err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil || len(ids) == 0 {
			return err
		}
		n = len(ids)
		_, err = tx.Exec(ctx, db.q(dueSQL), planned, ids)
		return err
	})
	return n, err
}
