// Package postgrestest gives each test of a service a separate PostgreSQL database.
//
// The server is the one that KINORA_POSTGRES names (a superuser's connection string). If that is
// empty, a private server is started from the installed binaries and ends with the test process.
// Without either, the test fails with an instruction; KINORA_SKIP=postgres skips it.
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

// Open returns a new migrated database for t, and drops it when t ends. setup runs once, in the
// template from which all databases with the same setup are cloned. When t ends, Open checks the
// invariants of the database: versions are contiguous, no claim is live, and no transaction is
// open.
func Open(t testing.TB, cfg *postgres.Config, setup ...string) *postgres.DB {
	t.Helper()
	db := OpenBusy(t, cfg, setup...)
	t.Cleanup(func() {
		for rule, q := range atRest {
			q = strings.ReplaceAll(q, "kinora.", schema(cfg)+".")
			var broken int
			var err error
			// The server may still be ending a statement that the test has canceled. It has only to notice that the client is gone,
			// so a minute is long on any machine. A longer wait would be one for what a test has forgotten.
			for limit := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
				err = db.Pool().QueryRow(context.Background(), q).Scan(&broken)
				if err != nil || broken == 0 || time.Now().After(limit) {
					break
				}
			}
			if err != nil {
				t.Errorf("check that %s: %v", rule, err)
			} else if broken > 0 {
				t.Errorf("at the end of the test %s: violated %d times", rule, broken)
			}
		}
	})
	return db
}

// OpenBusy is Open for a test that leaves claims or transactions open on purpose: it checks only
// the versions.
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
			t.Errorf("%d streams have versions that are not contiguous", broken)
		}
	})
	return db
}

// DSN returns the connection string of such a database, for a test that passes it to another
// process.
func DSN(t testing.TB, cfg *postgres.Config, setup ...string) string {
	t.Helper()
	migration, err := postgres.MigrationSQL(schema(cfg))
	if err != nil {
		t.Fatal(err)
	}
	key := schema(cfg) + "\n" + migration + strings.Join(setup, "\n")
	return pgtest.Create(t, pgtest.Shared(t), key, func(ctx context.Context, dsn string) error {
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
		select stream, count(*) n, min(version) low, max(version) high, bool_or(type = 'kinora.ended') ended
		from kinora.events group by stream) e using (stream)
	where s.version is distinct from e.high or s.ended is distinct from e.ended
		or (e.low <> 1 or e.high <> e.n) and not (s.ended and e.n = 1)) broken -- only the end of an archived stream is left`

var atRest = map[string]string{
	"no claim is live": `select count(*) from kinora.outbox where status = 'claimed' and next_attempt_at > clock_timestamp()`,
	"no transaction is open": `
select count(*) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and state like 'idle in transaction%'`,
}
