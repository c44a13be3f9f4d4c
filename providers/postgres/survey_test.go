package postgres_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// A survey reads only as many rows as its limit says, however many there are, and even if the statistics
// are of empty tables.
// Promise: O3.1
func TestTheCostOfASurveyIsFlat(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	exec := func(sql string, args ...any) {
		_, err := db.Pool().Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	for _, table := range []string{"holds", "parked", "in_flight", "checkpoints", "outbox", "tasks", "acts", "streams"} {
		exec("alter table kinora." + table + " set (autovacuum_enabled = false)")
		exec("vacuum analyze kinora." + table)
	}
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	one, err := postgres.New(pool, nil)
	require.NoError(t, err)
	cost := func() int {
		return pages(t, pool, func() {
			s, err := one.Survey(t.Context(), 100)
			require.NoError(t, err)
			require.Len(t, s.Builds, 2)
			require.True(t, s.Builds[0].Parked.AtLeast && s.Builds[1].StuckLanes.AtLeast && s.Entries[0].AtLeast && s.Tasks[0].AtLeast)
			require.Len(t, s.Stuck, 20)
			require.Len(t, s.DueTasks, 2)
			acts, err := one.Acts(t.Context(), openActs)
			require.NoError(t, err)
			require.Empty(t, acts)
		}, db)
	}
	fill := func(prefix string, n int) {
		for _, projector := range []string{"p", "q"} {
			exec(`insert into kinora.parked (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, code, attempts, version, state)
				select $1::text, 1, 'p/a', '{}', $2::text || g, $2::text || g, '', '', sha256(($2::text || g / 20)::bytea), '', '', '{}', case when g % 20 = 0 then 'unknown' else 'held' end, '', 0, '',
					case when g % 20 = 0 then 'stuck' else 'waiting' end from generate_series(0, $3::int) g`, projector, prefix, n)
			exec(`insert into kinora.holds (projector, generation, lane, due_at) select $1::text, 1, sha256(($2::text || g)::bytea), 'infinity' from generate_series(0, $3::int / 20) g`, projector, prefix, n)
		}
		exec(`insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, stuck)
			select $1::text || g, 't', g, 'x', '{}', now(), now(), (array['pending', 'held', 'abandoned', 'failed'])[g % 4 + 1], g % 4 in (0, 3), g % 4 in (1, 2), g % 4 in (2, 3)
			from generate_series(1, $2::int) g`, prefix, n)
		exec(`insert into kinora.tasks (id, kind, input, status, open, next_at)
			select $1::text || g, 't/' || g % 2, '1', (array['pending', 'pending', 'abandoned', 'done'])[g % 4 + 1], g % 4 < 2, now() from generate_series(1, $2::int) g`, prefix, n)
		exec(`insert into kinora.acts (verb, kind, name, decided_by, reason, state, at, ended_at) select 'pause', 'topic', 't', 'a', 'r', 'done', now(), now() from generate_series(1, $1::int)`, n)
	}
	fill("a", 5_000)
	cost() // the plans of the catalog are read
	before := cost()
	fill("b", 20_000)
	require.Less(t, cost(), before+200, "pages, %d with fewer rows", before)
}

var openActs = provider.ActFilter{States: []provider.ActState{provider.ActRequested, provider.ActRunning}}
