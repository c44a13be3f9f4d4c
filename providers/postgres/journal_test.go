package postgres_test

import (
	"context"
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// pages is how many pages a call reads on the pool's only connection, as the server counts them.
func pages(t *testing.T, db *postgres.DB, call func()) int {
	t.Helper()
	read := func() (n int) {
		_, err := db.Pool().Exec(t.Context(), `select pg_stat_force_next_flush()`)
		require.NoError(t, err)
		return count(t, db, `select sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)) from pg_statio_user_tables where schemaname = 'kinora'`)
	}
	before := read()
	call()
	return read() - before
}

// one is a database with a pool of one connection, so that statements that it has prepared stay prepared.
func one(t *testing.T) *postgres.DB {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil)+"&pool_max_conns=1")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	return db
}

// What is on every message's path reads a few pages, and no more beside 100,000 parked messages, half of them in its lane, and
// as many dead rows; also where its plans were made while the tables were empty.
func TestTheJournalsCostIsFlat(t *testing.T) {
	t.Parallel()
	db := one(t)
	crowd, err := postgres.Open(t.Context(), strings.ReplaceAll(db.Pool().Config().ConnString(), "pool_max_conns=1", "pool_max_conns=4"), nil)
	require.NoError(t, err)
	t.Cleanup(crowd.Close)
	_, err = crowd.Pool().Exec(t.Context(), `vacuum analyze kinora.inflight, kinora.parked, kinora.attempts, kinora.runners`)
	require.NoError(t, err)
	n := 0
	calls := map[string]func(key string){
		"begin": func(key string) {
			n++
			a := attempt(n)
			a.Key = key
			v, err := db.Begin(t.Context(), "me", []projector.Attempt{a}, nil)
			require.NoError(t, err)
			require.Equal(t, []projector.Verdict{projector.Clear}, v)
			_, err = db.Begin(t.Context(), "me", nil, []projector.Attempt{a})
			require.NoError(t, err)
		},
		"begin alone": func(string) {
			n++
			_, _, err := db.BeginAlone(t.Context(), "me", attempt(n), -1)
			require.NoError(t, err)
			_, err = db.Begin(t.Context(), "me", nil, []projector.Attempt{attempt(n)})
			require.NoError(t, err)
		},
		"due": func(string) {
			list, err := db.DueParked(t.Context(), "p", []string{"t", "u"}, 0, 10)
			require.NoError(t, err)
			require.Empty(t, list)
		},
		"behind": func(key string) {
			a := attempt(0)
			a.Key = key
			require.ErrorIs(t, db.Do(t.Context(), projector.Work{Projector: "p", Behind: &a}, nil), projector.ErrNotHeld)
		},
		"forget": func(string) {
			require.NoError(t, db.Do(t.Context(), projector.Work{Projector: "p", Forget: []projector.Attempt{attempt(0)}}, nil))
		},
	}
	for _, call := range calls {
		for range 10 {
			call("crowded")
		}
	}
	crowdedLanes(t, crowd)
	deadNames(t, crowd, 100_000)
	_, err = crowd.Pool().Exec(t.Context(), `insert into kinora.attempts (handler, message_hash, attempts, last_at) select 'p/a', sha256(('d-' || g)::bytea), 1, now() from generate_series(1, 100000) g`)
	require.NoError(t, err)
	for name, call := range calls {
		call("crowded")
		require.Less(t, pages(t, db, func() { call("crowded") }), 150, name)
	}
	list, err := crowd.ParkedMessages(t.Context(), projector.ParkedFilter{Key: "crowded", Limit: 2})
	require.NoError(t, err)
	require.Less(t, pages(t, db, func() {
		a := projector.Attempt{Projector: "p", Handler: "p/b", Key: "crowded", Takes: []string{"t"}, Seq: list[0].Seq}
		require.NoError(t, db.Do(t.Context(), projector.Work{Projector: "p", Replay: []projector.Replay{{Attempt: a, Decision: decided}}}, nil))
	}), 300, "replay")
	due, err := db.DueParked(t.Context(), "p", nil, 0, 10)
	require.NoError(t, err)
	require.Len(t, due, 1)
}

// The plans of statements that look up are made of the indexes meant for it, whatever the statistics.
func TestTheJournalsPlans(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	lane := []any{"p", []byte("k"), []string{"p/a"}, []string{"t"}, 0, []int64{}}
	all := constants(t)
	check := func(when string) {
		for name, c := range map[string]struct {
			args []any
			want []string
		}{
			"doneSQL":         {[]any{"p/a", []byte("m"), "r", 1}, []string{"inflight_pkey"}},
			"beginSQL":        {[]any{"p", []byte("k"), []string{"p/a"}, 0, []byte("m"), "p/a", "r", 1}, []string{"parked_message_key", "parked_lane_idx", "inflight_pkey", "attempts_pkey"}},
			"beginInLaneSQL":  {append(lane[:6:6], []byte("m"), "p/a", "r", 1), []string{"parked_lane_idx", "inflight_pkey", "attempts_pkey"}},
			"beginAloneSQL":   {[]any{"p/a", []byte("m"), "r", 1, 1}, []string{"inflight_pkey", "attempts_pkey", "runners_pkey"}},
			"behindSQL":       {lane, []string{"parked_lane_idx", "parked_pkey"}},
			"checkReplaySQL":  {lane, []string{"parked_lane_idx", "parked_pkey", "floors_pkey"}},
			"lockParkedSQL":   {[]any{[]int64{1}, "p"}, []string{"parked_pkey"}},
			"resolveSQL":      {[]any{[]int64{1}, []string{"a"}, []string{"b"}}, []string{"parked_pkey"}},
			"dueSQL":          {[]any{[]int64{1}}, []string{"parked_pkey", "parked_waits_idx"}},
			"dueParkedSQL":    {[]any{"p", []string{"t"}, 0, 10}, []string{"parked_due_idx", "parked_unregistered_idx"}},
			"forgetSQL":       {[]any{"p/a", []byte("m")}, []string{"attempts_pkey"}},
			"pruneMarkersSQL": {[]any{"p/a", 1, 10}, []string{"markers_age_idx"}},
		} {
			for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
				p := lookUpPlan(t, db, mode, all[name], c.args...)
				for _, want := range c.want {
					require.Contains(t, p, want, "%s, %s, %s", name, mode, when)
				}
				require.NotContains(t, p, "Seq Scan", "%s, %s, %s", name, mode, when)
			}
		}
	}
	_, err := db.Pool().Exec(t.Context(), `vacuum analyze kinora.inflight, kinora.parked, kinora.attempts, kinora.runners, kinora.markers, kinora.floors`)
	require.NoError(t, err)
	check("empty")
	crowdedLanes(t, db)
	check("stale")
	_, err = db.Pool().Exec(t.Context(), `analyze kinora.parked`)
	require.NoError(t, err)
	check("fresh")
}

// lookUpPlan is the plan where scans are off, as lookUpSQL has it.
func lookUpPlan(t *testing.T, db *postgres.DB, mode, sql string, args ...any) string {
	t.Helper()
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "set local plan_cache_mode = "+mode+"; set local enable_seqscan = off")
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), "explain (costs off) "+sql, append([]any{pgx.QueryExecModeCacheDescribe}, args...)...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(lines, "\n")
}

// A statement that its caller gave up on, and that the server runs late, takes back nothing that was named since.
func TestALateStatementTakesNoNewNameBack(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "m"}
	hash := sha256.Sum256([]byte("m"))
	_, err := db.Begin(t.Context(), "r", []projector.Attempt{a}, nil)
	require.NoError(t, err)
	for _, call := range []int{0, 1} {
		_, err = db.Pool().Exec(t.Context(), constants(t)["doneSQL"], "p/a", hash[:], "r", call)
		require.NoError(t, err)
		require.Equal(t, 1, count(t, db, `select count(*) from kinora.inflight`))
	}
	_, err = db.Begin(t.Context(), "r", nil, []projector.Attempt{a})
	require.NoError(t, err)
	require.Zero(t, count(t, db, `select count(*) from kinora.inflight`))
}
