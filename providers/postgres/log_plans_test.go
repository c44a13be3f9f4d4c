package postgres_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// Pages walk the primary key, whatever the statistics say: no statement sorts or scans the table.
// Those of a batch run after byIndexSQL, so that a plan which is made while there are few events can
// be kept. The others are planned on each call.
func TestThePlansOfTheLog(t *testing.T) {
	t.Parallel()
	types := []string{"t"}
	batched := map[string][]any{
		"headSQL": {0}, "logSQL": {0, 50_000, 501, false}, "logEndSQL": {0, 50_000, 20_000},
		"logFilteredSQL": {0, 50_000, 20_000, 501, 50_000, nil, types, 2, 8, true},
	}
	single := map[string][]any{
		"logOldSQL": {0, 1_000_000}, "logHeadSQL": nil, "logNextSQL": {0}, "logSinceSQL": {0, "2020-01-01"}, "logPlacesSQL": {[]string{uuid.NewString()}},
		"logEventsSQL": {[]string{uuid.NewString()}},
	}
	all := constants(t)
	check := func(t *testing.T, db *postgres.DB, statements map[string][]any) {
		t.Helper()
		for name, args := range statements {
			for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
				p := plan(t, db, mode, all[name], args...)
				index := "using events_pkey on events"
				if name == "logPlacesSQL" || name == "logEventsSQL" {
					index = "using events_id_key on events"
				}
				require.Contains(t, p, index, "%s, %s", name, mode)
				for _, not := range []string{"Seq Scan on events", "Bitmap", "Sort"} {
					require.NotContains(t, p, not, "%s, %s", name, mode)
				}
			}
		}
	}
	for name, when := range map[string]string{"fresh": "after", "stale": "before"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			byIndex := borrowed(t, nil, db.Pool().Config().ConnString(), func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["enable_seqscan"], c.ConnConfig.RuntimeParams["enable_bitmapscan"] = "off", "off"
			})
			exec := func(sql string) {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			exec("alter table kinora.events set (autovacuum_enabled = false)")
			appendOne(t, db, "a-1")
			if when == "before" {
				exec("vacuum analyze kinora.events")
			}
			check(t, byIndex, batched)
			exec(`insert into kinora.streams (stream, category, version) select 'b-' || g, 'b', 1 from generate_series(1, 50000) g`)
			exec(`insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
				select 'b-' || g, 1, gen_random_uuid(), 't', 1, '{}', '{}', clock_timestamp() from generate_series(1, 50000) g`)
			if when == "after" {
				exec("vacuum analyze kinora.events")
			}
			check(t, byIndex, batched)
			check(t, db, single)
		})
	}
}

// A connection that has read an empty log many times reads a long one with few pages of the table.
func TestTheCostOfALogPageIsFlat(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	_, err := db.Pool().Exec(t.Context(), "alter table kinora.events set (autovacuum_enabled = false); alter table kinora.streams set (autovacuum_enabled = false)")
	require.NoError(t, err)
	appendOne(t, db, "a-1")
	_, err = db.Pool().Exec(t.Context(), "vacuum analyze kinora.events")
	require.NoError(t, err)
	one := borrowed(t, nil, db.Pool().Config().ConnString(), func(c *pgxpool.Config) { c.MaxConns = 1 })
	queries := []provider.LogQuery{{}, {After: 1}, {Filter: eventstore.LogFilter{Types: []string{"counted"}}}, {Limit: 1, Age: 1}, {After: 30_000, Unsettled: true, Limit: 10}}
	for range 10 { // so that plans are kept
		for _, q := range queries {
			page(t, one, q)
		}
	}
	_, err = db.Pool().Exec(t.Context(), `insert into kinora.streams (stream, category, version) select 'b-' || g, 'b', 1 from generate_series(1, 60000) g`)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
		select 'b-' || g, 1, gen_random_uuid(), 'counted', 1, '{}', '{}', clock_timestamp() from generate_series(1, 60000) g`)
	require.NoError(t, err)
	page(t, one, provider.LogQuery{})
	for _, q := range append(queries, provider.LogQuery{After: 59_000}) {
		n := pages(t, one.Pool(), func() { page(t, one, q) }, db)
		t.Logf("%+v: %d pages", q, n)
		require.Less(t, n, 300, "%+v", q)
	}
	// A filter that selects nothing moves the end.
	q, covered := provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{"other"}}}, 0
	for more := true; more; covered++ {
		p := page(t, one, q)
		require.Empty(t, p.Events)
		require.Greater(t, p.End.Position, q.After)
		require.LessOrEqual(t, p.End.Position-q.After, int64(provider.LogPageScan))
		q.After, more = p.End.Position, p.More
	}
	require.Equal(t, []int64{60_001, 4}, []int64{q.After, int64(covered)})
}
