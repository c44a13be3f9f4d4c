package postgres_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// starts are the calls that check the database before they do anything else, by name.
func starts(t *testing.T, db *postgres.DB) map[string]func(ctx context.Context) error {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	p := projector.Define("p", table, projector.Options{Markers: true},
		projector.On("a", func(context.Context, pgx.Tx, eventstore.Event[counted]) error { return nil }))
	queued := projector.Define("p", table, projector.Options{Markers: true},
		projector.On("a", func(context.Context, *pgx.Batch, eventstore.Event[counted]) error { return nil }))
	relay, err := outbox.NewRelay(db, publish(func() {}), &outbox.RelayConfig{Logger: quiet})
	require.NoError(t, err)
	cfg := &projector.RunnerConfig{Logger: quiet}
	runner := func(ctx context.Context) error { return p.ApplyParked(ctx, db, cfg) }
	batched := func(ctx context.Context) error { return queued.ApplyParked(ctx, db.Batched(), cfg) }
	return map[string]func(ctx context.Context) error{
		"ready": db.Ready, "ready of batches": db.Batched().Ready, "relay": relay.Run, "runner": runner, "runner of batches": batched,
	}
}

func TestASchemaNewerThanTheProgramIsRefused(t *testing.T) {
	t.Parallel()
	known := len(postgres.Migrations())
	for _, schema := range []string{"kinora", "shop"} {
		db := postgrestest.Open(t, &postgres.Config{Schema: schema})
		require.NoError(t, db.Ready(t.Context()))
		_, err := db.Pool().Exec(t.Context(), `insert into `+schema+`.migrations (version_id, is_applied) values (8, true), (9, true), (10, false)`)
		require.NoError(t, err)
		all := starts(t, db)
		all["migrate"] = db.Migrate
		for what, start := range all {
			var newer *postgres.NewerError
			err := start(patience.Context(t))
			require.ErrorAs(t, err, &newer, what)
			require.EqualValues(t, 9, newer.Database)
			require.EqualValues(t, known, newer.Program)
			require.ErrorContains(t, err, "version 9")
			require.NotErrorIs(t, err, postgres.ErrNotMigrated)
		}
		require.Equal(t, known+3, count(t, db, `select count(*) from `+schema+`.migrations`), "nothing is changed")
		_, err = db.Pool().Exec(t.Context(), `delete from `+schema+`.migrations where version_id > $1`, known)
		require.NoError(t, err)
		require.NoError(t, db.Migrate(t.Context()))
		require.NoError(t, db.Ready(t.Context()))
	}
}
