package postgres_test

import (
	"context"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// constants are the string constants of the package's own files, by name, as the compiler would see them.
func constants(t *testing.T) map[string]string {
	t.Helper()
	set := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	// Imports are not followed but for the constants that statements take from elsewhere.
	headers := types.NewPackage("github.com/kinora-go/kinora/outbox", "outbox")
	headers.Scope().Insert(types.NewConst(0, headers, "HeaderVersion", types.Typ[types.UntypedString], constant.MakeString(outbox.HeaderVersion)))
	headers.Scope().Insert(types.NewConst(0, headers, "HeaderStream", types.Typ[types.UntypedString], constant.MakeString(outbox.HeaderStream)))
	headers.MarkComplete()
	conf := types.Config{Error: func(error) {}, Importer: importer{headers}}
	pkg, _ := conf.Check("postgres", set, files, nil)
	found := map[string]string{}
	for _, name := range pkg.Scope().Names() {
		if c, ok := pkg.Scope().Lookup(name).(*types.Const); ok && c.Val().Kind() == constant.String {
			found[name] = constant.StringVal(c.Val())
		}
	}
	return found
}

type importer struct{ only *types.Package }

func (i importer) Import(path string) (*types.Package, error) {
	if path == i.only.Path() {
		return i.only, nil
	}
	return nil, fmt.Errorf("not followed: %s", path)
}

var statement = regexp.MustCompile(`^\s*(select|insert|update|delete|with)\s`)

func TestEveryStatementPreparesAgainstTheMigratedSchema(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	conn, err := db.Pool().Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	n, all := 0, constants(t)
	for name, sql := range all {
		if !strings.HasSuffix(name, "SQL") {
			part := false
			for whole, text := range all {
				part = part || strings.HasSuffix(whole, "SQL") && strings.Contains(text, sql)
			}
			require.True(t, part || !statement.MatchString(sql), "a statement's name ends in SQL, so that it is prepared here: %s", name)
			continue
		}
		n++
		_, err := conn.Conn().Prepare(t.Context(), name, sql)
		require.NoError(t, err, "%s:\n%s", name, sql)
	}
	require.Greater(t, n, 20)
}

// plan is what the planner makes of a statement, with these arguments in their place.
func plan(t *testing.T, db *postgres.DB, sql string, args ...any) string {
	t.Helper()
	tx, err := db.Pool().BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "set local plan_cache_mode = force_generic_plan")
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), "explain (costs off) "+sql, args...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(lines, "\n")
}

// The claim walks the open entries by their partial index, and looks a key's earlier entries up in the other.
// Neither a sort of the backlog nor a scan of the table may come back.
func TestTheClaimsPlanIsPinnedToItsIndexes(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, open, status)
		select g, 't', 'k' || g % 1000, '', '{}', now(), now(), g > 50000, case when g > 50000 then 'pending' else 'published' end
		from generate_series(1, 100000) g`)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), "vacuum analyze kinora.outbox")
	require.NoError(t, err)
	sql := constants(t)["claimEntriesSQL"]
	p := plan(t, db, sql, "00000000-0000-0000-0000-000000000001", int64(60_000_000), 50, nil, 8, "me", nil)
	require.Contains(t, p, "Index Scan using outbox_open_idx on outbox o")
	require.Contains(t, p, "using outbox_lane_idx on outbox e")
	require.NotContains(t, p, "Seq Scan on outbox")
	// Looking at open entries costs as much as there are of them, however many published ones are kept.
	p = plan(t, db, constants(t)["openEntriesSQL"], []string{"failed"}, "", "", nil, 0, "", 0, 10)
	require.Contains(t, p, "outbox_open_idx")
	p = plan(t, db, constants(t)["openCountsSQL"], []string{"failed"})
	require.Contains(t, p, "outbox_open_idx")
}
