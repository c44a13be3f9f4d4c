package postgres_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// as is the database as somebody sees it who has this role and no other.
func as(t *testing.T, db *postgres.DB, role string) *postgres.DB {
	t.Helper()
	cfg := db.Pool().Config()
	cfg.MaxConns = 2
	cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "set role "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	mine, err := postgres.New(pool, &postgres.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	return mine
}

// roleOps is what one can do, by name; each works for an owner.
func roleOps(t *testing.T) map[string]func(ctx context.Context, db *postgres.DB) error {
	exec := func(sql string) func(context.Context, *postgres.DB) error {
		return func(ctx context.Context, db *postgres.DB) error { _, err := db.Pool().Exec(ctx, sql); return err }
	}
	work := projector.Work{Projector: "p", Marks: []marker.Key{{Handler: "p/a", Was: []string{"p/b"}, MessageID: "m"}}, Park: []projector.Parked{{Projector: "p"}}}
	return map[string]func(context.Context, *postgres.DB) error{
		"append": func(ctx context.Context, db *postgres.DB) error {
			for _, x := range []eventstore.Expected{eventstore.Any, eventstore.NoStream, 1} {
				stream := "a-" + strings.ToLower(t.Name())
				if x == eventstore.NoStream {
					stream += "-2"
				}
				if _, err := db.Append(ctx, stream, x, drafts(t, 1)); err != nil && x != eventstore.NoStream && x != 1 {
					return err
				}
			}
			return pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error {
				return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "t"})
			})
		},
		"read streams": func(ctx context.Context, db *postgres.DB) error {
			for _, err := range db.ReadStream(ctx, "a-1", 0) {
				return err
			}
			return nil
		},
		"relay": relays,
		"project": func(ctx context.Context, db *postgres.DB) error {
			err := db.Do(ctx, work, func(context.Context, pgx.Tx, []int) ([]outbox.Message, error) {
				return []outbox.Message{{Topic: "t"}}, nil
			})
			if err != nil {
				return err
			}
			_, err = db.Outcomes(ctx, work.Marks)
			return err
		},
		"journal":         keepsTheJournal,
		"replay and skip": resolves,
		"prune markers": func(ctx context.Context, db *postgres.DB) error {
			_, err := db.PruneMarkers(ctx, "p/none", time.Hour, 10)
			if err == nil {
				_, err = db.Floor(ctx, "p/none")
			}
			return err
		},
		"inspect": func(ctx context.Context, db *postgres.DB) error {
			if _, err := db.Entries(ctx, outbox.Filter{}); err != nil {
				return err
			}
			_, err := db.ParkedMessages(ctx, projector.ParkedFilter{})
			return err
		},
		"change events":   exec(`update kinora.events set data = '{}'`),
		"delete events":   exec(`delete from kinora.events`),
		"delete markers":  exec(`delete from kinora.markers`),
		"delete entries":  exec(`delete from kinora.outbox`),
		"delete streams":  exec(`delete from kinora.streams`),
		"drop the schema": exec(`drop schema kinora cascade`),
		"make a table":    exec(`create table kinora.more ()`),
	}
}

func TestRolesMayDoTheirWorkAndNothingElse(t *testing.T) {
	t.Parallel()
	may := map[string][]string{
		"kinora_appender":  {"append", "read streams"},
		"kinora_relay":     {"relay", "delete entries"},
		"kinora_projector": {"project", "journal", "replay and skip", "prune markers", "delete markers", "read streams"},
		"kinora_reader":    {"read streams", "inspect"},
	}
	for role, can := range may {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory})
			for _, sql := range []string{postgres.RolesSQL("kinora"), "do $$ begin execute (select string_agg(format('alter table kinora.%I owner to kinora_owner', tablename), ';') from pg_tables where schemaname = 'kinora'); end $$", postgres.GrantsSQL("kinora")} {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			mine := as(t, db, role)
			for name, op := range roleOps(t) {
				err := op(t.Context(), mine)
				allowed := false
				for _, c := range can {
					allowed = allowed || c == name
				}
				if allowed {
					require.NoError(t, err, name)
					continue
				}
				var pe *pgconn.PgError
				require.ErrorAs(t, err, &pe, "%s must not: %s", role, name)
				require.Equal(t, "42501", pe.Code, "%s must not: %s", role, name)
			}
		})
	}
}

func TestAMigratorMigratesAsTheOwner(t *testing.T) {
	t.Parallel()
	db := postgrestest.DSN(t, &postgres.Config{Schema: "unused"})
	pool, err := pgxpool.New(t.Context(), db)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(t.Context(), postgres.RolesSQL("shop"))
	require.NoError(t, err)
	var who string
	require.NoError(t, pool.QueryRow(t.Context(), `select nspowner::regrole::text from pg_namespace where nspname = 'shop'`).Scan(&who))
	require.Equal(t, "kinora_owner", who)
	cfg := pool.Config()
	cfg.ConnConfig.RuntimeParams["role"] = "kinora_owner" // as "alter role … set role" makes it
	migrator, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer migrator.Close()
	shop, err := postgres.New(migrator, &postgres.Config{Schema: "shop"})
	require.NoError(t, err)
	require.NoError(t, shop.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), postgres.GrantsSQL("shop"))
	require.NoError(t, err)
	_, err = shop.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
}

// relays is all that a relay does.
func relays(ctx context.Context, db *postgres.DB) error {
	if _, err := outbox.Claim(ctx, db, outbox.Query{}, claim.Terms{Lease: time.Millisecond}); err != nil {
		return err
	}
	if _, err := outbox.ClaimPortably(ctx, db, outbox.Query{}, claim.Terms{Lease: time.Millisecond}); err != nil {
		return err
	}
	if _, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: 1, To: outbox.Published}}); err != nil {
		return err
	}
	if _, err := db.Requeue(ctx, outbox.Filter{}); err != nil {
		return err
	}
	if _, err := db.Skip(ctx, outbox.Filter{Key: "nobody's"}); err != nil {
		return err
	}
	if _, err := db.HoldEntries(ctx, time.Second, 10); err != nil {
		return err
	}
	_, _, err := db.DeleteEntries(ctx, outbox.Retention{Published: 1}, 0)
	return err
}

// keepsTheJournal is what a runner does beside units.
func keepsTheJournal(ctx context.Context, db *postgres.DB) error {
	a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "j", Key: "k"}
	_, err := db.Begin(ctx, "me", []projector.Attempt{a}, []projector.Attempt{a})
	if err == nil {
		_, _, err = db.BeginAlone(ctx, "you", a, -1)
	}
	if err == nil {
		_, err = db.CountAttempt(ctx, "you", a, -1)
	}
	if err == nil {
		_, err = db.DueParked(ctx, "p", nil, 0, 1)
	}
	if err == nil {
		err = db.FailParked(ctx, "", projector.Parked{Seq: 1, Class: projector.HeldClass}, a)
	}
	if err == nil {
		_, err = db.PruneJournal(ctx, "p", time.Hour, 1)
	}
	return errors.Join(err, db.Alive(ctx, "me", time.Second), db.Alive(ctx, "me", 0))
}

// resolves is what a person does with what is parked.
func resolves(ctx context.Context, db *postgres.DB) error {
	err := db.Do(ctx, projector.Work{Projector: "p", Park: []projector.Parked{{Projector: "p", Code: "mine"}}}, nil)
	if err != nil {
		return err
	}
	list, err := db.ParkedMessages(ctx, projector.ParkedFilter{Code: "mine", Limit: 1})
	if err != nil {
		return err
	}
	a := projector.Attempt{Projector: "p", Handler: "p/a", Seq: list[0].Seq}
	if err := db.Do(ctx, projector.Work{Projector: "p", Replay: []projector.Replay{{Attempt: a}}, Forget: []projector.Attempt{a}}, nil); err != nil {
		return err
	}
	_, err = db.SkipParked(ctx, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "test"})
	return err
}
