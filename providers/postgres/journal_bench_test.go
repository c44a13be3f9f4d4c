package postgres_test

import (
	"context"
	"fmt"
	"sort"
	"testing"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// attempt is one at a message of its own.
func attempt(i int) projector.Attempt {
	return projector.Attempt{Projector: "p", Handler: "p/a", MessageID: fmt.Sprintf("m-%d", i), Key: fmt.Sprintf("k-%d", i%1000), Takes: []string{"t"}}
}

// What Begin costs beside what others leave behind: dead rows that an open transaction keeps, and parked messages.
func BenchmarkBegin(b *testing.B) {
	for name, prepare := range map[string]func(b *testing.B, db *postgres.DB){
		"empty":               func(*testing.B, *postgres.DB) {},
		"beside dead rows":    func(b *testing.B, db *postgres.DB) { deadNames(b, db, 300_000) },
		"beside parked rows":  func(b *testing.B, db *postgres.DB) { crowdedLanes(b, db) },
		"in a lane of 50,000": func(b *testing.B, db *postgres.DB) { crowdedLanes(b, db) },
	} {
		b.Run(name, func(b *testing.B) {
			db := postgrestest.OpenBusy(b, nil)
			warm(b, db)
			prepare(b, db)
			var last []projector.Attempt
			var took []time.Duration
			b.ResetTimer()
			for i := range b.N {
				a := attempt(i)
				if name == "in a lane of 50,000" {
					a.Key = "crowded"
				}
				at := time.Now()
				v, err := db.Begin(b.Context(), "me", []projector.Attempt{a}, last)
				took = append(took, time.Since(at))
				require.NoError(b, err)
				require.Equal(b, projector.Clear, v[0])
				last = []projector.Attempt{a}
			}
			sort.Slice(took, func(i, j int) bool { return took[i] < took[j] })
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-median")
		})
	}
}

// warm makes connections prepare their statements while the tables are empty, and empty to the planner.
func warm(t testing.TB, db *postgres.DB) {
	_, err := db.Pool().Exec(t.Context(), `vacuum analyze kinora.inflight, kinora.parked`)
	require.NoError(t, err)
	var last []projector.Attempt
	for i := range 20 {
		_, err := db.Begin(t.Context(), "warm", []projector.Attempt{attempt(i)}, last)
		require.NoError(t, err)
		last = []projector.Attempt{attempt(i)}
	}
	_, err = db.Begin(t.Context(), "warm", nil, last)
	require.NoError(t, err)
}

// deadNames leaves n rows that cannot be vacuumed.
func deadNames(t testing.TB, db *postgres.DB, n int) {
	old, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = old.Rollback(context.Background()) })
	_, err = old.Exec(t.Context(), `select pg_current_xact_id()`)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `insert into kinora.inflight (handler, message_hash, runner, call) select 'p/a', sha256(('d-' || g)::bytea), 'other', 1 from generate_series(1, $1::int) g`, n)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `delete from kinora.inflight where runner = 'other'`)
	require.NoError(t, err)
}

// crowdedLanes parks 100,000 messages that are in nobody's way: of another handler that takes the same types, half of
// them in one lane.
func crowdedLanes(t testing.TB, db *postgres.DB) {
	_, err := db.Pool().Exec(t.Context(), `
insert into kinora.parked (projector, handler, message_id, message_hash, topic, key, key_hash, type, holds, payload, headers, class, code, attempts, version)
select 'p', 'p/b', 'x-' || g, sha256(('x-' || g)::bytea), 't', k, sha256(k::bytea), 't', true, '', '{}', case when g % 100 = 0 then 'permanent' else 'held' end, '', 1, ''
from generate_series(1, 100000) g, lateral (select case when g % 2 = 0 then 'crowded' else 'q-' || g % 1000 end as k) k`)
	require.NoError(t, err)
}
