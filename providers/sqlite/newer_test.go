package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/migration"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// A program runs on the version before its own, and on later ones whose migrations say that it does.
// Promise: O6.1
func TestAProgramRunsOnNeighbouringVersions(t *testing.T) {
	t.Parallel()
	known := len(sqlite.Migrations())
	path := filepath.Join(t.TempDir(), "app.db")
	raw, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	raw.SetMaxOpenConns(1)
	require.NoError(t, sqlite.UpTo(t.Context(), raw, known-1))
	_, err = raw.Exec(totalsDDL)
	require.NoError(t, err)
	require.NoError(t, raw.Close())
	db, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Ready(t.Context()))
	_, err = db.Append(t.Context(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	require.NoError(t, db.Do(t.Context(), delivery("m"), adds("p")))
	require.NoError(t, db.Migrate(t.Context()))
	require.NoError(t, db.Do(t.Context(), delivery("n"), adds("p")))

	_, err = db.SQL().Exec(`insert into kinora_migrations (version_id, is_applied, oldest) values (?1, 1, ?1 - 1), (?1 + 1, 1, ?1 - 2), (?1 + 2, 0, ?1 + 2)`, known+1)
	require.NoError(t, err)
	require.NoError(t, db.Ready(t.Context()))
	require.NoError(t, db.Migrate(t.Context()), "an old program that migrates when it starts")
	require.Equal(t, known+3, count(t, db.SQL(), "kinora_migrations"), "nothing is changed")
	_, err = db.SQL().Exec(`update kinora_migrations set oldest = ?1 where version_id = ?1`, known+1)
	require.NoError(t, err)
	other, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer other.Close()
	var newer *sqlite.NewerError
	require.ErrorAs(t, other.Ready(t.Context()), &newer)
	require.ErrorAs(t, other.Migrate(t.Context()), &newer)
}

// On the version before, a message that a program is unable to apply has no need: it is tried again. After the migration it
// gets its need with its next attempt, and others have theirs at once.
func TestOnTheVersionBeforeAnUnableMessageIsTriedAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	raw, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	raw.SetMaxOpenConns(1)
	require.NoError(t, sqlite.UpTo(t.Context(), raw, len(sqlite.Migrations())-1))
	require.NoError(t, raw.Close())
	db, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer db.Close()

	builds, needs := []provider.Build{totals}, "event review.posted 2"
	unable := func(u provider.Unit) {
		all := asides(u, provider.ClassUnable, 0)
		all[0].Parked.Needs = needs
		require.NoError(t, db.Do(t.Context(), u, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{Park: all}, nil
		}))
	}
	again := func() {
		list, err := db.Due(t.Context(), provider.DueFilter{Builds: builds, Keys: 10, Each: 10})
		require.NoError(t, err)
		require.Len(t, list, 1)
		tried, err := db.Try(t.Context(), list[0], -1, 0)
		require.NoError(t, err)
		require.True(t, tried)
		list[0].Attempts++
		u := delivery("a")
		u.Messages[0].Parked = &list[0]
		unable(u)
	}
	waiting := func() (all []string) {
		list, err := db.Needs(t.Context(), []provider.Need{{Build: totals}})
		require.NoError(t, err)
		for _, n := range list {
			all = append(all, n.Needs)
		}
		return all
	}
	unable(delivery("a"))
	require.Equal(t, []string{"a"}, due(t, db))
	require.Empty(t, waiting())
	again()
	require.Equal(t, []string{"a"}, due(t, db))
	require.Len(t, rows(t, db), 1)
	_, err = db.Survey(t.Context(), 10)
	require.NoError(t, err)

	require.NoError(t, db.Migrate(t.Context()))
	require.Empty(t, waiting())
	require.Equal(t, []string{"a"}, due(t, db))
	again()
	require.Empty(t, due(t, db))
	b := delivery("b")
	b.Messages[0].Lane = provider.LaneOfKey("b")
	unable(b)
	require.Equal(t, []string{needs}, waiting())
	able, err := db.Due(t.Context(), provider.DueFilter{Builds: builds, Keys: 10, Each: 10, Needs: []provider.Need{{Build: totals, Needs: needs}}})
	require.NoError(t, err)
	require.Len(t, able, 2)
}

// From the version on that records it, each migration says which programs run on it.
func TestEachMigrationSaysWhichProgramsRunOnIt(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for i, script := range sqlite.Migrations() {
		if version := i + 1; version >= sqlite.OldestSince {
			require.LessOrEqual(t, migration.Oldest(script), int64(version), "migration %d lacks the line", version)
			require.Equal(t, 1, count(t, db.SQL(), fmt.Sprintf("kinora_migrations where version_id = %d and oldest = %d", version, migration.Oldest(script))))
		}
	}
}

func TestASchemaNewerThanTheProgramIsRefused(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	require.NoError(t, db.Ready(t.Context()))
	_, err := db.SQL().Exec(`insert into kinora_migrations (version_id, is_applied) values (18, 1), (19, 1), (20, 0)`)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, discard{}, nil)
	require.NoError(t, err)
	for what, start := range map[string]func(context.Context) error{"ready": db.Ready, "migrate": db.Migrate, "relay": relay.Run} {
		var newer *sqlite.NewerError
		err := start(patience.Context(t))
		require.ErrorAs(t, err, &newer, what)
		require.EqualValues(t, 19, newer.Database)
		require.EqualValues(t, len(sqlite.Migrations()), newer.Program)
		require.NotErrorIs(t, err, sqlite.ErrNotMigrated)
	}
	_, err = db.SQL().Exec(`delete from kinora_migrations where version_id > ?1`, len(sqlite.Migrations()))
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context()))
	require.NoError(t, db.Ready(t.Context()))
}

// MigrationSQL also records the versions, so a later Migrate changes nothing.
func TestMigrationSQLRecordsTheVersions(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "by-hand.db")
	raw, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	_, err = raw.Exec(sqlite.MigrationSQL())
	require.NoError(t, err)
	require.NoError(t, raw.Close())
	db, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))
	require.NoError(t, db.Ready(t.Context()))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_migrations where version_id = 1 and is_applied = 1"))
	_, err = db.Append(t.Context(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
}

type discard struct{}

func (discard) Publish(string, ...*message.Message) error { return nil }
func (discard) Close() error                              { return nil }

// A check that is broken off says nothing about the file.
func TestReadyIsNilIfItsContextEnds(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx, end := context.WithCancel(t.Context())
	end()
	require.NoError(t, db.Ready(ctx))
}
