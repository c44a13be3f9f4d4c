package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"

	"github.com/kinora-go/kinora/provider"
)

const (
	pickParked   = `select id, projector, lane from kinora_parked where open = 1 and` + selected + ` order by id limit ?10`
	pickParkedOf = `
select id, projector, lane from kinora_parked indexed by kinora_parked_open
where open = 1 and projector = ?11 and` + selected + ` order by id limit ?10`

	// ?2 decides on the messages ?1, because of ?3. If both are empty, the last decision is kept.
	replayParked = `update kinora_parked set state = 'waiting', attempts = 0` + decidedBy
	skipParked   = `update kinora_parked set open = 0, state = 'skipped', resolved_at = ` + clock + decidedBy

	decidedBy = `,
	resolved_by = iif(?2 || ?3 = '', resolved_by, ?2), reason = iif(?2 || ?3 = '', reason, ?3)
where id in (select value from json_each(?1))`
)

// Decide implements provider.Parking. It waits, as all writers do, for a unit that has the messages.
func (d *DB) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, by provider.Decision) (n int, err error) {
	query := map[provider.ParkedState]string{provider.StateWaiting: replayParked, provider.StateSkipped: skipParked}[to]
	if query == "" {
		return 0, fmt.Errorf("decide on parked messages: %w: to %s", provider.ErrInput, to)
	}
	if by != (provider.Decision{}) {
		if err := by.Validate(); err != nil {
			return 0, fmt.Errorf("decide on parked messages: %w", err)
		}
	}
	limit, states := f.Limit, f.States
	if limit <= 0 {
		limit = -1
	}
	if states == nil {
		states = unresolvedStates
	}
	args, none := filterOf(f, states, limit)
	if none {
		return 0, nil
	}
	err = d.inTurn(ctx, func(u *unit) error {
		n, err = u.decide(ctx, query, by, f.Projector, args)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("decide on parked messages: %w", err)
	}
	return n, nil
}

func (u *unit) decide(ctx context.Context, query string, by provider.Decision, projector string, args []any) (int, error) {
	var ids []int64
	lanes := map[string]map[string]int64{} // by projector and lane, the first message
	pick := pickParked
	if projector != "" {
		pick = pickParkedOf
	}
	err := each(ctx, u, func(rows *sql.Rows) error {
		var id int64
		var projector string
		var lane []byte
		if err := rows.Scan(&id, &projector, &lane); err != nil {
			return err
		}
		ids = append(ids, id)
		if lanes[projector] == nil {
			lanes[projector] = map[string]int64{}
		}
		if l := hex.EncodeToString(lane); lanes[projector][l] == 0 {
			lanes[projector][l] = id
		}
		return nil
	}, pick, args...)
	if err == nil {
		_, err = u.exec(ctx, query, arrayOf(ids), by.By, by.Reason)
	}
	for projector, of := range lanes {
		if err == nil {
			err = u.settle(ctx, projector, of, nil)
		}
	}
	return len(ids), err
}
