package postgres_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/pgconform"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/providertest"
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
