package postgres_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// An append with an entry in a transaction of the caller, and a unit with a marker and a write, each for
// pgx and for database/sql.
func BenchmarkSQL(b *testing.B) {
	db := postgrestest.Open(b, &postgres.Config{Route: outbox.ByCategory}, totals)
	pool := stdlib.OpenDBFromPool(db.Pool())
	b.Cleanup(func() { pool.Close() })
	ctx := context.Background()
	n := 0
	for name, run := range map[string]func(n int) error{
		"append/pgx": func(n int) error {
			return pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error {
				_, err := db.InTx(tx).Append(ctx, fmt.Sprint("a-", n), eventstore.NoStream, drafts(b, n))
				return err
			})
		},
		"append/sql": func(n int) error {
			tx, err := pool.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := db.InSQLTx(tx).Append(ctx, fmt.Sprint("a-", n), eventstore.NoStream, drafts(b, n)); err != nil {
				return err
			}
			return tx.Commit()
		},
		"unit/pgx": func(n int) error {
			return do(ctx, db, marked(fmt.Sprint(n)), func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return nil, add(ctx, tx, "k", 1)
			})
		},
		"unit/sql": func(n int) error {
			return doSQL(ctx, db, marked(fmt.Sprint(n)), func(ctx context.Context, tx *sql.Tx) error { return addTo(ctx, tx, 1) })
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				n++
				require.NoError(b, run(n))
			}
		})
	}
}
