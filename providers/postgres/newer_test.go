package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/migration"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
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

// A program runs on the version before its own, and on later ones whose migrations say that it does.
// Promise: O6.1
func TestAProgramRunsOnNeighbouringVersions(t *testing.T) {
	t.Parallel()
	all := postgres.Migrations()
	known := len(all)
	for _, schema := range []string{"kinora", "shop"} {
		db, err := postgres.Open(t.Context(), postgrestest.DSN(t, &postgres.Config{Schema: "unused"}), &postgres.Config{Schema: schema})
		require.NoError(t, err)
		defer db.Close()
		up := func(to int) {
			require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.Up(t.Context(), tx, all[:to]) }))
		}
		up(known - 2)
		require.ErrorIs(t, db.Ready(t.Context()), postgres.ErrNotMigrated)
		up(known - 1)
		role := fmt.Sprintf("parks_%s_%d", schema, os.Getpid())
		_, err = db.Pool().Exec(t.Context(), fmt.Sprintf(`create role %s; grant insert (class, code), select on %s.parked to %[1]s`, role, schema))
		require.NoError(t, err)
		for what, start := range starts(t, db) {
			if what != "relay" { // it runs
				require.NoError(t, start(patience.Context(t)), what)
			}
		}
		require.NoError(t, db.Migrate(t.Context()))
		require.Equal(t, []int{1, 0}, []int{
			count(t, db, fmt.Sprintf(`select has_column_privilege('%s', '%s.parked', 'needs', 'insert')::int`, role, schema)),
			count(t, db, fmt.Sprintf(`select has_column_privilege('%s', '%s.parked', 'lane', 'insert')::int`, role, schema)),
		}, "who may park may also say what a message needs")
		_, err = db.Pool().Exec(t.Context(), fmt.Sprintf(`drop owned by %[1]s; drop role %[1]s`, role))
		require.NoError(t, err)

		_, err = db.Pool().Exec(t.Context(), `insert into `+schema+`.migrations (version_id, is_applied, oldest) values
			($1::bigint, true, $1 - 1), ($1 + 1, true, $1 - 2), ($1 + 2, false, $1 + 2)`, known+1)
		require.NoError(t, err)
		require.NoError(t, db.Ready(t.Context()))
		require.NoError(t, db.Migrate(t.Context()), "an old program that migrates when it starts")
		require.Equal(t, known+3, count(t, db, `select count(*) from `+schema+`.migrations`), "nothing is changed")
		_, err = db.Pool().Exec(t.Context(), `update `+schema+`.migrations set oldest = $1::bigint where version_id = $1`, known+1)
		require.NoError(t, err)
		var newer *postgres.NewerError
		require.ErrorAs(t, db.Ready(t.Context()), &newer)
		require.ErrorAs(t, db.Migrate(t.Context()), &newer)
	}
}

// From the version on that records it, each migration says which programs run on it.
func TestEachMigrationSaysWhichProgramsRunOnIt(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	for i, script := range postgres.Migrations() {
		if version := i + 1; version >= postgres.OldestSince {
			require.LessOrEqual(t, migration.Oldest(script), int64(version), "migration %d lacks the line", version)
			require.EqualValues(t, migration.Oldest(script), count(t, db, fmt.Sprintf(`select oldest from kinora.migrations where version_id = %d`, version)))
		}
	}
}

func TestASchemaNewerThanTheProgramIsRefused(t *testing.T) {
	t.Parallel()
	known := len(postgres.Migrations())
	for _, schema := range []string{"kinora", "shop"} {
		db := postgrestest.Open(t, &postgres.Config{Schema: schema})
		require.NoError(t, db.Ready(t.Context()))
		_, err := db.Pool().Exec(t.Context(), `insert into `+schema+`.migrations (version_id, is_applied) values (18, true), (19, true), (20, false)`)
		require.NoError(t, err)
		all := starts(t, db)
		all["migrate"] = db.Migrate
		for what, start := range all {
			var newer *postgres.NewerError
			err := start(patience.Context(t))
			require.ErrorAs(t, err, &newer, what)
			require.EqualValues(t, 19, newer.Database)
			require.EqualValues(t, known, newer.Program)
			require.ErrorContains(t, err, "version 19")
			require.NotErrorIs(t, err, postgres.ErrNotMigrated)
		}
		require.Equal(t, known+3, count(t, db, `select count(*) from `+schema+`.migrations`), "nothing is changed")
		_, err = db.Pool().Exec(t.Context(), `delete from `+schema+`.migrations where version_id > $1`, known)
		require.NoError(t, err)
		require.NoError(t, db.Migrate(t.Context()))
		require.NoError(t, db.Ready(t.Context()))
	}
}

// On the version before, a message that a program is unable to apply has no need: it is tried again. After the migration it
// gets its need with its next attempt, and others have theirs at once.
func TestOnTheVersionBeforeAnUnableMessageIsTriedAgain(t *testing.T) {
	t.Parallel()
	all := postgres.Migrations()
	dsn := postgrestest.DSN(t, &postgres.Config{Schema: "unused"})
	old, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	defer old.Close()
	require.NoError(t, pgx.BeginFunc(t.Context(), old.Pool(), func(tx pgx.Tx) error { return old.Up(t.Context(), tx, all[:len(all)-1]) }))
	db, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	defer db.Close()

	builds, needs := []provider.Build{{Projector: "p", Generation: 1}}, "event a 2"
	park := func(m provider.Message) {
		require.NoError(t, db.Do(t.Context(), provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m}},
			func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
				return provider.Closing{Park: []provider.Aside{{Parked: provider.Parked{
					Projector: "p", MessageID: m.ID, Lane: m.Lane, Handlers: []string{"p/h"}, Class: provider.ClassUnable, Needs: needs}}}}, nil
			}))
	}
	due := func(has ...provider.Need) (ids []string) {
		rows, err := db.Due(t.Context(), provider.DueFilter{Builds: builds, Keys: 10, Each: 10, Needs: has})
		require.NoError(t, err)
		for _, p := range rows {
			ids = append(ids, p.MessageID)
		}
		return ids
	}
	again := func() {
		rows, err := db.Due(t.Context(), provider.DueFilter{Builds: builds, Keys: 10, Each: 10})
		require.NoError(t, err)
		require.Len(t, rows, 1)
		tried, err := db.Try(t.Context(), rows[0], -1, 0)
		require.NoError(t, err)
		require.True(t, tried)
		rows[0].Attempts++
		park(provider.Message{ID: "a", Lane: rows[0].Lane, Handlers: []provider.Handler{{Name: "p/h"}}, Parked: &rows[0]})
	}
	waiting := func() (all []string) {
		list, err := db.Needs(t.Context(), []provider.Need{{Build: builds[0]}})
		require.NoError(t, err)
		for _, n := range list {
			all = append(all, n.Needs)
		}
		return all
	}
	park(provider.Message{ID: "a", Lane: provider.LaneOfKey("a"), Handlers: []provider.Handler{{Name: "p/h"}}})
	require.Equal(t, []string{"a"}, due())
	require.Empty(t, waiting())
	again()
	require.Equal(t, []string{"a"}, due())
	rows, err := db.Parked(t.Context(), provider.ParkedFilter{Limit: 10})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.Equal(t, provider.ClassUnable, rows[0].Class)
	_, err = db.Survey(t.Context(), 10)
	require.NoError(t, err)

	require.NoError(t, old.Migrate(t.Context()))
	require.Empty(t, waiting(), "looks at the version again")
	require.Equal(t, []string{"a"}, due())
	again()
	require.Empty(t, due())
	park(provider.Message{ID: "b", Lane: provider.LaneOfKey("b"), Handlers: []provider.Handler{{Name: "p/h"}}})
	require.Equal(t, []string{needs}, waiting())
	require.ElementsMatch(t, []string{"a", "b"}, due(provider.Need{Build: builds[0], Needs: needs}))
}
