package postgres_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/foreignrows"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// Whatever another hand writes into a table, with a hostile value in any column, harms that row, its stream or its key
// only, or the database refuses it: all others are read, published, applied and run, and all lists can be read.
// Promise: G1.16
func TestForeignRowsHarmThemselvesOnly(t *testing.T) {
	t.Parallel()
	for _, name := range slices.Sorted(maps.Keys(foreignrows.Plain)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, noteTables)
			t.Cleanup(func() { // the streams of foreign rows are not those of Kinora
				_, err := db.Pool().Exec(context.Background(), `truncate kinora.streams, kinora.events`)
				require.NoError(t, err)
			})
			rows, err := db.Pool().Query(t.Context(), foreignrows.ColumnsSQL, name)
			require.NoError(t, err)
			columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[foreignrows.Column])
			require.NoError(t, err)
			require.NotEmpty(t, columns)
			for i, row := range foreignrows.Of(name, columns, foreignrows.Plain[name]) {
				n := i + 1
				_, err := db.Pool().Exec(t.Context(), row.SQL(n))
				if err == nil && longtest.On() { // to see which row it is
					require.True(t, t.Run(fmt.Sprintf("%s %.20s", row.Column, row.Value), func(t *testing.T) { othersGoOn(t, db, n) }))
				}
			}
			othersGoOn(t, db, 0)
		})
	}
}

// An event with a high position would make readers pass all later ones. No role may choose a number that a sequence gives.
// Promise: G1.16
func TestNoRoleChoosesAPosition(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	execAll(t, db, script(t, postgres.RolesSQL, "kinora"), script(t, postgres.GrantsSQL, "kinora"))
	var chooses []string
	require.NoError(t, db.Pool().QueryRow(t.Context(), `select coalesce(array_agg(r.rolname || ' ' || c.relname), '{}') from pg_attribute a join pg_class c on c.oid = a.attrelid, pg_roles r
		where c.relnamespace = 'kinora'::regnamespace and a.attidentity = 'a' and r.rolname like 'kinora\_%' and has_column_privilege(r.oid, c.oid, a.attname, 'insert')`).Scan(&chooses))
	require.Empty(t, chooses)
}

// othersGoOn appends, publishes, applies and runs what has nothing to do with foreign rows, and reads all lists.
func othersGoOn(t *testing.T, db *postgres.DB, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience.Limit())
	defer cancel()
	stream, id := fmt.Sprint("good-", n), fmt.Sprint("good", n)
	appended, err := db.Append(ctx, stream, eventstore.Any, drafts(t, n))
	require.NoError(t, err)
	var seen bool
	for e, err := range db.ReadLog(ctx, eventstore.From{}, eventstore.LogFilter{}) {
		require.NoError(t, err)
		seen = seen || e.Stream == stream
	}
	require.True(t, seen)
	enqueue(t, db, id, 1)
	seen = false
	for {
		entries, err := provider.ClaimEntries(ctx, db, provider.EntryQuery{}, claim.Terms{Lease: time.Hour, Limit: 1000, Holder: "me"})
		require.NoError(t, err)
		for _, e := range entries {
			seen = seen || e.Key == id
		}
		if len(entries) == 0 {
			break
		}
	}
	require.True(t, seen)
	enqueueTasks(t, db, draft(id))
	seen = false
	for {
		tasks := claimTasks(t, db, 100)
		for _, is := range tasks {
			seen = seen || is.ID == id
		}
		if len(tasks) == 0 {
			break
		}
	}
	require.True(t, seen)
	p := listed(projector.Options{})
	_, stop := runListed(t, db, projector.FromLog(db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, p.Wait(ctx, db, appended))
	require.NoError(t, stop())
	require.Equal(t, []int{n}, listsOf(t, db)[stream])

	builds := []provider.Build{{Projector: "v", Generation: 1}}
	needs, err := db.Needs(ctx, []provider.Need{{Build: builds[0]}})
	require.NoError(t, err)
	read := map[string]func() (any, error){
		"needs": func() (any, error) { return needs, nil },
		"due": func() (any, error) {
			return db.Due(ctx, provider.DueFilter{Builds: builds, Needs: needs, Keys: 100, Each: 100})
		},
		"entries":     func() (any, error) { return db.Entries(ctx, provider.EntryFilter{}) },
		"parked":      func() (any, error) { return db.Parked(ctx, projector.ParkedFilter{}) },
		"tasks":       func() (any, error) { return db.Tasks(ctx, provider.TaskFilter{}) },
		"counts":      func() (any, error) { return db.TaskCounts(ctx, "") },
		"generations": func() (any, error) { return db.Generations(ctx, "") },
		"acts":        func() (any, error) { return db.Acts(ctx, provider.ActFilter{}) },
		"pauses":      func() (any, error) { return db.Pauses(ctx) },
		"survey":      func() (any, error) { return db.Survey(ctx, 100) },
		"streams":     func() (any, error) { return db.Streams(ctx, provider.StreamFilter{}) },
		"facts": func() (any, error) {
			a, err := admin.New(db)
			require.NoError(t, err)
			return a.Facts(ctx)
		},
		"doctor": func() (any, error) {
			a, err := admin.New(db)
			require.NoError(t, err)
			return a.Doctor(ctx, provider.DiagnosisLimits{})
		},
	}
	for name, f := range read {
		got, err := f()
		require.NoError(t, err, name)
		_, err = json.Marshal(got)
		require.NoError(t, err, name)
	}
}

// Whatever class, needs and due time another hand gives a message, the message is due, stuck, or found by its need, and a
// program that has all needs gets each message that waits once.
// Promise: G1.16
func TestAForeignNeedHidesNoMessage(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	execAll(t, db, `
		create table rows as select row_number() over () as n, class, needs, state, due_at
		from unnest(array['unable', 'unknown', 'held', 'x']) class, unnest(array['', 'event t 1', repeat('x', 2000), E'\x01<script>\n', U&'\FFFD' || 'AA']) needs,
			unnest(array['waiting', 'stuck']) state, unnest('{2000-01-01,9999-12-30 00:00Z}'::timestamptz[]) due_at
		where due_at < now() or class = 'unable' and needs <> '' and state = 'waiting'`,
		`insert into kinora.parked (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, needs, code, attempts, version, state)
		select 'p', 1, '', '{}', n, n, '', '', sha256(n::text::bytea), '', '', '{}', class, needs, '', 0, '', state from rows`,
		`insert into kinora.holds (projector, generation, lane, due_at) select 'p', 1, sha256(n::text::bytea), due_at from rows`)
	builds := []provider.Build{{Projector: "p", Generation: 1}}
	needs, err := db.Needs(t.Context(), []provider.Need{{Build: builds[0]}})
	require.NoError(t, err)
	require.Len(t, needs, 4)
	ids := func(needs []provider.Need) (ids []string) {
		due, err := db.Due(t.Context(), provider.DueFilter{Builds: builds, Needs: needs, Keys: 1000, Each: 10})
		require.NoError(t, err)
		for _, p := range due {
			ids = append(ids, p.MessageID)
		}
		return ids
	}
	all, err := db.Parked(t.Context(), projector.ParkedFilter{Limit: 1000})
	require.NoError(t, err)
	require.Len(t, all, 44)
	waiting, due := []string{}, ids(nil)
	for _, p := range all {
		if p.State == provider.StateWaiting {
			waiting = append(waiting, p.MessageID)
			require.True(t, slices.Contains(due, p.MessageID) || slices.ContainsFunc(needs, func(n provider.Need) bool { return n.Needs == p.Needs }), p)
		}
	}
	require.ElementsMatch(t, waiting, ids(needs))
}

// Each need is stored as a text of its own, and each text that another hand writes is a need of its own.
// Promise: G1.16
func TestEveryTextIsANeed(t *testing.T) {
	t.Parallel()
	texts := []string{"", "event t 1", "a\uFFFD", "\uFFFD", "\uFFFDx", "\uFFFDAA", "\uFFFDAA==", "\uFFFDAB==", "\uFFFDA\nA==", "\uFFFDeA==", "\uFFFD\uFFFDAA=="}
	for _, text := range texts {
		texts = append(texts, "\uFFFD"+base64.StdEncoding.EncodeToString([]byte(text)))
	}
	for _, text := range texts {
		require.Equal(t, text, postgres.StorableNeed(postgres.OriginalNeed(text)), "%q", text)
	}
	for _, need := range append(texts, "\x00", "event t \x00", "\xff", "\uFFFD\xff") {
		stored := postgres.StorableNeed(need)
		require.True(t, utf8.ValidString(stored) && !strings.Contains(stored, "\x00"), "%q", need)
		require.Equal(t, need, postgres.OriginalNeed(stored), "%q", need)
	}
}

// A task that another program added under an id that no API accepts is renewed and changed as others are: it would take the
// leases and the results of the others of its batch with it.
// Promise: G1.16
func TestATaskWithAForeignIDHoldsNoOtherUp(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	_, err := db.Pool().Exec(t.Context(), `insert into kinora.tasks (id, kind, input, next_at) values (repeat('x', 2000), $1, '{}', now()), ('', $1, '{}', now())`, draft("a").Kind)
	require.NoError(t, err)
	enqueueTasks(t, db, draft("good"))
	tasks := claimTasks(t, db, 3)
	require.Len(t, tasks, 3)
	late, err := db.RenewTasks(t.Context(), tasks, time.Hour)
	require.NoError(t, err)
	require.Empty(t, late)
	var changes []provider.TaskChange
	for _, is := range tasks {
		changes = append(changes, provider.TaskChange{ID: is.ID, Token: is.Token, To: provider.TaskAbandoned})
	}
	changed, err := db.ChangeTasks(t.Context(), changes)
	require.NoError(t, err)
	for _, c := range changed {
		require.True(t, c.Applied)
	}
}

// A number of attempts that another program writes into a claimed entry does not stop the marks of others.
// Promise: G1.16
func TestForeignAttemptsStopNoMarks(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	enqueue(t, db, "a", 1)
	enqueue(t, db, "b", 1)
	var marks []outbox.Mark
	for _, e := range claimAll(t, db) {
		marks = append(marks, outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
	}
	require.Len(t, marks, 2)
	execAll(t, db, `update kinora.outbox set attempts = -2147483648 where key = 'a'`)
	late, err := db.MarkEntries(t.Context(), marks)
	require.NoError(t, err)
	require.Empty(t, late)
}
