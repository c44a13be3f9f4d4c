package postgres_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/pgconform"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/providertest"
)

// What consumers ask a store for.
var (
	_ eventstore.Store               = (*postgres.DB)(nil)
	_ eventstore.TxStore             = (*postgres.Tx)(nil)
	_ provider.LogReader             = (*postgres.DB)(nil)
	_ provider.Log                   = (*postgres.DB)(nil)
	_ provider.LogWaker              = (*postgres.DB)(nil)
	_ provider.LogCounter            = (*postgres.DB)(nil)
	_ provider.Outbox                = (*postgres.DB)(nil)
	_ outbox.Inspector               = (*postgres.DB)(nil)
	_ provider.EntryMaintainer       = (*postgres.DB)(nil)
	_ provider.MarkerMaintainer      = (*postgres.DB)(nil)
	_ provider.Waker                 = (*postgres.DB)(nil)
	_ provider.TaskProvider[pgx.Tx]  = (*postgres.DB)(nil)
	_ provider.TaskInspector         = (*postgres.DB)(nil)
	_ provider.TaskWaker             = (*postgres.DB)(nil)
	_ provider.Operations            = (*postgres.DB)(nil)
	_ provider.Diagnoser             = (*postgres.DB)(nil)
	_ provider.ReadyChecker          = (*postgres.DB)(nil)
	_ outbox.Enqueuer                = (*postgres.Tx)(nil)
	_ provider.Provider[pgx.Tx]      = (*postgres.DB)(nil)
	_ provider.Provider[*pgx.Batch]  = (*postgres.Batched)(nil)
	_ provider.Provider[*sql.Tx]     = (*postgres.SQL)(nil)
	_ provider.TaskProvider[*sql.Tx] = (*postgres.SQL)(nil)
	_ eventstore.SnapshotStore       = (*postgres.DB)(nil)
	_ eventstore.SnapshotStore       = (*postgres.Tx)(nil)
	_ provider.EventFinder           = (*postgres.DB)(nil)
	_ provider.EventFinder           = (*postgres.Tx)(nil)
)

// The table of the suites, which other tests use too.
const (
	totals = pgconform.Totals
	addSQL = pgconform.AddSQL
)

var add = pgconform.Add

func TestConformance(t *testing.T) {
	providertest.All(t, providertest.TierOperations, func(t testing.TB, o providertest.Options) providertest.Fixture[pgx.Tx] {
		return pgconform.Fixture(t, conforming(t, o), o)
	})
}

func TestBatchedConformance(t *testing.T) {
	providertest.Units(t, func(t testing.TB, o providertest.Options) providertest.Fixture[*pgx.Batch] {
		return pgconform.Batched(t, conforming(t, o), o)
	}, providertest.Deferred)
}

func TestBatchedProgressConformance(t *testing.T) {
	providertest.Progress(t, func(t testing.TB, o providertest.Options) providertest.Fixture[*pgx.Batch] {
		return pgconform.Batched(t, conforming(t, o), o)
	}, providertest.Deferred)
}

func TestBatchedGenerationsConformance(t *testing.T) {
	providertest.Generations(t, func(t testing.TB, o providertest.Options) providertest.Fixture[*pgx.Batch] {
		return pgconform.Batched(t, conforming(t, o), o)
	}, providertest.Deferred)
}

// TestSQLConformance runs the suites that use transactions of database/sql. The others run with them in the long
// form only.
func TestSQLConformance(t *testing.T) {
	open := func(t testing.TB, o providertest.Options) providertest.Fixture[*sql.Tx] {
		return pgconform.SQL(t, conforming(t, o), o)
	}
	if longtest.On() {
		providertest.All(t, providertest.TierOperations, open)
		return
	}
	t.Run("Units", func(t *testing.T) { providertest.Units(t, open) })
	t.Run("Tasks", func(t *testing.T) { providertest.TaskTx(t, open) })
}

func conforming(t testing.TB, o providertest.Options) *postgres.DB {
	if cfg := pgconform.Config(o); o.Conns > 0 {
		return borrowed(t, cfg, postgrestest.DSN(t, cfg, totals), func(c *pgxpool.Config) { c.MaxConns = int32(o.Conns) }) //nolint:gosec // small
	}
	return postgrestest.OpenBusy(t, pgconform.Config(o), totals)
}
