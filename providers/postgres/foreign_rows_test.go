package postgres_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// hostile are values of each type, as SQL. Numbers of 131,000 digits are short in the table and long as text.
var hostile = map[string][]string{
	"integer":                  {"2147483647", "-2147483648", "0", "-1"},
	"bigint":                   {"9223372036854775807", "-9223372036854775808", "0", "-1"},
	"boolean":                  {"true", "false"},
	"uuid":                     {"'00000000-0000-0000-0000-000000000000'"},
	"text":                     {"''", "repeat('x', 2000)", `E'\x01\u202e<script>'`, "'a' || chr(1114111)"},
	"bytea":                    {"''", "'\\x00'", "convert_to(repeat('x', 70000000), 'UTF8')"},
	"text[]":                   {"'{}'", "array[null]::text[]", "'{{a},{b}}'", "'[5:6]={a,b}'"},
	"jsonb":                    {"'null'", "'1'", "'[]'", `'{"": null}'`, `'"x"'`, "('[' || repeat('1e131000,', 9000) || '0]')::jsonb", "(repeat('[', 5000) || repeat(']', 5000))::jsonb"},
	"timestamp with time zone": {"'infinity'", "'-infinity'", "'294276-01-01'", "'4713-01-01 BC'", "'epoch'"},
}

// foreignRow has a row of each table that another hand could have written, with a $ for a number of its own.
var foreignRow = map[string]map[string]string{
	"streams":         {"stream": "'v-$'", "category": "'v'", "version": "1"},
	"events":          {"stream": "'v-$'", "version": "1", "id": "gen_random_uuid()", "type": "'counted'", "schema_version": "1", "data": `'{"N": 1}'`, "metadata": "'{}'", "recorded_at": "now()"},
	"snapshots":       {"stream": "'v-$'", "schema": "'s'", "version": "1", "event_id": "'e'", "state": "'{}'", "saved_at": "now()"},
	"outbox":          {"message_id": "'m$'", "topic": "'t'", "key": "'v-$'", "payload": "'{}'", "headers": "'{}'", "next_attempt_at": "now()", "created_at": "now()"},
	"generations":     {"projector": "'v$'", "generation": "1", "revision": "1", "state": "'live'", "data": "'{}'", "created_at": "now()", "changed_at": "now()"},
	"markers":         {"handler": "'v/h'", "generation": "1", "message_id": "'m$'"},
	"low_water_marks": {"handler": "'v$/h'", "pruned_before": "now()"},
	"parked": {"projector": "'v'", "generation": "1", "handler": "'h'", "handlers": "'{}'", "message_id": "'m$'", "marker_id": "'m$'", "topic": "'t'", "key": "'k$'",
		"lane": "decode(lpad('$', 32, '0'), 'hex')", "type": "'t'", "payload": "'{}'", "headers": "'{}'", "class": "'unknown'", "code": "'c'", "attempts": "1", "version": "''"},
	"holds":       {"projector": "'v'", "generation": "1", "lane": "decode(lpad('$', 32, '0'), 'hex')", "due_at": "now()"},
	"checkpoints": {"projector": "'v$'", "generation": "1", "position": "1", "event_id": "'e'", "lineage": "'l'", "mode": "'catch-up'", "token": "gen_random_uuid()", "handlers": "'[]'"},
	"segments":    {"projector": "'v$'", "generation": "1", "segment": "1", "position": "1", "event_id": "'e'", "token": "gen_random_uuid()"},
	"leases":      {"name": "'v$'", "token": "gen_random_uuid()", "holder": "'h'", "expires_at": "now()"},
	"runners":     {"runner": "'v$'", "expires_at": "now()"},
	"in_flight":   {"message_id": "'m$'", "build": "'v'", "runner": "'v'", "worker": "1"},
	"services":    {"id": "'v$'", "kind": "'runner'", "holder": "'h'", "data": "'{}'", "skew": "0", "started_at": "now()", "seen_at": "now()", "expires_at": "now() + interval '1 hour'"},
	"pauses":      {"kind": "'projector'", "name": "'v$'", "paused_by": "'p'", "reason": "'r'", "paused_at": "now()"},
	"acts":        {"verb": "'verify'", "kind": "'projector'", "name": "'v$'", "decided_by": "'p'", "reason": "'r'", "state": "'requested'", "at": "now()"},
	"tasks":       {"id": "'v$'", "kind": "'t/a'", "input": "'{}'", "next_at": "now()"},
	"task_groups": {"id": "'v$'", "kind": "'g/a'", "data": "'{}'", "total": "1", "open": "1"},
	"task_trail":  {"task": "'v$'", "what": "'answered'"},
}

// Whatever another hand writes into a table, with a hostile value in any column, harms that row, its stream or its key
// only, or the database refuses it: all others are read, published, applied and run, and all lists can be read.
// Promise: G1.16
func TestForeignRowsHarmThemselvesOnly(t *testing.T) {
	t.Parallel()
	for _, name := range slices.Sorted(maps.Keys(foreignRow)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, noteTables)
			t.Cleanup(func() { // the streams of foreign rows are not those of Kinora
				_, err := db.Pool().Exec(context.Background(), `truncate kinora.streams, kinora.events`)
				require.NoError(t, err)
			})
			rows, err := db.Pool().Query(t.Context(), `select attname::text, format_type(atttypid, null), coalesce(nullif(typbasetype, 0)::regtype::text, ''), attidentity <> ''
				from pg_attribute join pg_type t on t.oid = atttypid where attrelid = ('kinora.' || $1)::regclass and attnum > 0 order by attnum`, name)
			require.NoError(t, err)
			type column struct {
				Name, Type, Base string
				Identity         bool
			}
			columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
			require.NoError(t, err)
			require.NotEmpty(t, columns)
			n := 0
			for _, c := range columns {
				if c.Base != "" {
					c.Type = c.Base
				}
				if c.Identity { // no role may write it: see below
					continue
				}
				values := hostile[c.Type]
				require.NotEmpty(t, values, c.Type)
				for _, value := range values {
					n++
					row := maps.Clone(foreignRow[name])
					row[c.Name] = value
					names, is := slices.Sorted(maps.Keys(row)), []string{}
					for _, name := range names {
						is = append(is, strings.ReplaceAll(row[name], "$", fmt.Sprint(n)))
					}
					_, err := db.Pool().Exec(t.Context(), fmt.Sprintf("insert into kinora.%s (%s) values (%s)", name, strings.Join(names, ", "), strings.Join(is, ", ")))
					if err == nil && longtest.On() { // to see which row it is
						require.True(t, t.Run(fmt.Sprintf("%s %.20s", c.Name, value), func(t *testing.T) { othersGoOn(t, db, n) }))
					}
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

	read := map[string]func() (any, error){
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
