package postgres_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// With sequential scans off, a plan with one seems so expensive that the server compiles it,
// which takes longer than all else in a unit. auto_explain logs each plan, and whether it was
// compiled.
func TestNoStatementOfARunnerIsCompiled(t *testing.T) {
	t.Parallel()
	server, err := pgtest.Start("jit=on", "shared_preload_libraries=auto_explain", "auto_explain.log_min_duration=0", "auto_explain.log_analyze=on", "log_min_messages=log")
	require.NoError(t, err)
	defer server.Stop()
	pool, err := pgxpool.New(t.Context(), server.DSN)
	require.NoError(t, err)
	defer pool.Close()
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))

	message := provider.Message{ID: "1", Lane: provider.LaneOfKey("k"), Handlers: []provider.Handler{{Name: "p/h"}}, Mark: true}
	var parked []provider.Parked
	checkpoint := provider.Checkpoint{Mode: provider.ModeLive}
	run := func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
		if found.Live != nil {
			return provider.Closing{}, nil
		}
		return provider.Closing{Park: []provider.Aside{{Parked: provider.Parked{
			Projector: "p", Handlers: []string{"p/h"}, MessageID: "1", Lane: message.Lane, Class: provider.ClassUnknown, Attempts: 1}}}}, nil
	}
	for _, step := range []func() error{
		func() error { _, err := db.Beat(t.Context(), "a", time.Second, time.Hour); return err },
		func() error {
			return db.InFlight(t.Context(), provider.Build{Projector: "p"}, provider.Worker{Runner: "a"}, []string{"1"})
		},
		func() error {
			return db.Do(t.Context(), provider.Unit{Projector: "p", Messages: []provider.Message{message}, Careful: &provider.Worker{Runner: "b"}}, run)
		},
		func() (err error) {
			parked, err = db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 1, Each: 1})
			return err
		},
		func() error { _, err := db.Try(t.Context(), parked[0], 5, time.Minute); return err },
		func() error {
			message.Parked, message.Mark = &parked[0], false
			message.Parked.Attempts++
			return db.Do(t.Context(), provider.Unit{Projector: "p", Messages: []provider.Message{message}}, run)
		},
		func() error { _, err := db.Prune(t.Context(), "p", []string{"p/h"}, time.Hour, 10); return err },
		func() error { _, err := db.Beat(t.Context(), "a", 0, time.Hour); return err },
		func() error {
			_, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: "p"}, provider.Checkpoint{}, checkpoint)
			return err
		},
		func() error { return queue(t.Context(), db, event(map[string]int64{"e": 1}, "e"), nil) },
		func() error { return do(t.Context(), db, event(map[string]int64{"e": 1, "f": 2}, "e", "f"), nil) },
		func() error {
			_, err := db.Unapplied(t.Context(), provider.Build{Projector: "p"}, marked("e", "g").Messages)
			return err
		},
		func() error {
			u := event(map[string]int64{"f": 2, "g": 3}, "f", "g")
			u.Advance = advance(checkpoint, 3)
			return queue(t.Context(), db, u, nil)
		},
		func() error {
			_, err := db.PruneApplied(t.Context(), provider.Build{Projector: "p"}, []string{"p/a"}, 10)
			return err
		},
		func() error { _, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p"}); return err },
		func() error {
			_, err := db.AcquireLease(t.Context(), "l", claim.Terms{Token: claim.NewToken(), Lease: time.Hour})
			return err
		},
	} {
		require.NoError(t, step())
	}
	log, err := os.ReadFile(server.Log())
	require.NoError(t, err)
	require.Contains(t, string(log), "Query Text", "auto_explain is active")
	for plan := range strings.SplitSeq(string(log), "LOG:  duration") {
		require.NotContains(t, plan, "JIT:")
	}
}
