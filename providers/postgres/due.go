package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/projector"
)

// Of a type, it says that it is no less and no more: were it the same, the planner could walk all that is parked by id.
const dueParkedSQL = `
select ` + parkedColumns + ` from kinora.parked p
where p.id = any(array(
	select id from (
		(select p.id from kinora.parked p where p.due and p.projector = $1::text and p.id > $3::bigint order by p.id limit $4::int)
		union all
		select f.id from (select distinct type from unnest($2::text[]) t(type)) t, lateral (
			select p.id from kinora.parked p
			where p.state = 'parked' and p.code = 'unregistered' and not p.due and p.projector = $1::text
				and left(p.type, 256) <= left(t.type, 256) and p.type = t.type and (left(p.type, 256), p.id) > (left(t.type, 256), $3::bigint)
			order by left(p.type, 256), p.id limit $4::int) f) d
	order by id limit $4::int))
order by p.id`

// DueParked implements projector.Journal.
func (db *DB) DueParked(ctx context.Context, name string, types []string, after int64, limit int) ([]projector.Parked, error) {
	rows, err := db.pool.Query(ctx, db.q(dueParkedSQL), planned, name, append([]string{}, types...), after, max(limit, 0))
	if err == nil {
		var list []projector.Parked
		if list, err = pgx.CollectRows(rows, scanParked); err == nil {
			return list, nil
		}
	}
	return nil, class(fmt.Errorf("list what is due: %w", err))
}

const (
	failParkedSQL = `
update kinora.parked set class = $2::text, code = $3::text, attempts = $4::int, version = $5::text, due = false
where id = $1::bigint and state = 'parked'`

	notDueSQL = `update kinora.parked set due = false where id = $1::bigint and due`
)

// FailParked implements projector.Journal.
func (db *DB) FailParked(ctx context.Context, runner string, p projector.Parked, a projector.Attempt) (err error) {
	crash.Point("fail parked: before")
	if p.Class == projector.HeldClass {
		a.Seq = p.Seq
		err = db.notDue(ctx, a)
	} else {
		b := &pgx.Batch{}
		b.Queue(lookUpSQL)
		db.queueCounted(b, projector.Work{Forget: []projector.Attempt{a}, Done: []projector.Attempt{a}, Runner: runner})
		b.Queue(db.q(failParkedSQL), p.Seq, p.Class.String(), storable(p.Code), p.Attempts, storable(p.Version))
		err = db.pool.SendBatch(ctx, b).Close()
	}
	crash.Point("fail parked: after")
	if err != nil {
		return class(fmt.Errorf("say that a replay failed: %w", err))
	}
	return nil
}

// notDue says so only while something that nobody can resolve meanwhile is in the way.
func (db *DB) notDue(ctx context.Context, a projector.Attempt) error {
	return db.inTx(ctx, func(tx pgx.Tx) error {
		for {
			switch err := behind(tx.QueryRow(ctx, db.q(behindSQL), append([]any{planned}, attemptArgs(a, nil)...)...)); {
			case err == nil:
				_, err = tx.Exec(ctx, db.q(notDueSQL), planned, a.Seq)
				return err
			case errors.Is(err, projector.ErrNotHeld):
				return nil // what held it is gone, and it is due as it was
			case !errors.Is(err, errAgain):
				return err
			}
		}
	})
}
