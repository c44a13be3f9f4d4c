// Package pooled runs the conformance suites on PostgreSQL through a pooler. It is a package of its own, so that these tests
// run at the same time as those of package postgres.
package pooled_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/pgconform"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/providertest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// Most tests wait for the server, so more of them run at a time than there are cores.
	_ = flag.Set("test.parallel", "6")
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

// modes are the modes of pgx that work through a pooler in transaction mode without support for
// prepared statements. The last one runs in the long form only: it sends arguments as text, as the second one does.
var modes = []string{"cache_describe", "simple_protocol", "exec"}

// All suites run in the first mode. The long form runs them in every mode. The short form runs, in
// the second mode, the suites whose statements are sent in that mode and have arguments of most
// types: events, the log, and units that queue statements. Nearly all statements of entries are always sent
// in the first mode.
func TestConformanceThroughAPooler(t *testing.T) {
	t.Parallel()
	p := pgtest.NewPooler(t, pgtest.Shared(t))
	for i, mode := range modes[:longtest.Or(2, 3)] {
		open := func(t testing.TB, o providertest.Options) *postgres.DB {
			t.Helper()
			cfg := pgconform.Config(o)
			dsn := p.DSN(t, postgrestest.DSN(t, cfg, pgconform.Totals), "default_query_exec_mode="+mode, fmt.Sprint("pool_max_conns=", cmp.Or(o.Conns, 16)))
			db, err := postgres.Open(context.Background(), dsn, cfg)
			require.NoError(t, err)
			t.Cleanup(db.Close)
			return db
		}
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			fixture := func(t testing.TB, o providertest.Options) providertest.Fixture[pgx.Tx] {
				return pgconform.Fixture(t, open(t, o), o)
			}
			if i == 0 || longtest.On() {
				providertest.All(t, providertest.TierOperations, fixture)
				return
			}
			t.Run("EventStore", func(t *testing.T) { providertest.EventStore(t, fixture) })
			t.Run("Log", func(t *testing.T) { providertest.Log(t, fixture) })
		})
		t.Run(mode+", batched", func(t *testing.T) {
			t.Parallel()
			fixture := func(t testing.TB, o providertest.Options) providertest.Fixture[*pgx.Batch] {
				return pgconform.Batched(t, open(t, o), o)
			}
			providertest.Units(t, fixture, providertest.Deferred)
			if i > 0 && !longtest.On() {
				return
			}
			t.Run("Progress", func(t *testing.T) { providertest.Progress(t, fixture, providertest.Deferred) })
		})
	}
}
