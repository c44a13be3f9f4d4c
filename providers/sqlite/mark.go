package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/outbox"
)

// markEntry changes ?1, which the claim of token ?2 has taken.
const (
	markEntry = markAny + fenced + itsLane
	dropEntry = dropAny + fenced + itsLane

	markAny = `
update kinora_outbox set
	status = ?3,
	open = ?3 <> 'published',
	attempts = attempts - (?3 = 'pending'),
	next_attempt_at = iif(?3 in ('failed', 'claimed', 'pending'), ` + clock + ` + ?4, next_attempt_at),
	last_error = iif(?3 in ('failed', 'abandoned') or ?3 = 'pending' and ?5 <> '', ?5, last_error),
	published_at = iif(?3 = 'published', ` + clock + `, null)
where id = ?1 and status = 'claimed'`

	dropAny = `
delete from kinora_outbox where id = ?1 and status = 'claimed'`

	fenced  = ` and token = ?2`
	itsLane = ` returning topic, key`

	markUnfenced = markAny + ` and ?2 is not null` + itsLane
	dropUnfenced = dropAny + ` and ?2 is not null` + itsLane
)

// MarkEntries implements outbox.Store.
func (d *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := outbox.CheckMarks(marks); err != nil {
		return nil, err
	}
	if len(marks) == 0 {
		return nil, nil
	}
	err = d.inTurn(ctx, func(u *unit) error {
		done := map[lane]bool{}
		for _, m := range marks {
			l, ok, err := u.change(ctx, m)
			switch {
			case err != nil:
				return err
			case !ok:
				late = append(late, m.Seq)
			case m.To == outbox.Published:
				done[l] = true
			}
		}
		return u.bringBack(ctx, done)
	})
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", err)
	}
	return late, nil
}

func (s session) change(ctx context.Context, m outbox.Mark) (l lane, ok bool, err error) {
	query, drop := markEntry, dropEntry
	if mutant.NoFence {
		query, drop = markUnfenced, dropUnfenced
	}
	args := []any{m.Seq, tokenOf(m.Token), string(m.To), millis(m.After), m.Error}
	if m.Drop {
		query, args = drop, args[:2]
	}
	err = one(ctx, s, []any{&l.topic, &l.key}, query, args...)
	if errors.Is(err, sql.ErrNoRows) {
		return l, false, nil
	}
	return l, err == nil, err
}
