package postgres_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// in returns the unit in another generation.
func in(generation int, u provider.Unit) provider.Unit {
	u.Generation = generation
	return u
}

// becomes gives a generation of projector p, which has no row yet, a state.
func becomes(t *testing.T, db *postgres.DB, generation int, state provider.GenerationState) {
	t.Helper()
	ok, err := db.SetGeneration(t.Context(), provider.Generation{Build: provider.Build{Projector: "p", Generation: generation}, State: state})
	require.NoError(t, err)
	require.True(t, ok)
}

func hasCode(t *testing.T, code string, err error, what ...any) {
	t.Helper()
	var e *provider.Error
	require.ErrorAs(t, err, &e, what...)
	require.Equal(t, provider.ClassTransient, e.Class, what...)
	require.Equal(t, code, e.Code, what...)
}

func TestGenerationsApplyTheSameMessages(t *testing.T) {
	t.Parallel()
	for form, run := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			for range 2 {
				for generation := range 4 { // 0 means 1
					require.NoError(t, run(t.Context(), db, in(generation, marked("m")), fmt.Sprint("k", max(generation, 1))))
				}
			}
			for generation := 1; generation < 4; generation++ {
				require.Equal(t, 1, count(t, db, fmt.Sprintf(`select n from totals where key = 'k%d'`, generation)))
			}
		})
	}
}

// No unit of a retired generation commits, whatever its messages are and in whichever form it opens.
func TestNoUnitOfARetiredGenerationCommits(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	c := begins(t, db, 5, provider.ModeLive)
	end := paused(t, db, marked("parked"), asides(marked("parked")))
	require.NoError(t, end())
	due, err := db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 1, Each: 1})
	require.NoError(t, err)
	require.Len(t, due, 1)
	held := delivery("behind")
	held.Lane = due[0].Lane
	unmarked := delivery("unmarked")
	unmarked.Mark = false
	moves, movesNone, read, careful, serial, dry := event(map[string]int64{"e": 6}, "e"), marked(), event(map[string]int64{"e": 6}, "e"), marked("m"), marked("m"), marked("m")
	moves.Advance, movesNone.Advance = advance(c, 6), advance(c, 6)
	read.Reader = &provider.Reader{Mode: c.Mode, Token: c.Token}
	careful.Careful, serial.Serial = &provider.Worker{Runner: "me"}, true
	dry.DryRun = func([]provider.Change) { t.Error("the dry run has ended well") }
	forged := movesNone
	forged.Advance = &provider.Advance{From: 5, To: provider.LogPlace{Position: 9}, Mode: provider.ModeEnded, Token: c.Token}
	units := map[string]provider.Unit{
		"marked": marked("m"), "unmarked": {Messages: []provider.Message{unmarked}}, "held": {Messages: []provider.Message{held}},
		"an event": event(map[string]int64{"e": 6}, "e"), "an old event": event(map[string]int64{"e": 5}, "e"), "no message": {},
		"a move": moves, "a move without events": movesNone, "a move in the mode of its end": forged, "a reader": read,
		"careful": careful, "serial": serial, "a dry run": dry, "once": {Once: true}, "a switch": {Once: true, Switch: &provider.Switch{}},
		"a snapshot": {Once: true, Switch: &provider.Switch{Snapshot: true}},
		"a replay":   {Messages: []provider.Message{{ID: "parked", Lane: due[0].Lane, Handlers: []provider.Handler{{Name: "p/a"}}, Parked: &due[0]}}},
	}
	becomes(t, db, 1, provider.GenerationRetired)
	for form, run := range forms {
		for name, u := range units {
			u.Projector = "p"
			err := run(t.Context(), db, u, "k")
			require.ErrorIs(t, err, provider.ErrEnded, "%s, %s", form, name)
			hasCode(t, provider.CodeEnded, err, form, name)
			require.NoError(t, run(t.Context(), db, in(2, marked(fmt.Sprint(form, name))), "other"), "another generation")
		}
	}
	require.Zero(t, count(t, db, `select count(*) from totals where key = 'k'`))
	ended, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p", Generation: 1})
	require.NoError(t, err)
	require.Equal(t, int64(5), ended.Place.Position)
	revived := ended
	revived.Mode = provider.ModeLive
	ok, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: "p", Generation: 1}, ended, revived)
	require.NoError(t, err)
	require.False(t, ok, "it has ended for ever")
}

// The retirement waits for an open unit of the generation. Then no other one can begin.
func TestRetirementWaitsForOpenUnits(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	end := paused(t, db, marked("m"), nothing)
	done := make(chan bool, 1)
	go func() {
		ok, err := db.SetGeneration(t.Context(), provider.Generation{Build: provider.Build{Projector: "p", Generation: 1}, State: provider.GenerationRetired})
		done <- ok && err == nil
	}()
	waiting(t, db, 1)
	require.Empty(t, done)
	require.Zero(t, count(t, db, `select count(*) from kinora.generations`))
	require.NoError(t, end())
	require.True(t, <-done)
	require.ErrorIs(t, do(t.Context(), db, marked("n"), nil), provider.ErrEnded)
}

func TestClearGenerationInSteps(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals, `create table "odd ""name" ()`, `create table "p.T" ()`, `create schema s`, `create table s."T" ()`)
	for generation := 1; generation <= 2; generation++ {
		messages := marked("a", "b", "c", "d", "e")
		require.NoError(t, do(t.Context(), db, in(generation, messages), nil))
		parked := in(generation, marked("f", "g", "h"))
		require.NoError(t, paused(t, db, parked, asides(parked))())
		_, err := db.Decide(t.Context(), provider.ParkedFilter{Generation: generation, Limit: 1}, provider.StateSkipped, provider.Decision{By: "ann", Reason: "test"})
		require.NoError(t, err)
		isQueue(t, db)
	}
	of := provider.Build{Projector: "p", Generation: 1}
	clears := func(tables ...provider.TablePair) (n int, err error) {
		return db.ClearGeneration(t.Context(), of, []string{"p/a", "p/b"}, tables, 3)
	}
	_, err := clears()
	require.ErrorIs(t, err, provider.ErrInput, "no row")
	becomes(t, db, 1, provider.GenerationStandby)
	_, err = clears()
	require.ErrorIs(t, err, provider.ErrInput, "a standby")
	_, err = db.Pool().Exec(t.Context(), `update kinora.generations set state = 'retired'`)
	require.NoError(t, err)
	tables := []provider.TablePair{{Table: "totals"}, {Table: "s.T"}, {Table: "none"}}
	var deleted []int
	for {
		n, err := clears(tables...)
		require.NoError(t, err)
		require.Zero(t, count(t, db, `select count(*) from kinora.holds h where generation = 1 and not exists (
			select from kinora.parked p where p.generation = 1 and p.lane = h.lane)`), "no lane is held without a message")
		if n == 0 {
			break
		}
		require.Equal(t, 1, count(t, db, `select count(*) from pg_tables where tablename = 'totals'`), "tables are dropped last")
		deleted = append(deleted, n)
	}
	require.Equal(t, []int{3, 3, 3, 2}, deleted, "eight markers and three messages")
	require.Zero(t, count(t, db, `select (select count(*) from kinora.markers where generation = 1) + (select count(*) from kinora.parked where generation = 1)
		+ (select count(*) from kinora.holds where generation = 1)`))
	require.Equal(t, 8+3+2, count(t, db, `select (select count(*) from kinora.markers) + (select count(*) from kinora.parked) + (select count(*) from kinora.holds)`))
	require.Equal(t, 1, count(t, db, `select count(*) from pg_tables where tablename in ('totals', 'T', 'p.T')`), "p.T is left")
	require.Equal(t, 1, count(t, db, `select count(*) from kinora.generations`))
	n, err := clears(tables...)
	require.NoError(t, err)
	require.Zero(t, n)
}

// A table that is in use is not waited for longer than a second: units of other generations that read
// it would wait behind this call.
func TestClearGenerationDoesNotWaitForReaders(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	becomes(t, db, 1, provider.GenerationRetired)
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
		require.NoError(t, tx.QueryRow(t.Context(), `select count(*) from totals`).Scan(nil))
		_, err := db.ClearGeneration(t.Context(), provider.Build{Projector: "p", Generation: 1}, nil, []provider.TablePair{{Table: "totals"}}, 1)
		hasCode(t, provider.CodeBusy, err)
		return nil
	}))
	_, err := db.ClearGeneration(t.Context(), provider.Build{Projector: "p", Generation: 1}, nil, []provider.TablePair{{Table: "totals"}}, 1)
	require.NoError(t, err)
}

// The statements of generations read only their own rows, also if their plans are from empty tables.
func TestTheCostOfGenerationsIsFlat(t *testing.T) {
	t.Parallel()
	const n = 50_000
	db := postgrestest.Open(t, nil)
	exec := func(sql string, args ...any) {
		_, err := db.Pool().Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	for _, table := range []string{"markers", "parked", "holds", "generations"} {
		exec("alter table kinora." + table + " set (autovacuum_enabled = false)")
		exec("vacuum analyze kinora." + table)
	}
	for _, generation := range []int{1, 2} { // the generation that is cleared is in the middle of the others
		exec(`insert into kinora.markers (handler, generation, message_id, processed_at) select 'p/a', $2::int * 2, 'm' || g, now() - interval '10 days' from generate_series(1, $1::int) g`, n, generation)
	}
	fillParked(t, db, "p", n, 1)
	exec(`update kinora.parked set state = 'skipped', resolved_at = now() - interval '10 days' where id % 2 = 0`)
	exec(`insert into kinora.markers (handler, generation, message_id, position) select 'p/a', 3, 'm' || g, g from generate_series(1, 100) g`)
	exec(`insert into kinora.parked overriding system value select * from jsonb_populate_recordset(null::kinora.parked, (
		select jsonb_agg(to_jsonb(p) || jsonb_build_object('generation', 3, 'id', 1000000 + id)) from (select * from kinora.parked order by id limit 100) p))`)
	becomes(t, db, 3, provider.GenerationRetired)
	pool, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString()+"&pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	one, err := postgres.New(pool, nil)
	require.NoError(t, err)
	third := provider.Build{Projector: "p", Generation: 3}
	for range 22 {
		read := pages(t, pool, func() {
			unlogged, err := one.Unlogged(t.Context(), third, "p/a", "", 10)
			require.NoError(t, err)
			require.Empty(t, unlogged)
			_, err = one.ClearGeneration(t.Context(), third, []string{"p/a", "p/b"}, nil, 10)
			require.NoError(t, err)
		}, db)
		require.Less(t, read, 700)
	}
	require.Zero(t, count(t, db, `select (select count(*) from kinora.markers where generation = 3) + (select count(*) from kinora.parked where generation = 3)`))
	for range 3 {
		read := pages(t, pool, func() {
			pruned, err := one.Prune(t.Context(), "p", []string{"p/none"}, 0, 10)
			require.NoError(t, err)
			require.Equal(t, 10, pruned)
		})
		require.Less(t, read, 300)
	}
	unlogged, err := one.Unlogged(context.Background(), provider.Build{Projector: "p", Generation: 2}, "p/a", "", 10)
	require.NoError(t, err)
	require.Len(t, unlogged, 10)
}
