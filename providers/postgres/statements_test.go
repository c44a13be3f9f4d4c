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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// constants returns the string constants of the package's files by name, as the compiler sees
// them.
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
	// Imports are not followed, except for the constants that statements use.
	headers := types.NewPackage("github.com/kinora-go/kinora/provider", "provider")
	headers.Scope().Insert(types.NewConst(0, headers, "HeaderVersion", types.Typ[types.UntypedString], constant.MakeString(provider.HeaderVersion)))
	headers.Scope().Insert(types.NewConst(0, headers, "HeaderPosition", types.Typ[types.UntypedString], constant.MakeString(provider.HeaderPosition)))
	headers.Scope().Insert(types.NewConst(0, headers, "HeaderStream", types.Typ[types.UntypedString], constant.MakeString(provider.HeaderStream)))
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
			require.True(t, part || !statement.MatchString(sql), "a statement's name must end in SQL, so that it is prepared here: %s", name)
			continue
		}
		n++
		_, err := conn.Conn().Prepare(t.Context(), name, sql)
		require.NoError(t, err, "%s:\n%s", name, sql)
	}
	require.Greater(t, n, 20)
}

// plan returns the plan of a statement, with these arguments or for any.
func plan(t *testing.T, db *postgres.DB, mode, sql string, args ...any) string {
	t.Helper()
	tx, err := db.Pool().BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "set local plan_cache_mode = "+mode)
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), "explain (costs off) "+sql, append([]any{pgx.QueryExecModeCacheDescribe}, args...)...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(lines, "\n")
}

// Markers are looked up by index, however many there are, also if a connection first used the
// statements when there were few.
func TestThePlansOfMarkersDoNotAge(t *testing.T) {
	t.Parallel()
	const n = 20_000
	db := postgrestest.Open(t, nil)
	exec := func(sql string, args ...any) {
		_, err := db.Pool().Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec("alter table kinora.markers set (autovacuum_enabled = false)")
	exec("alter table kinora.parked set (autovacuum_enabled = false)")
	exec("vacuum analyze kinora.markers, kinora.parked") // their statistics say empty
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	aged, err := postgres.New(pool, nil)
	require.NoError(t, err)
	call := func() {
		_, err := aged.Outcomes(t.Context(), []provider.Question{{Handler: "p/a", MessageID: "m1", RecordedAt: time.Now()}})
		require.NoError(t, err)
		_, err = aged.MarkedHandlers(t.Context())
		require.NoError(t, err)
		_, err = aged.DropMarkers(t.Context(), "p/none", 10)
		require.NoError(t, err)
		_, err = aged.Unapplied(t.Context(), provider.Build{Projector: "p"}, marked("m1", "none").Messages)
		require.NoError(t, err)
		for _, handler := range []string{"p/none", "p/a"} {
			_, err = aged.PruneApplied(t.Context(), provider.Build{Projector: "p"}, []string{handler}, 10)
			require.NoError(t, err)
			_, err = aged.Prune(t.Context(), "p", []string{handler}, time.Hour, 10)
			require.NoError(t, err)
		}
	}
	for range 10 {
		call()
	}
	exec(`insert into kinora.markers (handler, generation, message_id) select 'p/a', 1, 'm' || g from generate_series(1, $1::int) g`, n)
	fillParked(t, db, "p", n, 1)
	var before, after int64
	const scanned = `select coalesce(sum(seq_tup_read), 0)::bigint from pg_stat_user_tables where relname in ('markers', 'parked')`
	require.NoError(t, pool.QueryRow(t.Context(), scanned).Scan(&before))
	call()
	// this updates the server's statistics
	pool.Close()
	require.NoError(t, db.Pool().QueryRow(t.Context(), `select pg_sleep(0.2)`).Scan(nil))
	require.NoError(t, db.Pool().QueryRow(t.Context(), scanned).Scan(&after))
	require.Less(t, after, before+n, "no table was scanned")

	all := constants(t)
	for name, c := range map[string]struct {
		args []any
		want []string
	}{
		"outcomesSQL": {[]any{`[{"projector": "p", "message_id": "m1", "names": ["p/a"]}]`},
			[]string{"using markers_pkey on markers m", "using parked_message_key on parked p"}},
		"unappliedSQL":      {[]any{"p", 0, []int32{0, 1}, []string{"p/a", "p/a"}, []string{"m1", "none"}, []int64{7, 0}}, []string{"using markers_pkey on markers m"}},
		"markedHandlersSQL": {nil, []string{"using markers_"}},
		"dropMarkersSQL":    {[]any{"p/a", 1000}, []string{"markers_prune_idx", "Tid Scan on markers"}},
	} {
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			p := plan(t, db, mode, all[name], c.args...)
			for _, want := range c.want {
				require.Contains(t, p, want, "%s, %s", name, mode)
			}
			require.NotContains(t, p, "Seq Scan on", "%s, %s", name, mode)
		}
	}
}

// The claim walks the open entries by their partial index, and looks a key's earlier entries up
// in the others. The other statements look up too. No statement may sort the backlog or scan the
// table, whatever the statistics say.
func TestPlansUseTheirIndexes(t *testing.T) {
	t.Parallel()
	const fill = `insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, stuck)
		select $1 || g, 't', 'k' || g % 1000, '', '{}', now(), now(), $1, $1 = 'pending', $1 in ('held', 'abandoned'), $1 = 'abandoned'
		from generate_series(1, $2::int) g`
	for name, when := range map[string]string{"fresh": "after", "stale": "before"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			exec := func(sql string, args ...any) {
				_, err := db.Pool().Exec(t.Context(), sql, args...)
				require.NoError(t, err)
			}
			exec("alter table kinora.outbox set (autovacuum_enabled = false)")
			exec(fill, "published", 50_000)
			if when == "before" {
				exec("vacuum analyze kinora.outbox")
			}
			for _, status := range []string{"pending", "held", "abandoned"} {
				exec(fill, status, 20_000)
			}
			if when == "after" {
				exec("vacuum analyze kinora.outbox")
			}
			token, all := "00000000-0000-0000-0000-000000000001", constants(t)
			for name, c := range map[string]struct {
				args []any
				want []string
			}{
				"claimEntriesSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0},
					[]string{"Index Scan using outbox_open_idx on outbox o", "using outbox_lane_idx on outbox e", "using outbox_held_lane_idx on outbox e"}},
				"claimNearSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0},
					[]string{"Index Scan using outbox_open_idx on outbox o", "using outbox_lane_idx on outbox e", "using outbox_held_lane_idx on outbox e"}},
				"claimTopicsNearSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0, nil, []string{"t"}},
					[]string{"using outbox_topic_idx on outbox o", "using outbox_lane_idx on outbox e", "using outbox_held_lane_idx on outbox e"}},
				"claimUnorderedSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0}, []string{"Index Scan using outbox_open_idx on outbox o"}},
				"claimTopicsSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0, nil, []string{"t"}},
					[]string{"using outbox_topic_idx on outbox o", "using outbox_lane_idx on outbox e", "using outbox_held_lane_idx on outbox e"}},
				"claimTopicsNoOrderSQL": {[]any{token, 60_000_000, 50, 8, "me", 1000, 0, []string{"t"}, nil}, []string{"using outbox_topic_idx on outbox o"}},
				"markEntriesSQL": {[]any{[]int64{1}, []string{token}, []string{"published"}, []int64{0}, []string{""}, []bool{false}},
					[]string{"using outbox_held_lane_idx on outbox h", "using outbox_lane_idx on outbox e", "using outbox_pkey on outbox o"}},
				"dropEntriesSQL":    {[]any{[]int64{1}, token}, []string{"using outbox_held_idx on outbox h", "using outbox_pkey on outbox o"}},
				"stuckHeadsSQL":     {[]any{1, "t", "k", 1, 1000}, []string{"using outbox_stuck_idx on outbox o", "using outbox_lane_idx on outbox f"}},
				"lockHeadsSQL":      {[]any{1, 1000, []int64{1}}, []string{"using outbox_pkey on outbox o"}},
				"holdEntriesSQL":    {[]any{[]int64{1}, []string{"t"}, []string{"k"}, 1000}, []string{"using outbox_lane_idx on outbox f"}},
				"restoreOrphansSQL": {[]any{"", "", 1000}, []string{"using outbox_held_lane_idx", "using outbox_lane_idx on outbox e"}},
				"restoreSQL":        {[]any{[]string{"t"}, []string{"k"}}, []string{"using outbox_held_lane_idx on outbox h"}},
				"deleteEntriesSQL":  {[]any{0, 1000, 1, 1}, []string{"using outbox_pkey on outbox"}},
				// Listing open entries costs as much as there are of them, however many published
				// ones are kept.
				"openEntriesSQL": {[]any{[]string{"pending"}, "", "", nil, 0, "", 0, 10}, []string{"outbox_open_idx"}},
				"bothEntriesSQL": {[]any{[]string{"pending", "held"}, "", "", nil, 0, "", 0, 10}, []string{"outbox_open_idx", "outbox_held_idx"}},
				"heldEntriesSQL": {[]any{[]string{"held"}, "", "", nil, 0, "", 0, 10}, []string{"outbox_held_idx"}},
			} {
				for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
					p := plan(t, db, mode, all[name], c.args...)
					for _, want := range c.want {
						require.Contains(t, p, want, "%s, %s", name, mode)
					}
					require.NotContains(t, p, "Seq Scan on outbox", "%s, %s", name, mode)
				}
			}
		})
	}
}
