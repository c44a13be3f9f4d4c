package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/kinora-go/kinora/outbox"
)

// defaultPage is how much a listing shows, unless told otherwise.
const defaultPage = 100

// filtered is the condition of a Filter: ?1 to ?5, and ?6 its limit (-1 for none).
const filtered = ` id > ?1
	and (?2 is null or status in (select value from json_each(?2)))
	and (?3 = '' or topic = ?3)
	and (?4 = '' or key = ?4)
	and (?5 is null or id in (select value from json_each(?5)))`

func filterArgs(f outbox.Filter, limit int) []any {
	return []any{f.After, listOf(f.Status), f.Topic, f.Key, listOf(f.Seqs), limit}
}

const (
	listEntries     = `select ` + entryColumns + ` from kinora_outbox where` + filtered + ` order by id limit ?6`
	listOpenEntries = `select ` + entryColumns + ` from kinora_outbox where open = 1 and` + filtered + ` order by id limit ?6`
)

// Entries implements outbox.Inspector.
func (d *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	limit := f.Limit
	if limit <= 0 {
		limit = defaultPage
	}
	query := listEntries
	if f.OnlyOpen() {
		query = listOpenEntries
	}
	entries, err := entriesOf(ctx, d.reads, query, filterArgs(f, limit)...)
	if err != nil {
		return nil, fmt.Errorf("list entries: %w", err)
	}
	return entries, nil
}

const (
	countEntries = `select status, count(*) from kinora_outbox
		where ?1 is null or status in (select value from json_each(?1)) group by status`
	countOpenEntries = `select status, count(*) from kinora_outbox
		where open = 1 and status in (select value from json_each(?1)) group by status`
)

// StatusCounts implements outbox.Inspector.
func (d *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	counts, query := outbox.ZeroCounts(of), countEntries
	if (outbox.Filter{Status: of}).OnlyOpen() {
		query = countOpenEntries
	}
	err := each(ctx, d.reads, func(rows *sql.Rows) error {
		var s outbox.Status
		var n int64
		err := rows.Scan(&s, &n)
		counts[s] = n
		return err
	}, query, listOf(of))
	if err != nil {
		return nil, fmt.Errorf("count entries: %w", err)
	}
	return counts, nil
}

const requeueEntries = `
update kinora_outbox set status = 'pending', attempts = 0, suspect = 0, next_attempt_at = ` + clock + `
where id in (select id from kinora_outbox
	where` + filtered + ` and status in ('abandoned', 'failed') order by id limit ?6)`

// Requeue implements outbox.Inspector.
func (d *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	n, err := d.decide(ctx, requeueEntries, f)
	if err != nil {
		return 0, fmt.Errorf("requeue: %w", err)
	}
	return n, nil
}

const skipEntries = `
update kinora_outbox set status = 'skipped', open = 0
where id in (select id from kinora_outbox
	where` + filtered + ` and status in ('pending', 'failed', 'abandoned') order by id limit ?6)`

// Skip implements outbox.Inspector.
func (d *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	n, err := d.decide(ctx, skipEntries, f)
	if err != nil {
		return 0, fmt.Errorf("skip: %w", err)
	}
	return n, nil
}

func (d *DB) decide(ctx context.Context, query string, f outbox.Filter) (n int, err error) {
	limit := f.Limit
	if limit <= 0 {
		limit = -1
	}
	err = d.inTurn(ctx, func(u *unit) error {
		r, err := u.exec(ctx, query, filterArgs(f, limit)...)
		if err != nil {
			return err
		}
		changed, err := r.RowsAffected()
		n = int(changed)
		u.entries = n > 0 // either way there may be something to claim now
		return err
	})
	return n, err
}
