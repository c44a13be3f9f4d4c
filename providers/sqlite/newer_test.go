package sqlite_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func TestASchemaNewerThanTheProgramIsRefused(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	require.NoError(t, db.Ready(t.Context()))
	_, err := db.SQL().Exec(`insert into kinora_migrations (version_id, is_applied) values (8, 1), (9, 1), (10, 0)`)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, discard{}, nil)
	require.NoError(t, err)
	for what, start := range map[string]func(context.Context) error{"ready": db.Ready, "migrate": db.Migrate, "relay": relay.Run} {
		var newer *sqlite.NewerError
		err := start(patience.Context(t))
		require.ErrorAs(t, err, &newer, what)
		require.EqualValues(t, 9, newer.Database)
		require.EqualValues(t, 2, newer.Program)
		require.NotErrorIs(t, err, sqlite.ErrNotMigrated)
	}
	_, err = db.SQL().Exec(`delete from kinora_migrations where version_id > 2`)
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
