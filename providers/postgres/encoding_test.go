package postgres_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// A database with another encoding refuses some text, or stores bytes that are not text. This may
// not appear with the first events.
func TestADatabaseThatIsNotUTF8IsRefused(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	admin, err := pgxpool.New(t.Context(), server.DSN)
	require.NoError(t, err)
	defer admin.Close()
	for _, encoding := range []string{"SQL_ASCII", "LATIN1", "UTF8"} {
		name := "in_" + strings.ToLower(encoding)
		_, err := admin.Exec(t.Context(), `create database `+name+` encoding '`+encoding+`' locale 'C' template template0`)
		require.NoError(t, err)
		config := admin.Config()
		config.ConnConfig.Database = name
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		db, err := postgres.New(pool, nil)
		require.NoError(t, err)
		if encoding == "UTF8" {
			require.NoError(t, db.Migrate(t.Context()))
			require.NoError(t, db.Ready(t.Context()))
			continue
		}
		for what, err := range map[string]error{"migrate": db.Migrate(t.Context()), "ready": db.Ready(t.Context())} {
			require.ErrorIs(t, err, postgres.ErrEncoding, what)
			require.ErrorContains(t, err, encoding, what)
		}
		require.Zero(t, count(t, db, `select count(*) from pg_namespace where nspname = 'kinora'`), "no table is created")
		_, err = pool.Exec(t.Context(), script(t, postgres.MigrationSQL, "kinora"))
		require.NoError(t, err)
		require.ErrorIs(t, db.Ready(t.Context()), postgres.ErrEncoding, "also after a migration by hand")
	}
}
