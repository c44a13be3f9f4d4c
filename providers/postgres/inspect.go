package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
)

// What a filter picks; $1 to $5 are its arguments everywhere.
const filtered = `
	($1::text[] is null or o.status = any($1::text[])) and ($2::text = '' or o.topic = $2::text)
	and ($3::text = '' or o.key = $3::text) and ($4::bigint[] is null or o.id = any($4::bigint[])) and o.id > $5::bigint`

const (
	entriesSQL = `select ` + entryColumns + ` from kinora.outbox o where` + filtered + ` order by o.id limit $6::bigint`

	openEntriesSQL = `select ` + entryColumns + ` from kinora.outbox o where o.open and` + filtered + ` order by o.id limit $6::bigint`

	countsSQL = `select status, count(*) from kinora.outbox where $1::text[] is null or status = any($1::text[]) group by status`

	openCountsSQL = `select status, count(*) from kinora.outbox where open and status = any($1::text[]) group by status`

	requeueSQL = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id from kinora.outbox o where o.open and o.status in ('failed', 'abandoned') and` + filtered + `
	order by o.id limit $6::bigint for update)
update kinora.outbox o set status = 'pending', attempts = 0, suspect = false, next_attempt_at = ck.t
from picked, ck where o.id = picked.id`

	skipSQL = `
with picked as materialized (
	select o.id from kinora.outbox o where o.open and o.status in ('pending', 'failed', 'abandoned') and` + filtered + `
	order by o.id limit $6::bigint for update)
update kinora.outbox o set status = 'skipped', open = false from picked where o.id = picked.id`
)

// texts is nil where there is none.
func texts(statuses []outbox.Status) []string {
	var all []string
	for _, s := range statuses {
		all = append(all, string(s))
	}
	return all
}

func filterArgs(f outbox.Filter, limit int64) []any {
	seqs := f.Seqs
	if len(seqs) == 0 {
		seqs = nil
	}
	if f.Limit > 0 {
		limit = int64(f.Limit)
	}
	return []any{texts(f.Status), f.Topic, f.Key, seqs, f.After, limit}
}

const noLimit = 1 << 62

// Entries implements outbox.Inspector.
func (db *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	query := entriesSQL
	if f.OnlyOpen() {
		query = openEntriesSQL
	}
	rows, err := db.pool.Query(ctx, db.q(query), filterArgs(f, 100)...)
	if err == nil {
		var entries []outbox.Entry
		if entries, err = pgx.CollectRows(rows, scanEntry); err == nil {
			return entries, nil
		}
	}
	return nil, fmt.Errorf("list entries: %w", clear(err))
}

// StatusCounts implements outbox.Inspector.
func (db *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	counts, query := outbox.ZeroCounts(of), countsSQL
	if (outbox.Filter{Status: of}).OnlyOpen() {
		query = openCountsSQL
	}
	rows, err := db.pool.Query(ctx, db.q(query), texts(of))
	if err != nil {
		return nil, fmt.Errorf("count entries: %w", clear(err))
	}
	var status outbox.Status
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&status, &n}, func() error { counts[status] = n; return nil })
	if err != nil {
		return nil, fmt.Errorf("count entries: %w", clear(err))
	}
	return counts, nil
}

// Requeue implements outbox.Inspector.
func (db *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	n, err := db.change(ctx, requeueSQL, f)
	if err != nil {
		return 0, fmt.Errorf("requeue entries: %w", err)
	}
	if n > 0 {
		db.wake.signal()
	}
	return n, nil
}

// Skip implements outbox.Inspector.
func (db *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	n, err := db.change(ctx, skipSQL, f)
	if err != nil {
		return 0, fmt.Errorf("skip entries: %w", err)
	}
	if n > 0 {
		db.wake.signal()
	}
	return n, nil
}

func (db *DB) change(ctx context.Context, statement string, f outbox.Filter) (int, error) {
	tag, err := db.pool.Exec(ctx, db.q(statement), filterArgs(f, noLimit)...)
	if err != nil {
		return 0, clear(err)
	}
	return int(tag.RowsAffected()), nil
}
