package sqlite_test

import (
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/providers/sqlite"
)

// UTF-16 sorts text in a different order, and hex and length count different bytes.
func TestAFileThatIsNotUTF8IsRefused(t *testing.T) {
	t.Parallel()
	for encoding, fits := range map[string]bool{"UTF-16le": false, "UTF-16be": false, "UTF-8": true} {
		path := filepath.Join(t.TempDir(), "app.db")
		raw, err := sql.Open("sqlite", path)
		require.NoError(t, err)
		raw.SetMaxOpenConns(1)
		_, err = raw.Exec(`pragma encoding = '` + encoding + `'; create table mine (id text)`)
		require.NoError(t, err)
		require.NoError(t, raw.Close())
		db, err := sqlite.Open(t.Context(), path, nil)
		require.NoError(t, err)
		defer db.Close()
		if fits {
			require.NoError(t, db.Migrate(t.Context()))
			require.NoError(t, db.Ready(t.Context()))
			continue
		}
		for what, err := range map[string]error{"migrate": db.Migrate(t.Context()), "ready": db.Ready(t.Context())} {
			require.ErrorIs(t, err, sqlite.ErrEncoding, what)
			require.ErrorContains(t, err, encoding, what)
		}
		require.Zero(t, count(t, db.SQL(), "sqlite_schema where name like 'kinora_%'"), "no table is created")
	}
}
