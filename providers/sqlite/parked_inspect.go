package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"

	"github.com/kinora-go/kinora/projector"
)

// pickedParked is the condition of a ParkedFilter: ?1 to ?8. ?9 is its limit (-1 for none).
const (
	pickedParked = ` state = ?1 and id > ?2 and id <= ?3
	and (?4 = '' or handler = ?4)
	and (?5 = '' or key = ?5)
	and (?6 is null or class = ?6)
	and (?7 = '' or code = ?7)
	and (?8 is null or id in (select value from json_each(?8)))`

	listParked   = `select ` + parkedColumns + ` from kinora_parked where` + pickedParked + ` order by id limit ?9`
	listParkedOf = `
select ` + parkedColumns + ` from kinora_parked where` + pickedParked + ` and projector = ?10 order by id limit ?9`
	listLiveOf = `
select ` + parkedColumns + ` from kinora_parked indexed by kinora_parked_live
where` + pickedParked + ` and projector = ?10 and state = 'parked' order by id limit ?9`
)

func parkedArgs(f projector.ParkedFilter, state projector.ParkedState, limit int) []any {
	after, upto := f.After, int64(math.MaxInt64)
	if len(f.Seqs) > 0 {
		after, upto = max(after, slices.Min(f.Seqs)-1), slices.Max(f.Seqs)
	}
	var class any
	if f.Class != nil {
		class = f.Class.String()
	}
	return []any{state.String(), after, upto, f.Handler, f.Key, class, f.Code, anyOf(f.Seqs), limit}
}

// ParkedMessages implements projector.ParkedInspector.
func (d *DB) ParkedMessages(ctx context.Context, f projector.ParkedFilter) ([]projector.Parked, error) {
	limit := f.Limit
	if limit <= 0 {
		limit = defaultPage
	}
	query, args := listParked, parkedArgs(f, f.State, limit)
	if f.Projector != "" {
		query, args = listParkedOf, append(args, f.Projector)
		if f.State == projector.StillParked {
			query = listLiveOf
		}
	}
	parked, err := parkedOf(ctx, d.reads, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	return parked, nil
}

const countParked = `
select count(*) from kinora_parked indexed by kinora_parked_live where state = 'parked' and (?1 = '' or projector = ?1)`

// ParkedCount implements projector.ParkedInspector.
func (d *DB) ParkedCount(ctx context.Context, name string) (n int64, err error) {
	if err = one(ctx, d.reads, []any{&n}, countParked, name); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	return n, nil
}

const skipParked = `
update kinora_parked set state = 'skipped', due = 0, resolved_at = ` + clock + `, resolved_by = ?11, reason = ?12
where id in (
	select id from kinora_parked where` + pickedParked + ` and (?10 = '' or projector = ?10)
	order by id limit ?9)
returning id, projector, key`

// SkipParked implements projector.ParkedInspector.
func (d *DB) SkipParked(ctx context.Context, f projector.ParkedFilter, by projector.Decision) (int, error) {
	if err := by.Validate(); err != nil {
		return 0, fmt.Errorf("skip parked messages: %w", err)
	}
	if f.State != projector.StillParked {
		return 0, nil
	}
	limit := f.Limit
	if limit <= 0 {
		limit = -1
	}
	var skipped []parkedLane
	err := d.inTurn(ctx, func(u *unit) error {
		err := each(ctx, u, func(rows *sql.Rows) error {
			var l parkedLane
			err := rows.Scan(&l.id, &l.projector, &l.key)
			skipped = append(skipped, l)
			return err
		}, skipParked, append(parkedArgs(f, projector.StillParked, limit), f.Projector, by.By, by.Reason)...)
		if err != nil {
			return err
		}
		return u.goOn(ctx, skipped)
	})
	if err != nil {
		return 0, fmt.Errorf("skip parked messages: %w", err)
	}
	return len(skipped), nil
}
