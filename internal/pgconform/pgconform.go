// Package pgconform has the fixtures of the conformance suites for PostgreSQL. The suites run directly and through a
// pooler, in two test packages.
package pgconform

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/providertest"
)

// Totals creates the table that the handlers of the suites change.
const Totals = `create table totals (key text primary key, n bigint not null)`

// AddSQL adds to a row of the table.
const AddSQL = `insert into totals as t (key, n) values ($1, $2) on conflict (key) do update set n = t.n + excluded.n`

// Add adds to a row of the table.
func Add(ctx context.Context, tx pgx.Tx, key string, n int) error {
	_, err := tx.Exec(ctx, AddSQL, key, n)
	return err
}

// Fixture returns the fixture of db for transactions.
func Fixture(t testing.TB, db *postgres.DB, o providertest.Options) providertest.Fixture[pgx.Tx] {
	return providertest.Fixture[pgx.Tx]{
		Provider: db,
		InTx:     inTx(db),
		Transact: func(ctx context.Context, fn func(providertest.TxView, providertest.Add) error) error {
			return db.Transact(ctx, func(_ context.Context, tx pgx.Tx) error { return fn(view(db, tx)) })
		},
		Owned: func(ctx context.Context, fn func(tx pgx.Tx) error) error {
			return pgx.BeginFunc(ctx, db.Pool(), fn)
		},
		Advance: Advance(t, db),
		Add:     Add,
		Break: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select 1 / 0")
			return err
		},
		End: func(ctx context.Context, tx pgx.Tx) {
			_ = tx.Commit(ctx)
			_ = tx.Rollback(ctx)
			_, _ = tx.Exec(ctx, "rollback")
			_, _ = tx.Conn().Exec(ctx, "rollback") // cannot be refused
		},
		Insert: insert(db),
		Tables: tables(db, func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, sql)
			return err
		}),
		Total: Total(t, db),
		Reopen: func() providertest.Fixture[pgx.Tx] {
			return Fixture(t, reopen(t, db, o), o)
		},
	}
}

func reopen(t testing.TB, db *postgres.DB, o providertest.Options) *postgres.DB {
	again, err := postgres.Open(context.Background(), db.Pool().Config().ConnString(), Config(o))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Close)
	return again
}

func inTx(db *postgres.DB) func(context.Context, func(providertest.TxView, providertest.Add) error) error {
	return func(ctx context.Context, fn func(providertest.TxView, providertest.Add) error) error {
		return pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error { return fn(view(db, tx)) })
	}
}

// tables returns functions that write by run. The statements are in blocks, because a batch is parsed
// before it is executed: another statement of it may create the table.
func tables[Tx any](db *postgres.DB, run func(ctx context.Context, tx Tx, sql string) error) *providertest.Tables[Tx] {
	text := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	write := func(ctx context.Context, tx Tx, table, sql string) error {
		return run(ctx, tx, "do $do$ begin "+strings.ReplaceAll(sql, "?table", pgx.Identifier{table}.Sanitize())+"; end $do$")
	}
	return &providertest.Tables[Tx]{
		Create: func(ctx context.Context, tx Tx, table string) error {
			return write(ctx, tx, table, `create table ?table (key text primary key, n int not null, note text not null)`)
		},
		Put: func(ctx context.Context, tx Tx, table string, row providertest.Row) error {
			return write(ctx, tx, table, fmt.Sprintf(`insert into ?table values (%s, %d, %s)
				on conflict (key) do update set n = excluded.n, note = excluded.note`, text(row.Key), row.N, text(row.Note)))
		},
		Delete: func(ctx context.Context, tx Tx, table, key string) error {
			return write(ctx, tx, table, `delete from ?table where key = `+text(key))
		},
		Rows: func(ctx context.Context, table string) ([]providertest.Row, error) {
			rows, _ := db.Pool().Query(ctx, `select key, n, note from `+pgx.Identifier{table}.Sanitize()+` order by key collate "C"`)
			all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[providertest.Row])
			if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "42P01" {
				return nil, nil
			}
			return all, err
		},
	}
}

func view(db *postgres.DB, tx pgx.Tx) (providertest.TxView, providertest.Add) {
	return db.InTx(tx), func(ctx context.Context, key string, n int) error { return Add(ctx, tx, key, n) }
}

// Total returns a function that reads a row of the table.
func Total(t testing.TB, db *postgres.DB) func(string) int {
	return func(key string) int {
		var n int
		err := db.Pool().QueryRow(context.Background(), `select n from totals where key = $1`, key).Scan(&n)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
		return n
	}
}

var instants = map[providertest.Instant]any{
	providertest.NoTime: nil, providertest.Now: "now", providertest.BeforeAllTime: "-infinity", providertest.AfterAllTime: "infinity",
	providertest.TooEarly: "4000-01-01 BC", providertest.TooLate: "20000-01-01",
}

const insertForeign = `
insert into kinora.outbox (message_id, topic, key, payload, headers, status, open, held, stuck, next_attempt_at, created_at, last_attempt_at, published_at)
select $1, $2, $3, 'x', $4::text::jsonb, s, s in ('pending', 'claimed'), s = 'abandoned', s = 'abandoned',
	$6::text::timestamptz, $7::text::timestamptz, $8::text::timestamptz, $9::text::timestamptz from (values ($5::text)) v (s)`

func insert(db *postgres.DB) func(...providertest.Foreign) error {
	return func(entries ...providertest.Foreign) error {
		b := &pgx.Batch{}
		for _, f := range entries {
			b.Queue(insertForeign, f.ID, f.Topic, f.Key, f.Headers, string(f.Status),
				instants[f.Due], instants[f.Created], instants[f.Attempted], instants[f.Published])
		}
		return db.Pool().SendBatch(context.Background(), b).Close()
	}
}

// untilSQL makes the ends of waits older that slots have as text.
const untilSQL = `
update kinora.tasks set state = (
	select jsonb_object_agg(key, case when value ? 'until' then value || jsonb_build_object('until', (value ->> 'until')::timestamptz - $1::interval) else value end)
	from jsonb_each(state))
where jsonb_path_exists(state, '$.*.until')`

// Advance returns a function that makes all stored data older.
func Advance(t testing.TB, db *postgres.DB) func(time.Duration) {
	return func(d time.Duration) {
		for table, columns := range map[string][]string{
			"events":          {"recorded_at"},
			"outbox":          {"next_attempt_at", "created_at", "last_attempt_at", "published_at"},
			"markers":         {"processed_at"},
			"low_water_marks": {"pruned_before"},
			"generations":     {"created_at", "changed_at"},
			"parked":          {"parked_at", "resolved_at"},
			"holds":           {"due_at"}, // infinity stays, and the time of a lane that is unable
			"runners":         {"expires_at"},
			"leases":          {"expires_at"},
			"tasks":           {"next_at", "wait_until", "created_at", "ended_at", "attempted_at"}, // infinity stays
			"task_groups":     {"created_at", "completed_at"},
			"task_trail":      {"at"},
			"snapshots":       {"saved_at"},
			"services":        {"started_at", "seen_at", "expires_at"},
			"pauses":          {"paused_at"},
			"acts":            {"at", "expires_at", "ended_at"},
		} {
			var back []string
			for _, c := range columns {
				back = append(back, c+" = case when "+c+" < '9000-01-01' then "+c+" - $1::interval else "+c+" end")
			}
			_, err := db.Pool().Exec(context.Background(), "update kinora."+table+" set "+strings.Join(back, ", "), d)
			if err != nil {
				t.Fatal(err)
			}
		}
		if _, err := db.Pool().Exec(context.Background(), untilSQL, d); err != nil {
			t.Fatal(err)
		}
	}
}

// Batched returns the fixture of db for units that queue their statements.
func Batched(t testing.TB, db *postgres.DB, o providertest.Options) providertest.Fixture[*pgx.Batch] {
	return providertest.Fixture[*pgx.Batch]{
		Provider: db.Batched(),
		InTx:     inTx(db),
		Advance:  Advance(t, db),
		Add: func(_ context.Context, b *pgx.Batch, key string, n int) error {
			b.Queue(AddSQL, key, n)
			return nil
		},
		Break: func(_ context.Context, b *pgx.Batch) error {
			b.Queue("select 1 / 0")
			return nil
		},
		Tables: tables(db, func(_ context.Context, b *pgx.Batch, sql string) error {
			b.Queue(sql)
			return nil
		}),
		Total: Total(t, db),
		Reopen: func() providertest.Fixture[*pgx.Batch] {
			return Batched(t, reopen(t, db, o), o)
		},
	}
}

// SQL returns the fixture of db for transactions of database/sql.
func SQL(t testing.TB, db *postgres.DB, o providertest.Options) providertest.Fixture[*sql.Tx] {
	pool := stdlib.OpenDBFromPool(db.Pool())
	t.Cleanup(func() { _ = pool.Close() })
	owned := func(ctx context.Context, fn func(tx *sql.Tx) error) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := fn(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	add := func(ctx context.Context, tx *sql.Tx, key string, n int) error { return write(ctx, tx, AddSQL, key, n) }
	return providertest.Fixture[*sql.Tx]{
		Provider: db.SQL(),
		InTx: func(ctx context.Context, fn func(providertest.TxView, providertest.Add) error) error {
			return owned(ctx, func(tx *sql.Tx) error {
				return fn(db.InSQLTx(tx), func(ctx context.Context, key string, n int) error { return add(ctx, tx, key, n) })
			})
		},
		Owned:   owned,
		Advance: Advance(t, db),
		Add:     add,
		Break:   func(ctx context.Context, tx *sql.Tx) error { return write(ctx, tx, "select 1 / 0") },
		End: func(ctx context.Context, tx *sql.Tx) {
			_ = write(ctx, tx, "rollback")
			_ = write(ctx, tx, "/**/ rollback") // cannot be refused
			_ = tx.Commit()
			_ = tx.Rollback()
		},
		Insert: insert(db),
		Tables: tables(db, func(ctx context.Context, tx *sql.Tx, s string) error { return write(ctx, tx, s) }),
		Total:  Total(t, db),
		Reopen: func() providertest.Fixture[*sql.Tx] {
			return SQL(t, reopen(t, db, o), o)
		},
	}
}

func write(ctx context.Context, tx *sql.Tx, statement string, args ...any) error {
	_, err := tx.ExecContext(ctx, statement, args...)
	return err
}

// Config returns the configuration that o requires.
func Config(o providertest.Options) *postgres.Config {
	return &postgres.Config{Route: o.Route, MaxPayload: o.MaxPayload, RequeueWindow: o.RequeueWindow}
}
