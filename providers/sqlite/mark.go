package sqlite

import (
	"context"
	"database/sql"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// markEntry changes entry ?1, which the claim with token ?2 holds.
const (
	markEntry = `
update kinora_outbox set
	status = ?3,
	open = ?3 <> 'published',
	attempts = max(attempts, 1) - (?3 = 'pending'),
	next_attempt_at = iif(?3 in ('failed', 'claimed', 'pending'), ` + clock + ` + ?4, next_attempt_at),
	last_error = iif(?3 in ('failed', 'abandoned') or ?3 = 'pending' and ?5 <> '', ?5, last_error),
	published_at = iif(?3 = 'published', ` + clock + `, null)
where id = ?1 and status = 'claimed' and token = ?2`

	dropEntry = `
delete from kinora_outbox where id = ?1 and status = 'claimed' and token = ?2`

	// lanesOf returns no row if no entry is held.
	lanesOf = `
select id, topic, key from kinora_outbox
where (` + anyHeld + `) and id in (select value from json_each(?1))`
)

// MarkEntries implements provider.Outbox.
func (d *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := provider.CheckMarks(marks); err != nil {
		return nil, err
	}
	if len(marks) == 0 {
		return nil, nil
	}
	err = d.writeTx(ctx, func(u *unit) error {
		lanes, err := u.lanesToRelease(ctx, marks)
		if err != nil {
			return err
		}
		done := map[lane]bool{}
		for _, m := range marks {
			ok, err := u.change(ctx, m)
			if err != nil {
				return err
			}
			if !ok {
				late = append(late, m.Seq)
			} else if l, ok := lanes[m.Seq]; ok {
				done[l] = true
			}
		}
		return u.releaseHeld(ctx, done)
	})
	return result(late, "mark entries", err)
}

// lanesToRelease returns the lanes of the entries to be published, by Seq, if any entry is held.
func (s session) lanesToRelease(ctx context.Context, marks []outbox.Mark) (map[int64]lane, error) {
	var seqs []int64
	for _, m := range marks {
		if m.To == outbox.Published {
			seqs = append(seqs, m.Seq)
		}
	}
	if len(seqs) == 0 {
		return nil, nil
	}
	lanes := map[int64]lane{}
	err := eachRow(ctx, s, func(rows *sql.Rows) error {
		var seq int64
		var l lane
		err := rows.Scan(&seq, &l.topic, &l.key)
		lanes[seq] = l
		return err
	}, lanesOf, jsonOf(seqs))
	return lanes, err
}

func (s session) change(ctx context.Context, m outbox.Mark) (ok bool, err error) {
	query, args := markEntry, []any{m.Seq, tokenOf(m.Token), string(m.To), millis(m.After), m.Error}
	if m.Drop {
		query, args = dropEntry, args[:2]
	}
	n, err := s.changed(ctx, query, args...)
	return n == 1, err
}
