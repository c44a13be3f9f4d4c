package postgres_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// startCalls returns, by name, the calls that check the database first.
func startCalls(t *testing.T, db *postgres.DB) map[string]func(ctx context.Context) error {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	p := projector.Define("p", table, projector.Options{Markers: true},
		projector.On("a", func(context.Context, pgx.Tx, eventstore.Event[counted]) error { return nil }))
	queued := projector.Define("p", table, projector.Options{Markers: true},
		projector.On("a", func(context.Context, *pgx.Batch, eventstore.Event[counted]) error { return nil }))
	source := projector.Subscribe(gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}), "notes")
	relay, err := outbox.NewRelay(db, publish(func() {}), &outbox.RelayConfig{Logger: quiet})
	require.NoError(t, err)
	runner, err := projector.NewRunner(db, source, projector.RunnerConfig{Logger: quiet}, p)
	require.NoError(t, err)
	batched, err := projector.NewRunner(db.Batched(), source, projector.RunnerConfig{Logger: quiet}, queued)
	require.NoError(t, err)
	return map[string]func(ctx context.Context) error{
		"ready": db.Ready, "ready of batches": db.Batched().Ready, "relay": relay.Run, "runner": runner.Run, "runner of batches": batched.Run,
	}
}

func TestASchemaNewerThanTheProgramIsRefused(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"kinora", "shop"} {
		db := postgrestest.Open(t, &postgres.Config{Schema: schema})
		require.NoError(t, db.Ready(t.Context()))
		_, err := db.Pool().Exec(t.Context(), `insert into `+schema+`.migrations (version_id, is_applied) values (8, true), (9, true), (10, false)`)
		require.NoError(t, err)
		all := startCalls(t, db)
		all["migrate"] = db.Migrate
		for what, start := range all {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var newer *postgres.NewerError
			err := start(ctx)
			require.ErrorAs(t, err, &newer, what)
			require.EqualValues(t, 9, newer.Database)
			require.EqualValues(t, 1, newer.Program)
			require.ErrorContains(t, err, "version 9")
			require.NotErrorIs(t, err, postgres.ErrNotMigrated)
		}
		require.Equal(t, 5, count(t, db, `select count(*) from `+schema+`.migrations`), "the schema is unchanged")
		_, err = db.Pool().Exec(t.Context(), `delete from `+schema+`.migrations where version_id > 1`)
		require.NoError(t, err)
		require.NoError(t, db.Migrate(t.Context()))
		require.NoError(t, db.Ready(t.Context()))
	}
}
