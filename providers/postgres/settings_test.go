package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// withSettings returns a DB on the database of db, with sessions that have these settings.
func withSettings(t *testing.T, db *postgres.DB, mode pgx.QueryExecMode, settings map[string]string) *postgres.DB {
	t.Helper()
	cfg := db.Pool().Config()
	for name, value := range settings {
		cfg.ConnConfig.RuntimeParams[name] = value
	}
	cfg.ConnConfig.DefaultQueryExecMode = mode
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	mine, err := postgres.New(pool, nil)
	require.NoError(t, err)
	return mine
}

// A session whose settings change the meaning of what is sent or read is refused before anything is written: by Ready, and
// by all that writes, in a transaction of the caller too.
func TestSettingsThatChangeTheMeaningAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode     pgx.QueryExecMode
		settings map[string]string
		says     string // "": it is right
	}{
		"another encoding":         {pgx.QueryExecModeCacheStatement, map[string]string{"client_encoding": "LATIN1"}, "client_encoding is LATIN1"},
		"dates as text":            {pgx.QueryExecModeExec, map[string]string{"datestyle": "SQL, DMY"}, "DateStyle is SQL, DMY"},
		"dates in simple protocol": {pgx.QueryExecModeSimpleProtocol, map[string]string{"datestyle": "German, DMY"}, "DateStyle is German, DMY"},
		"dates in binary":          {pgx.QueryExecModeCacheStatement, map[string]string{"datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "timezone": "Asia/Kolkata"}, ""},
		"dates of ISO as text":     {pgx.QueryExecModeExec, map[string]string{"datestyle": "ISO, DMY", "timezone": "America/St_Johns"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plain := postgrestest.OpenBusy(t, nil)
			db := withSettings(t, plain, c.mode, c.settings)
			stream := "naive-é"
			std := stdlib.OpenDBFromPool(db.Pool())
			defer func() { require.NoError(t, std.Close()) }()
			draft := func() []eventstore.Draft { return drafts(t, 1) }
			greet := task.Define("mail/greet", func(context.Context, *task.Run[pgx.Tx], string) (bool, error) { return true, nil })
			results := map[string]error{"ready": db.Ready(t.Context())}
			_, results["append"] = db.Append(t.Context(), stream, eventstore.Any, draft())
			results["transact"] = db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				_, err := db.InTx(tx).Append(ctx, stream, eventstore.Any, draft())
				return err
			})
			results["a transaction of the caller"] = pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
				_, err := db.InTx(tx).Append(t.Context(), stream, eventstore.Any, draft())
				return err
			})
			results["a task"] = pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
				return db.TasksIn(tx).Enqueue(t.Context(), greet.New("é", "ann"))
			})
			results["database/sql"] = func() error {
				tx, err := std.BeginTx(t.Context(), nil)
				require.NoError(t, err)
				if _, err = db.InSQLTx(tx).Append(t.Context(), stream, eventstore.Any, draft()); err != nil {
					_ = tx.Rollback()
					return err
				}
				return tx.Commit()
			}()
			results["a unit"] = db.Do(t.Context(), provider.Unit{Projector: "p", Generation: 1}, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
				return provider.Closing{}, nil
			})
			for what, err := range results {
				if c.says == "" {
					require.NoError(t, err, what)
					continue
				}
				require.ErrorIs(t, err, postgres.ErrSettings, what)
				require.ErrorContains(t, err, c.says, what)
			}
			want := 0
			if c.says == "" {
				want = 4
				n := 0
				for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
					require.NoError(t, err)
					require.Equal(t, stream, e.Stream)
					n++
				}
				require.Equal(t, want, n)
			}
			var got int
			require.NoError(t, plain.Pool().QueryRow(t.Context(), `select count(*) from kinora.events where stream = $1`, stream).Scan(&got))
			require.Equal(t, want, got)
			require.NoError(t, plain.Pool().QueryRow(t.Context(), `select count(*) from kinora.events`).Scan(&got))
			require.Equal(t, want, got)
		})
	}
}

// Open chooses the encoding of its sessions, whatever the role and the database say. The share of a stream in SQL is that
// in Go, whatever the meaning of a backslash.
func TestSettingsOfTheDatabaseChangeNothing(t *testing.T) {
	t.Parallel()
	plain := postgrestest.OpenBusy(t, nil)
	for _, sql := range []string{`client_encoding = 'LATIN1'`, `standard_conforming_strings = off`, `bytea_output = 'escape'`, `quote_all_identifiers = on`, `array_nulls = off`} {
		var name string
		require.NoError(t, plain.Pool().QueryRow(t.Context(), `select current_database()`).Scan(&name))
		_, err := plain.Pool().Exec(t.Context(), "alter database "+pgx.Identifier{name}.Sanitize()+" set "+sql)
		require.NoError(t, err)
	}
	db, err := postgres.Open(t.Context(), plain.Pool().Config().ConnString(), nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Ready(t.Context()))
	const streams, shares = 60, 4
	for i := range streams {
		appendOne(t, db, fmt.Sprintf("naive-é%d", i))
	}
	var stored int
	require.NoError(t, plain.Pool().QueryRow(t.Context(), `select count(*) from kinora.events where stream like 'naive-é%'`).Scan(&stored))
	require.Equal(t, streams, stored)
	seen := 0
	for share := range shares {
		for _, e := range page(t, db, provider.LogQuery{Share: share, Shares: shares}).Events {
			require.Equal(t, share, provider.SegmentOf(e.Stream, shares))
			seen++
		}
	}
	require.Equal(t, streams, seen)
}

// Row level security that hides events is an error, for each reader and at Ready, and never a gap.
// Promise: G7.3
func TestHiddenRowsAreAnError(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	exec := func(sql string) {
		t.Helper()
		_, err := db.Pool().Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec(script(t, postgres.RolesSQL, "kinora"))
	exec(script(t, postgres.GrantsSQL, "kinora"))
	for i := range 10 {
		appendOne(t, db, fmt.Sprint("a-", i))
	}
	reader := as(t, db, "kinora_projector")
	require.Len(t, page(t, reader, provider.LogQuery{}).Events, 10)
	for _, policy := range []string{`using (position % 2 = 0)`, `using (false)`, `using (true)`} {
		exec(`create policy half on kinora.events for select ` + policy)
		exec(`alter table kinora.events enable row level security`)
		for _, mine := range []*postgres.DB{reader, as(t, db, "kinora_projector")} { // one that has read before, and one that has not
			for _, q := range []provider.LogQuery{{}, {After: 3}, {Share: 1, Shares: 2}, {Unsettled: true}} {
				_, err := mine.LogPage(t.Context(), q)
				require.ErrorIs(t, err, eventstore.ErrUnsafeLog)
				require.ErrorContains(t, err, "row level security of kinora.events")
			}
			require.ErrorIs(t, mine.ReadyFor(t.Context(), provider.RunnerService), eventstore.ErrUnsafeLog)
		}
		require.Len(t, page(t, db, provider.LogQuery{}).Events, 10, "the owner sees all")
		exec(`alter table kinora.events disable row level security; drop policy half on kinora.events`)
	}
	require.Len(t, page(t, reader, provider.LogQuery{}).Events, 10)
	exec(`alter table kinora.markers enable row level security`)
	require.ErrorContains(t, reader.ReadyFor(t.Context(), provider.RunnerService), "row level security of kinora.markers")
}

// A session with session_replication_role = replica runs no ordinary trigger. Its open append still holds readers back.
// Promise: G7.3
func TestAnAppendOfAReplicaSessionIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	replica := withSettings(t, db, pgx.QueryExecModeCacheStatement, map[string]string{"session_replication_role": "replica"})
	tx, err := replica.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = replica.InTx(tx).Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1))
	require.NoError(t, err)
	appendOne(t, db, "a-2")
	p := page(t, db, provider.LogQuery{})
	require.Empty(t, p.Events)
	require.Len(t, p.Waiting, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"a-1", "a-2"}, streamsOf(page(t, db, provider.LogQuery{})))
}

// Payloads are read as they are, whatever bytea_output is, also by a pool that reads text.
func TestBytesAreReadInAnyForm(t *testing.T) {
	t.Parallel()
	plain := postgrestest.OpenBusy(t, nil)
	enqueue(t, plain, "a", 1)
	payload := []byte(`{"é": "a\\b"}`)
	_, err := plain.Pool().Exec(t.Context(), `update kinora.outbox set payload = $1`, payload)
	require.NoError(t, err)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		db := withSettings(t, plain, mode, map[string]string{"bytea_output": "escape"})
		require.NoError(t, db.Ready(t.Context()))
		entries, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Lease: time.Millisecond, Limit: 1, Holder: "me"})
		require.NoError(t, err, mode)
		require.Len(t, entries, 1, mode)
		require.Equal(t, string(payload), string(entries[0].Payload), mode)
	}
}
