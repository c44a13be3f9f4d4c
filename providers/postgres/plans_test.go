package postgres_test

import (
	"context"
	"fmt"
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

// fillParked parks n messages of a projector by SQL, each with a separate hold and inLane
// messages in its lane.
func fillParked(t *testing.T, db *postgres.DB, projector string, n, inLane int) {
	t.Helper()
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.parked (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, code, attempts, version)
		select $1::text, 1, 'p/a', '{p/a}', 'm' || g || '-' || i, 'm' || g || '-' || i, '', '', sha256(g::text::bytea), '', '', '{}',
			case when i = 1 then 'unknown' else 'held' end, '', 0, '' from generate_series(1, $2::int) g, generate_series(1, $3::int) i`, projector, n, inLane)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `
		insert into kinora.holds (projector, generation, lane, due_at) select $1::text, 1, sha256(g::text::bytea), clock_timestamp() from generate_series(1, $2::int) g`, projector, n)
	require.NoError(t, err)
}

// fillUnable parks n messages of a projector by SQL that need one of three things, each in a lane with another one behind it.
func fillUnable(t *testing.T, db *postgres.DB, projector string, n int) {
	t.Helper()
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.parked (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, needs, code, attempts, version)
		select $1::text, 1, 'p/a', '{p/a}', 'u' || g || '-' || i, 'u' || g || '-' || i, '', '', sha256(('u' || g)::bytea), '', repeat('x', 1000)::bytea, '{}',
			case when i = 1 then 'unable' else 'held' end, case when i = 1 then 'event t ' || g % 3 + 2 else '' end, '', 0, '' from generate_series(1, $2::int) g, generate_series(1, 2) i`, projector, n)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `
		insert into kinora.holds (projector, generation, lane, due_at) select $1::text, 1, sha256(('u' || g)::bytea), '9999-12-30 00:00Z' from generate_series(1, $2::int) g`, projector, n)
	require.NoError(t, err)
}

// pages returns how many pages a call reads, by the server's statistics. A connection adds what it has read up to ten seconds
// later, so those of filled, on which rows were written before the call, add theirs first.
func pages(t *testing.T, pool *pgxpool.Pool, call func(), filled ...*postgres.DB) int {
	t.Helper()
	flush := func(pool *pgxpool.Pool) {
		for _, c := range pool.AcquireAllIdle(t.Context()) {
			_, err := c.Exec(t.Context(), `select pg_stat_force_next_flush()`)
			c.Release()
			require.NoError(t, err)
		}
	}
	read := func() (n int) {
		flush(pool)
		require.NoError(t, pool.QueryRow(t.Context(), `
			select sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)) from pg_statio_user_tables where schemaname = 'kinora'`).Scan(&n))
		return n
	}
	for _, db := range filled {
		flush(db.Pool())
	}
	before := read()
	call()
	return read() - before
}

// The statements of a unit read only a few pages, even if many lanes of another projector are
// held and as many dead rows are left, and even if their plans were made while the tables were
// empty.
func TestTheCostOfUnitsIsFlat(t *testing.T) {
	t.Parallel()
	const many = 100_000 // with fewer, the planner may walk
	db := postgrestest.OpenBusy(t, nil, totals)
	exec := func(sql string, args ...any) {
		_, err := db.Pool().Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	for _, table := range []string{"holds", "parked", "in_flight", "runners", "checkpoints", "markers"} {
		exec("alter table kinora." + table + " set (autovacuum_enabled = false)")
		exec("vacuum analyze kinora." + table) // their statistics say empty
	}
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	one, err := postgres.New(pool, nil)
	require.NoError(t, err)
	n, position := 0, int64(0)
	checkpoint := begins(t, one, 0, provider.ModeLive)
	unit := func(messages int) provider.Unit {
		u := provider.Unit{Projector: "p"}
		for range messages {
			n++
			u.Messages = append(u.Messages, delivery(fmt.Sprint("new-", n)))
		}
		return u
	}
	events := func(messages int) provider.Unit {
		u := unit(messages)
		for i := range u.Messages {
			position++
			u.Messages[i].Position = position
		}
		return u
	}
	moves := func(u provider.Unit) provider.Unit {
		u.Advance = advance(checkpoint, position)
		checkpoint.Place.Position = position
		return u
	}
	careful := &provider.Worker{Runner: "me"}
	calls := map[string]func() error{
		"tx":                  func() error { return do(t.Context(), one, unit(1), nil) },
		"tx, many":            func() error { return do(t.Context(), one, unit(10), nil) },
		"batch":               func() error { return queue(t.Context(), one, unit(1), nil) },
		"batch, 10":           func() error { return queue(t.Context(), one, unit(10), nil) },
		"events":              func() error { return do(t.Context(), one, events(10), nil) },
		"events, batch":       func() error { return queue(t.Context(), one, events(10), nil) },
		"move":                func() error { return do(t.Context(), one, moves(events(10)), nil) },
		"move, batch":         func() error { return queue(t.Context(), one, moves(events(10)), nil) },
		"move without events": func() error { return queue(t.Context(), one, moves(unit(0)), nil) },
		"unapplied": func() error {
			_, err := one.Unapplied(t.Context(), provider.Build{Projector: "p"}, events(10).Messages)
			return err
		},
		"prune applied": func() error {
			_, err := one.PruneApplied(t.Context(), provider.Build{Projector: "p"}, []string{"p/a"}, 10)
			return err
		},
		"name": func() error {
			return one.InFlight(t.Context(), provider.Build{Projector: "p"}, *careful, []string{"a", "b"})
		},
		"beat":    func() error { _, err := one.Beat(t.Context(), "me", 1e9, 1e9); return err },
		"careful": func() error { u := unit(10); u.Careful = careful; return do(t.Context(), one, u, nil) },
		"due": func() error {
			_, err := one.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 32, Each: 32})
			return err
		},
		"due, lanes": func() error {
			_, err := one.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Lanes: []provider.Lane{{1}, {2}}, Keys: 32, Each: 32})
			return err
		},
		"parked": func() error {
			u := unit(1)
			u.Messages[0].Parked = &provider.Parked{Projector: "p", Lane: u.Messages[0].Lane, Seq: 1}
			return do(t.Context(), one, u, nil)
		},
	}
	before := map[string]int{}
	for name, call := range calls {
		for range 10 { // so that a plan may be kept
			require.NoError(t, call(), name)
		}
		before[name] = pages(t, pool, func() { require.NoError(t, call(), name) })
	}
	defer fillAround(t, db, many, exec)()
	for name, call := range calls {
		if name == "due" {
			// it walks lanes that were due, until the dead rows are removed
			continue
		}
		require.NoError(t, call(), name)
		now := pages(t, pool, func() { require.NoError(t, call(), name) }, db)
		t.Logf("%s: %d pages, with many rows %d", name, before[name], now)
		require.Less(t, now, before[name]+200, name)
	}
}

// fillAround adds rows of other projectors, and rows of p that are deleted again, while a transaction
// keeps the server from removing them. done ends the transaction.
func fillAround(t *testing.T, db *postgres.DB, many int, exec func(string, ...any)) (done func()) {
	t.Helper()
	fillParked(t, db, "other", many, 1)
	exec(`insert into kinora.in_flight select 'm' || g, 'other', 'another', 1 from generate_series(1, $1::int) g`, many)
	exec(`insert into kinora.markers (handler, generation, message_id, position) select 'other/a', 1, 'm' || g, g from generate_series(1, $1::int) g`, many)
	exec(`insert into kinora.checkpoints select 'other' || g, 1, 0, '', null, '', 'live', gen_random_uuid(), '[]' from generate_series(1, $1::int) g`, many)
	// it may see rows that are deleted now, so that the server keeps them
	open, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	_, err = open.Exec(t.Context(), `set transaction isolation level repeatable read; select 1 from kinora.generations`)
	require.NoError(t, err)
	fillParked(t, db, "p", many, 1)
	exec(`insert into kinora.in_flight select 'd' || g, 'p', 'another', 1 from generate_series(1, $1::int) g`, many)
	exec(`delete from kinora.holds where projector = 'p'`)
	exec(`delete from kinora.parked where projector = 'p'`)
	exec(`delete from kinora.in_flight where projector = 'p'`)
	exec(`delete from kinora.checkpoints where projector <> 'p'`)
	return func() { _ = open.Rollback(context.Background()) }
}

// A listing reads only the first messages of each lane, however long it is and however many
// others there are.
func TestTheCostOfDueIsFlat(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	exec := func(sql string) {
		_, err := db.Pool().Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("alter table kinora.holds set (autovacuum_enabled = false); alter table kinora.parked set (autovacuum_enabled = false)")
	exec("analyze kinora.holds, kinora.parked")
	fillParked(t, db, "other", 50_000, 1)
	fillParked(t, db, "p", 20, 2_000)
	exec(`update kinora.parked set class = 'held' where projector = 'p'`)
	exec(`update kinora.parked set state = 'skipped', resolved_at = now() where projector = 'other' and id % 2 = 0`)
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	one, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for _, f := range []provider.DueFilter{
		{Builds: []provider.Build{{Projector: "p"}}, Keys: 10, Each: 5},
		{Builds: []provider.Build{{Projector: "none"}, {Projector: "p"}}, Keys: 10, Each: 5},
	} {
		var list []provider.Parked
		n := pages(t, pool, func() {
			list, err = one.Due(t.Context(), f)
			require.NoError(t, err)
		}, db)
		require.Len(t, list, 50)
		require.Less(t, n, 1000, "pages")
	}
}

// Lookups use the intended index, whatever the statistics; those in batches run after noScanSQL.
func TestThePlansOfParkedMessages(t *testing.T) {
	t.Parallel()
	lane := [][]byte{make([]byte, 32)}
	for name, when := range map[string]string{"fresh": "after", "stale": "before"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			exec := func(sql string) {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			exec("alter table kinora.holds set (autovacuum_enabled = false); alter table kinora.parked set (autovacuum_enabled = false)")
			if when == "before" {
				exec("vacuum analyze kinora.holds, kinora.parked")
			}
			fillParked(t, db, "p", 20_000, 1)
			fillParked(t, db, "other", 20_000, 1)
			fillUnable(t, db, "p", 20_000)
			if when == "after" {
				exec("vacuum analyze kinora.holds, kinora.parked")
			}
			all := constants(t)
			for name, c := range map[string]struct {
				args []any
				want []string
			}{
				"dueSQL":        {[]any{[]string{"p"}, []int{1}, 10, 10, nil}, []string{"using holds_due_idx on holds", "using parked_lane_idx on parked", "using parked_pkey on parked"}},
				"dueSQL, lanes": {[]any{[]string{"p"}, []int{1}, 10, 10, lane}, []string{"using holds_pkey on holds", "using parked_lane_idx on parked", "using parked_pkey on parked"}},
				"dueAbleSQL": {[]any{[]string{"p"}, []int{1}, 10, 10, nil, []string{"p", "p"}, []int{1, 1}, []string{"event t 2", "event t 4"}}, []string{
					"using parked_needs_idx on parked", "using holds_pkey on holds", "using holds_due_idx on holds", "using parked_lane_idx on parked", "using parked_pkey on parked"}},
				"dueAbleSQL, lanes": {[]any{[]string{"p"}, []int{1}, 10, 10, lane, []string{"p"}, []int{1}, []string{"event t 2"}}, []string{
					"using holds_pkey on holds", "using parked_lane_idx on parked", "using parked_pkey on parked"}},
				"needsSQL":        {[]any{[]string{"p"}, []int{1}, 1000, []string{""}}, []string{"Index Only Scan using parked_needs_idx on parked", "Index Scan using parked_needs_idx on parked"}},
				"trySQL":          {[]any{"p", lane[0], 1, 0, []string{}, 5, 1, 1}, []string{"using holds_pkey on holds", "using parked_lane_idx on parked"}},
				"lockLanesSQL":    {[]any{"p", 1, lane}, []string{"using holds_pkey on holds"}},
				"awaitLanesSQL":   {[]any{"p", 1, lane}, []string{"using holds_pkey on holds"}},
				"firstInLanesSQL": {[]any{"p", 1, lane}, []string{"using parked_lane_idx on parked"}},
				"releaseSQL": {[]any{fmt.Sprintf(`[{"projector": "p", "generation": 1, "lane": "\\x%x", "changed": 1}]`, lane[0]), `[]`},
					[]string{"using holds_pkey on holds", "using parked_lane_idx on parked"}},
			} {
				sql, _, _ := strings.Cut(name, ",")
				p := plan(t, db, "auto", all[sql], c.args...)
				for _, want := range c.want {
					require.Contains(t, p, want, name)
				}
				require.NotContains(t, p, "Seq Scan on holds", name)
				require.NotContains(t, p, "Seq Scan on parked", name)
			}
		})
	}
}

// The plans inside the functions of units and tasks are made in the server. The functions cannot scan,
// except those that read no table.
func TestTheFunctionsNeverScan(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	rows, err := db.Pool().Query(t.Context(), `select proname::text, coalesce(proconfig::text, '') from pg_proc p join pg_namespace n on n.oid = pronamespace where nspname = 'kinora'`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Name, Config string }])
	require.NoError(t, err)
	require.Len(t, all, 18)
	for _, f := range all {
		if f.Name != "hold_gap" && f.Name != "refuse_write" && f.Name != "unmarked" {
			require.Contains(t, f.Config, "enable_seqscan=off", f.Name)
		}
	}
}

// Pruning reads only the markers that it deletes, also if the statistics are from an empty table.
func TestTheCostOfPruningIsFlat(t *testing.T) {
	t.Parallel()
	const n = 100_000
	db := postgrestest.Open(t, nil)
	exec := func(sql string, args ...any) {
		_, err := db.Pool().Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec("alter table kinora.markers set (autovacuum_enabled = false)")
	exec("vacuum analyze kinora.markers")
	exec(`insert into kinora.markers (handler, generation, message_id, position, processed_at)
		select h, 1, 'm' || g, case h when 'p/foreign' then null else g end, now() - case h when 'p/a' then interval '0' else interval '10 days' end
		from generate_series(1, $1::int) g, unnest('{p/a,q/a,p/foreign}'::text[]) h`, n)
	begins(t, db, n, provider.ModeLive)
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	one, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for name, call := range map[string]func() (int, error){
		"applied": func() (int, error) {
			return one.PruneApplied(t.Context(), provider.Build{Projector: "p"}, []string{"p/a", "p/b"}, 10)
		},
		"old, without a checkpoint": func() (int, error) { return one.Prune(t.Context(), "q", []string{"q/a"}, 24*time.Hour, 10) },
		"old, without a position":   func() (int, error) { return one.Prune(t.Context(), "p", []string{"p/foreign"}, 24*time.Hour, 10) },
	} {
		for range 8 {
			deleted := 0
			read := pages(t, pool, func() {
				deleted, err = call()
				require.NoError(t, err, name)
			}, db)
			require.Equal(t, 10, deleted, name)
			require.Less(t, read, 300, name)
		}
	}
}
