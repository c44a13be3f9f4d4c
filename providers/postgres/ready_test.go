package postgres_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/internal/purpose"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// On a standby, and in read-only sessions, every service of Kinora fails to start.
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
	for what, start := range startCalls(t, db) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		require.ErrorIs(t, start(ctx), postgres.ErrReadOnly, what)
	}
	server.Stop()
	require.NoError(t, db.Ready(t.Context()), "a server that is not reachable is not a standby")
}

// neededRights are the rights that each service always needs.
var neededRights = map[string]struct {
	purpose purpose.Purpose
	tables  map[string]string
}{
	"kinora_relay": {purpose.Relay, map[string]string{"migrations": "select", "outbox": "select update delete"}},
	"kinora_projector": {purpose.Runner, map[string]string{
		"migrations": "select", "generations": "select", "markers": "select insert delete", "low_water_marks": "select insert update",
		"parked": "select insert update delete", "holds": "select insert update delete", "runners": "select insert update delete",
		"in_flight": "select insert update delete",
	}},
	"kinora_appender": {purpose.Any, map[string]string{"migrations": "select", "streams": "select insert update", "events": "select insert", "outbox": "insert"}},
}

func TestReadyNamesTheRightsThatARoleLacks(t *testing.T) {
	t.Parallel()
	for role, needed := range neededRights {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory})
			exec := func(sql string) {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err, sql)
			}
			exec(script(t, postgres.RolesSQL, "kinora"))
			exec(script(t, postgres.GrantsSQL, "kinora"))
			own := as(t, db, role)
			ctx := purpose.With(t.Context(), needed.purpose)
			require.NoError(t, own.Ready(ctx))
			for table, rights := range needed.tables {
				for _, right := range strings.Fields(rights) {
					exec(fmt.Sprintf("revoke %s on kinora.%s from %s", right, table, role))
					err := own.Ready(ctx)
					var lacks *postgres.RightsError
					require.ErrorAs(t, err, &lacks, "without %s on %s", right, table)
					require.Equal(t, role, lacks.Role)
					require.Equal(t, []string{right + " on kinora." + table}, lacks.Missing)
					require.ErrorContains(t, err, right+" on kinora."+table)
					exec(fmt.Sprintf("grant %s on kinora.%s to %s", right, table, role))
				}
			}
			require.NoError(t, own.Ready(ctx))
			exec("revoke usage on schema kinora from " + role)
			var lacks *postgres.RightsError
			require.ErrorAs(t, own.Ready(ctx), &lacks)
			require.Equal(t, []string{"usage on schema kinora"}, lacks.Missing)
		})
	}
}

// The service that is started determines the rights that are needed.
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
		own := as(t, db, role)
		var lacks *postgres.RightsError
		if err := own.Ready(t.Context()); role == "kinora_reader" {
			require.ErrorAs(t, err, &lacks, "a reader can run no service")
		} else {
			require.NoError(t, err, "a call by the application, as %s", role)
		}
		for _, service := range refused {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			require.ErrorAs(t, startCalls(t, own)[service](ctx), &lacks, "a %s as %s", service, role)
			require.NotEmpty(t, lacks.Missing)
		}
	}
	own := as(t, db, "kinora_projector")
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	require.NoError(t, startCalls(t, own)["runner"](ctx), "the runner runs until the context ends")

	_, err := db.Pool().Exec(t.Context(), `do $$ begin create role kinora_nothing nologin; exception when duplicate_object or unique_violation then null; end $$`)
	require.NoError(t, err)
	var lacks *postgres.RightsError
	require.ErrorAs(t, as(t, db, "kinora_nothing").Ready(t.Context()), &lacks)
	require.Contains(t, lacks.Missing, "usage on schema kinora")
	_, err = db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
}
