package postgres_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// A standby reads, and no service of Kinora works on it. The same holds for read-only sessions.
func TestReadyFailsOnAStandby(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	db, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, db.Migrate(t.Context()))
	require.NoError(t, db.Ready(t.Context()))
	readOnly := borrowed(t, nil, server.DSN+"&default_transaction_read_only=on")
	require.ErrorIs(t, readOnly.Ready(t.Context()), postgres.ErrReadOnly)

	require.NoError(t, os.WriteFile(filepath.Join(server.Dir, "standby.signal"), nil, 0o644))
	require.NoError(t, server.Restart("INT"))
	db.Pool().Reset()
	var standby bool
	require.NoError(t, db.Pool().QueryRow(t.Context(), `select pg_is_in_recovery()`).Scan(&standby))
	require.True(t, standby)
	for what, start := range starts(t, db) {
		require.ErrorIs(t, start(patience.Context(t)), postgres.ErrReadOnly, what)
	}
	for _, err = range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
	}
	require.ErrorIs(t, err, eventstore.ErrUnsafeLog, "also of an empty log")
	server.Stop()
	require.NoError(t, db.Ready(t.Context()), "away is no standby")
}

// needs are the rights that each service always needs.
var needs = map[string]struct {
	service provider.Service
	tables  map[string]string
}{
	"kinora_relay": {provider.RelayService, map[string]string{"migrations": "select", "outbox": "select update delete", "leases": "select insert update delete"}},
	"kinora_projector": {provider.RunnerService, map[string]string{
		"migrations": "select", "generations": "select insert update", "markers": "select insert delete", "low_water_marks": "select insert update",
		"parked": "select insert update delete", "holds": "select insert update delete", "runners": "select insert update delete",
		"in_flight": "select insert update delete",
	}},
	"kinora_worker": {provider.WorkerService, map[string]string{
		"migrations": "select", "tasks": "select insert update delete", "task_groups": "select insert update delete", "task_trail": "select insert delete",
		"leases": "select insert update delete",
	}},
	"kinora_appender": {provider.AnyService, map[string]string{"migrations": "select", "streams": "select insert update", "events": "select insert", "outbox": "insert"}},
}

func TestReadyNamesTheRightsThatARoleLacks(t *testing.T) {
	t.Parallel()
	for role, needed := range needs {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory})
			exec := func(sql string) {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err, sql)
			}
			exec(script(t, postgres.RolesSQL, "kinora"))
			exec(script(t, postgres.GrantsSQL, "kinora"))
			mine := as(t, db, role)
			ready := func() error { return mine.ReadyFor(t.Context(), needed.service) }
			require.NoError(t, ready())
			if needed.service == provider.RunnerService { // a column that a migration has added
				exec("revoke insert (needs) on kinora.parked from " + role)
				var lacks *postgres.RightsError
				require.ErrorAs(t, ready(), &lacks)
				require.Equal(t, []string{"insert on kinora.parked"}, lacks.Missing)
				exec("grant insert (needs) on kinora.parked to " + role)
			}
			for table, rights := range needed.tables {
				for _, right := range strings.Fields(rights) {
					exec(fmt.Sprintf("revoke %s on kinora.%s from %s", right, table, role))
					err := ready()
					var lacks *postgres.RightsError
					require.ErrorAs(t, err, &lacks, "without %s on %s", right, table)
					require.Equal(t, role, lacks.Role)
					require.Equal(t, []string{right + " on kinora." + table}, lacks.Missing)
					require.ErrorContains(t, err, right+" on kinora."+table)
					exec(fmt.Sprintf("grant %s on kinora.%s to %s", right, table, role))
				}
			}
			require.NoError(t, ready())
			exec("revoke usage on schema kinora from " + role)
			var lacks *postgres.RightsError
			require.ErrorAs(t, ready(), &lacks)
			require.Equal(t, []string{"usage on schema kinora"}, lacks.Missing)
		})
	}
}

// What a service starts as decides which rights it needs.
func TestAServiceDoesNotStartWithTheRightsOfAnother(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory})
	for _, sql := range []string{script(t, postgres.RolesSQL, "kinora"), script(t, postgres.GrantsSQL, "kinora")} {
		_, err := db.Pool().Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	for role, refused := range map[string][]string{
		"kinora_relay": {"runner", "runner of batches"}, "kinora_projector": {"relay"}, "kinora_appender": {"relay", "runner"}, "kinora_reader": {"relay", "runner"},
	} {
		mine := as(t, db, role)
		var lacks *postgres.RightsError
		if err := mine.Ready(t.Context()); role == "kinora_reader" {
			require.ErrorAs(t, err, &lacks, "a reader is no service")
		} else {
			require.NoError(t, err, "an application's own question, as %s", role)
		}
		for _, service := range refused {
			require.ErrorAs(t, starts(t, mine)[service](patience.Context(t)), &lacks, "a %s as %s", service, role)
			require.NotEmpty(t, lacks.Missing)
		}
	}
	mine := as(t, db, "kinora_projector")
	require.NoError(t, starts(t, mine)["runner"](t.Context()))

	_, err := db.Pool().Exec(t.Context(), `do $$ begin create role kinora_nothing nologin; exception when duplicate_object or unique_violation then null; end $$`)
	require.NoError(t, err)
	var lacks *postgres.RightsError
	require.ErrorAs(t, as(t, db, "kinora_nothing").Ready(t.Context()), &lacks)
	require.Contains(t, lacks.Missing, "usage on schema kinora")
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
}
