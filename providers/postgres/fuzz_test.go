package postgres_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// A schema's name is inserted into SQL.
func FuzzSchemaName(f *testing.F) {
	for _, s := range []string{"kinora", `a"b`, "a; drop schema kinora cascade; --", "größe", "a.b", "A"} {
		f.Add(s)
	}
	pool, err := pgxpool.New(f.Context(), "postgres://localhost/none") // it connects only when used
	require.NoError(f, err)
	f.Cleanup(pool.Close)
	f.Fuzz(func(t *testing.T, schema string) {
		_, err := postgres.New(pool, &postgres.Config{Schema: schema})
		if err != nil {
			require.ErrorIs(t, err, eventstore.ErrInvalid)
			return
		}
		require.Regexp(t, `^([a-z][a-z0-9_]{0,40})?$`, schema)
	})
}
