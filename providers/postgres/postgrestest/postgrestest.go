// Package postgrestest gives tests of services a PostgreSQL database each.
//
// The server is the one that KINORA_POSTGRES names (a superuser's connection string), or else a private one
// that is started from the installed binaries and goes with the test process. Without either the test fails
// and says what to do; KINORA_SKIP=postgres makes it skip.
package postgrestest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/providers/postgres"
)

// Open gives t a migrated database of its own, and drops it when t ends. setup is run once, in the template
// that all databases with the same setup are cloned from. When t ends, what must hold of a database at rest is
// checked: versions are contiguous, no claim is live, and no transaction is open.
func Open(t testing.TB, cfg *postgres.Config, setup ...string) *postgres.DB {
	t.Helper()
	db := OpenBusy(t, cfg, setup...)
	t.Cleanup(func() {
		for rule, q := range atRest {
			var broken int
			if err := db.Pool().QueryRow(context.Background(), strings.ReplaceAll(q, "kinora.", schema(cfg)+".")).Scan(&broken); err != nil {
				t.Errorf("check that %s: %v", rule, err)
			} else if broken > 0 {
				t.Errorf("at the test's end it must hold that %s: broken %d times", rule, broken)
			}
		}
	})
	return db
}

// OpenBusy is Open for a test that leaves claims or transactions behind on purpose: only the versions are checked.
func OpenBusy(t testing.TB, cfg *postgres.Config, setup ...string) *postgres.DB {
	t.Helper()
	config, err := pgxpool.ParseConfig(DSN(t, cfg, setup...))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	db, err := postgres.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		defer pool.Close()
		db.Close()
		var broken int
		err := pool.QueryRow(context.Background(), strings.ReplaceAll(versions, "kinora.", schema(cfg)+".")).Scan(&broken)
		if err != nil {
			t.Errorf("check that versions are contiguous: %v", err)
		} else if broken > 0 {
			t.Errorf("%d streams whose versions are not contiguous", broken)
		}
	})
	return db
}

// DSN is the connection string of such a database, for a test that hands it to another process.
func DSN(t testing.TB, cfg *postgres.Config, setup ...string) string {
	t.Helper()
	migration, err := postgres.MigrationSQL(schema(cfg))
	if err != nil {
		t.Fatal(err)
	}
	key := schema(cfg) + "\n" + migration + strings.Join(setup, "\n")
	return pgtest.Create(t, pgtest.Shared(t), key, func(ctx context.Context, dsn string) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		db, err := postgres.Open(ctx, dsn, cfg)
		if err != nil {
			return err
		}
		defer db.Close()
		if err := db.Migrate(ctx); err != nil {
			return err
		}
		for _, statement := range setup {
			if _, err := db.Pool().Exec(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	})
}

func schema(cfg *postgres.Config) string {
	if cfg == nil || cfg.Schema == "" {
		return "kinora"
	}
	return cfg.Schema
}

const versions = `
select count(*) from (
	select s.stream from kinora.streams s full join (
		select stream, count(*) n, min(version) low, max(version) high from kinora.events group by stream) e using (stream)
	where s.version is distinct from e.n or e.low <> 1 or e.high <> e.n) broken`

var atRest = map[string]string{
	"no claim is live": `select count(*) from kinora.outbox where status = 'claimed' and next_attempt_at > clock_timestamp()`,
	"no transaction is open": `
select count(*) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and state like 'idle in transaction%'`,
}
