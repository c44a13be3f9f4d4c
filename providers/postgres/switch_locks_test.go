package postgres_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// A reader has locked the second view, and requests the first one, which the switch has replaced.
// The switch gives way: PostgreSQL ends no transaction of a reader because of a deadlock.
// Promise: R2.1
func TestASwitchGivesWayToReadersOfSeveralViews(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := postgrestest.Open(t, nil, `create table a_g2 (n int); create table b_g2 (n int); create view a as select 1 as n; create view b as select 1 as n`)
	show := provider.Unit{Projector: "p", Once: true, Switch: &provider.Switch{
		Show: []provider.TablePair{{Table: "a_g2", Other: "a"}, {Table: "b_g2", Other: "b"}},
	}}
	do := func() error {
		return db.Do(ctx, show, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{}, nil
		})
	}
	err := pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `select from b`)
		require.NoError(t, err)
		switched := make(chan error)
		go func() { switched <- do() }()
		patience.Until(t, func() bool {
			var waits bool
			err := db.Pool().QueryRow(ctx, `select exists (select from pg_locks where not granted and relation = 'b'::regclass and database = (select oid from pg_database where datname = current_database()))`).Scan(&waits)
			return err == nil && waits
		}, "the switch to wait for the second view")
		_, err = tx.Exec(ctx, `select from a`)
		require.Equal(t, provider.CodeBusy, provider.CodeOf(<-switched))
		return err
	})
	require.NoError(t, err)
	require.NoError(t, do())
}
