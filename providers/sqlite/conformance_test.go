package sqlite_test

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/providers/providertest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	providertest.All(t, providertest.TierOperations, func(t testing.TB, o providertest.Options) providertest.Fixture[*sql.Tx] {
		path := migrated(t)
		return fixture(t, path, o)
	})
}

// insertForeign writes entries as other software could.
func insertForeign(db *sqlite.DB, entries []providertest.Foreign) error {
	const infinity = 1 << 62 // in milliseconds, outside every calendar
	instants := map[providertest.Instant]any{
		providertest.NoTime: nil, providertest.Now: time.Now().UnixMilli(), providertest.BeforeAllTime: -infinity,
		providertest.AfterAllTime: infinity, providertest.TooEarly: -190000000000000, providertest.TooLate: 569000000000000,
	}
	tx, err := db.SQL().Begin()
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, f := range entries {
		_, err := tx.Exec(`
insert into kinora_outbox (message_id, topic, key, payload, headers, status, open, next_attempt_at, created_at, last_attempt_at, published_at)
values (?1, ?2, ?3, x'78', ?4, ?5, ?5 <> 'published', ?6, ?7, ?8, ?9)`,
			f.ID, f.Topic, f.Key, f.Headers, string(f.Status), instants[f.Due], instants[f.Created], instants[f.Attempted], instants[f.Published])
		if err != nil {
			return err
		}
	}
	return tx.Commit()
}

func fixture(t testing.TB, path string, o providertest.Options) providertest.Fixture[*sql.Tx] {
	db := openAt(t, path, &sqlite.Config{Route: o.Route, MaxPayload: o.MaxPayload, RequeueWindow: o.RequeueWindow})
	if o.Conns > 0 {
		db.SQL().SetMaxOpenConns(o.Conns)
	}
	add := func(ctx context.Context, tx *sql.Tx, key string, n int) error {
		_, err := tx.ExecContext(ctx, addToTotal, key, n)
		return err
	}
	owned := func(ctx context.Context, fn func(tx *sql.Tx) error) error {
		tx, err := db.SQL().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := fn(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	return providertest.Fixture[*sql.Tx]{
		Provider: db,
		Owned:    owned,
		InTx: func(ctx context.Context, fn func(view providertest.TxView, add providertest.Add) error) error {
			return owned(ctx, func(tx *sql.Tx) error {
				return fn(db.InTx(tx), func(ctx context.Context, key string, n int) error { return add(ctx, tx, key, n) })
			})
		},
		Transact: func(ctx context.Context, fn func(view providertest.TxView, add providertest.Add) error) error {
			return db.Transact(ctx, func(_ context.Context, tx *sql.Tx) error {
				return fn(db.InTx(tx), func(ctx context.Context, key string, n int) error { return add(ctx, tx, key, n) })
			})
		},
		Advance: func(d time.Duration) { require.NoError(t, shiftBack(db.SQL(), d)) },
		Add:     add,
		Break: func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into totals values ('broken', null)`)
			return err
		},
		End: func(ctx context.Context, tx *sql.Tx) {
			_, _ = tx.ExecContext(ctx, `commit`)
			_, _ = tx.ExecContext(ctx, `rollback`)
			_ = tx.Commit()
			_ = tx.Rollback()
		},
		Tables: tables(db),
		Insert: func(entries ...providertest.Foreign) error { return insertForeign(db, entries) },
		Total:  func(key string) int { return total(t, db.SQL(), key) },
		Reopen: func() providertest.Fixture[*sql.Tx] { return fixture(t, path, o) },
	}
}

func tables(db *sqlite.DB) *providertest.Tables[*sql.Tx] {
	write := func(ctx context.Context, tx *sql.Tx, query, table string, args ...any) error {
		_, err := tx.ExecContext(ctx, strings.ReplaceAll(query, "?table", strconv.Quote(table)), args...)
		return err
	}
	return &providertest.Tables[*sql.Tx]{
		Create: func(ctx context.Context, tx *sql.Tx, table string) error {
			return write(ctx, tx, `create table ?table (key text primary key, n integer not null, note text not null) strict`, table)
		},
		Put: func(ctx context.Context, tx *sql.Tx, table string, row providertest.Row) error {
			return write(ctx, tx, `insert or replace into ?table values (?, ?, ?)`, table, row.Key, row.N, row.Note)
		},
		Delete: func(ctx context.Context, tx *sql.Tx, table, key string) error {
			return write(ctx, tx, `delete from ?table where key = ?`, table, key)
		},
		Rows: func(ctx context.Context, table string) (all []providertest.Row, err error) {
			rows, err := db.SQL().QueryContext(ctx, `select key, n, note from `+strconv.Quote(table)+` order by key`)
			if err != nil && strings.Contains(err.Error(), "no such table") {
				return nil, nil
			}
			if err != nil {
				return nil, err
			}
			defer rows.Close()
			for rows.Next() {
				var r providertest.Row
				if err := rows.Scan(&r.Key, &r.N, &r.Note); err != nil {
					return nil, err
				}
				all = append(all, r)
			}
			return all, rows.Err()
		},
	}
}
