package sqlite_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/providers/sqlite"
)

// A later version applies only its own migrations, each of them once, and names the one that fails.
func TestMigrateAppliesOnlyWhatIsMissing(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for range 2 {
		require.NoError(t, sqlite.UpWith(t.Context(), db.SQL(), `create table kinora_second (id integer)`, `insert into kinora_second values (3)`))
	}
	require.Equal(t, 1, count(t, db.SQL(), "kinora_second"))
	require.Equal(t, len(sqlite.Migrations())+2, count(t, db.SQL(), "kinora_migrations"))
	require.Equal(t, 1, count(t, db.SQL(), fmt.Sprintf("kinora_migrations where version_id = %d and is_applied", len(sqlite.Migrations())+2)))
	require.ErrorContains(t, sqlite.UpWith(t.Context(), db.SQL(), "", "", `create table kinora_second (id integer)`), "later2: ")
}
