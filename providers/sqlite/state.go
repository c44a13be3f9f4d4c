package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
)

// outcome looks for ?2 at any of the handlers ?1. A message that was parked before it got to a handler is parked
// for every handler of its projector.
const outcome = `
select
	exists (select 1 from kinora_markers
		where handler in (select value from json_each(?1)) and generation = ` + live + ` and message_id = ?2),
	exists (select 1 from kinora_parked
		where message_id = ?2 and message_id <> ''
			and (handler in (select value from json_each(?1)) or handler = '' and projector = ?3))`

// Outcomes implements projector.State.
func (d *DB) Outcomes(ctx context.Context, keys []marker.Key) ([]projector.Outcome, error) {
	outcomes := make([]projector.Outcome, len(keys))
	for i, k := range keys {
		owner, _, _ := strings.Cut(k.Handler, "/")
		names := jsonOf(append([]string{k.Handler}, k.Was...))
		var applied, parked bool
		if err := one(ctx, d.reads, []any{&applied, &parked}, outcome, names, k.MessageID, owner); err != nil {
			return nil, fmt.Errorf("look for %s: %w", k.Handler, err)
		}
		switch {
		case applied:
			outcomes[i] = projector.Applied
		case parked:
			outcomes[i] = projector.IsParked
		}
	}
	return outcomes, nil
}

const listParked = `
select id, projector, handler, message_id, topic, key, payload, headers, class, code, attempts, parked_at
from kinora_parked where id > ?1 and (?2 = '' or projector = ?2) order by id limit ?3`

// ParkedMessages implements projector.ParkedInspector.
func (d *DB) ParkedMessages(ctx context.Context, name string, after int64, limit int) ([]projector.Parked, error) {
	if limit <= 0 {
		limit = defaultPage
	}
	var parked []projector.Parked
	err := each(ctx, d.reads, func(rows *sql.Rows) error {
		p, err := scanParked(rows)
		parked = append(parked, p)
		return err
	}, listParked, after, name, limit)
	if err != nil {
		return nil, fmt.Errorf("list parked messages: %w", err)
	}
	return parked, nil
}

const countParked = `select count(*) from kinora_parked where ?1 = '' or projector = ?1`

// ParkedCount implements projector.ParkedInspector.
func (d *DB) ParkedCount(ctx context.Context, name string) (n int64, err error) {
	err = each(ctx, d.reads, func(rows *sql.Rows) error { return rows.Scan(&n) }, countParked, name)
	if err != nil {
		return 0, fmt.Errorf("count parked messages: %w", err)
	}
	return n, nil
}

func scanParked(rows *sql.Rows) (p projector.Parked, err error) {
	var headers []byte
	var class string
	var at int64
	err = rows.Scan(&p.Seq, &p.Projector, &p.Handler, &p.MessageID, &p.Topic, &p.Key, &p.Payload, &headers,
		&class, &p.Code, &p.Attempts, &at)
	if err != nil {
		return p, err
	}
	p.Class, p.At = projector.ParseClass(class), timeOf(at)
	if err := json.Unmarshal(headers, &p.Headers); err != nil {
		return p, fmt.Errorf("headers of parked message %d: %w", p.Seq, err)
	}
	return p, nil
}
