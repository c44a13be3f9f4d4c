package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// as returns the database as seen by this role only.
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

// roleOps lists operations by name; each works for an owner.
func roleOps(t *testing.T) map[string]func(ctx context.Context, db *postgres.DB) error {
	exec := func(sql string) func(context.Context, *postgres.DB) error {
		return func(ctx context.Context, db *postgres.DB) error { _, err := db.Pool().Exec(ctx, sql); return err }
	}
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
		"read the log": func(ctx context.Context, db *postgres.DB) error {
			for _, err := range db.ReadLog(ctx, eventstore.From{Time: time.Now().Add(-time.Hour)}, eventstore.LogFilter{Types: []string{"t"}}) {
				return err
			}
			if _, err := db.LogPlaces(ctx, []string{uuid.NewString()}); err != nil {
				return err
			}
			id, err := db.LogID(ctx)
			if err == nil && id.Branch == "" {
				err = errors.New("the role sees no branch")
			}
			return err
		},
		"relay":                  relays,
		"start and answer tasks": startsTasks,
		"work":                   works,
		"project":                projects,
		"decide": func(ctx context.Context, db *postgres.DB) error {
			// a role that must not decide has no right to this
			if _, err := db.Pool().Exec(ctx, `update kinora.parked set reason = ''`); err != nil {
				return err
			}
			if _, err := db.Decide(ctx, provider.ParkedFilter{}, provider.StateWaiting, provider.Decision{}); err != nil {
				return err
			}
			_, err := db.Decide(ctx, provider.ParkedFilter{}, provider.StateSkipped, provider.Decision{By: "ann", Reason: "test"})
			return err
		},
		"prune": func(ctx context.Context, db *postgres.DB) error {
			_, err := db.Prune(ctx, "p", []string{"p/none"}, time.Hour, 10)
			return err
		},
		"inspect": func(ctx context.Context, db *postgres.DB) error {
			if _, err := db.Entries(ctx, provider.EntryFilter{}); err != nil {
				return err
			}
			_, err := db.Parked(ctx, provider.ParkedFilter{})
			return err
		},
		"archive": func(ctx context.Context, db *postgres.DB) error {
			_, err := db.Archive(ctx, "b-1", eventstore.ArchiveOptions{})
			return err
		},
		"change events":   exec(`update kinora.events set data = '{}'`),
		"delete events":   exec(`delete from kinora.events where false`),
		"delete markers":  exec(`delete from kinora.markers`),
		"delete entries":  exec(`delete from kinora.outbox`),
		"delete streams":  exec(`delete from kinora.streams`),
		"drop the schema": exec(`drop schema kinora cascade`),
		"make a table":    exec(`create table kinora.more ()`),
	}
}

func TestRolesHaveExactlyTheirRights(t *testing.T) {
	t.Parallel()
	may := map[string][]string{
		"kinora_appender":  {"append", "read streams", "read the log", "start and answer tasks"},
		"kinora_relay":     {"relay", "delete entries"},
		"kinora_projector": {"project", "decide", "prune", "delete markers", "read streams", "read the log", "start and answer tasks"},
		"kinora_worker":    {"work", "start and answer tasks"},
		"kinora_archiver":  {"archive", "delete events", "read streams", "read the log"},
		"kinora_reader":    {"read streams", "read the log", "inspect"},
	}
	for role, can := range may {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory})
			for _, sql := range []string{script(t, postgres.RolesSQL, "kinora"), "do $$ begin execute (select string_agg(format('alter table kinora.%I owner to kinora_owner', tablename), ';') from pg_tables where schemaname = 'kinora'); end $$", script(t, postgres.GrantsSQL, "kinora")} {
				_, err := db.Pool().Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			ended := append(drafts(t, 1), drafts(t, 1)...)
			ended[1].Type = eventstore.TypeEnded
			_, err = db.Append(t.Context(), "b-1", eventstore.NoStream, ended)
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
	_, err = pool.Exec(t.Context(), script(t, postgres.RolesSQL, "shop"))
	require.NoError(t, err)
	var who string
	require.NoError(t, pool.QueryRow(t.Context(), `select nspowner::regrole::text from pg_namespace where nspname = 'shop'`).Scan(&who))
	require.Equal(t, "kinora_owner", who)
	cfg := pool.Config()
	cfg.ConnConfig.RuntimeParams["role"] = "kinora_owner" // as "alter role … set role" does
	migrator, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer migrator.Close()
	shop, err := postgres.New(migrator, &postgres.Config{Schema: "shop"})
	require.NoError(t, err)
	require.NoError(t, shop.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), script(t, postgres.GrantsSQL, "shop"))
	require.NoError(t, err)
	_, err = shop.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
}

// startsTasks runs all operations of a service that starts tasks.
func startsTasks(ctx context.Context, db *postgres.DB) error {
	return db.Transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tasks := db.TasksIn(tx)
		if err := tasks.EnqueueGroup(ctx, provider.TaskGroupDraft{ID: "g", Kind: "t/g", Data: json.RawMessage("1"), Tasks: []provider.TaskDraft{draft("in g")}}); err != nil {
			return err
		}
		for _, drafts := range [][]provider.TaskDraft{{draft("a")}, {draft("a")}, {draft("b"), draft("c")}} {
			if err := tasks.Enqueue(ctx, drafts...); err != nil {
				return err
			}
		}
		if _, err := tasks.Answer(ctx, provider.TaskAnswer{Task: "a", Name: "w", ID: "m", Out: json.RawMessage("1")}); err != nil {
			return err
		}
		if _, err := tasks.Postpone(ctx, "b", time.Now()); err != nil {
			return err
		}
		_, err := tasks.Cancel(ctx, "c")
		return err
	})
}

// works runs all operations of a worker.
func works(ctx context.Context, db *postgres.DB) error {
	if _, err := db.TaskKinds(ctx, "t"); err != nil {
		return err
	}
	if _, err := db.ChangeTasks(ctx, []provider.TaskChange{{ID: "none", To: provider.TaskDone}}); err != nil {
		return err
	}
	if err := startsTasks(ctx, db); err != nil {
		return err
	}
	for _, store := range []provider.Tasks{db, struct{ provider.Tasks }{db}} {
		tasks, err := provider.ClaimTasks(ctx, store, provider.TaskQuery{Kinds: []string{"t/a"}}, claim.Terms{Limit: 1})
		if err != nil || len(tasks) == 0 {
			return errors.Join(err, errors.New("nothing is claimed"))
		}
		if _, err := db.RenewTasks(ctx, tasks, time.Minute); err != nil {
			return err
		}
		err = db.Do(ctx, provider.Unit{}, func(ctx context.Context, tx pgx.Tx, _ provider.Found) (provider.Closing, error) {
			changed, err := db.TasksIn(tx).Change(ctx, provider.TaskChange{ID: tasks[0].ID, Token: tasks[0].Token, To: provider.TaskDone})
			if err == nil && !changed.Applied && !tasks[0].Undo {
				err = errors.New("not applied")
			}
			return provider.Closing{Output: []outbox.Message{{Topic: "t"}}}, err
		})
		if err != nil {
			return err
		}
	}
	if _, err := db.RequeueTasks(ctx, provider.TaskFilter{}, ann); err != nil {
		return err
	}
	if _, err := db.DeleteTasks(ctx, provider.TaskRetention{}, 10); err != nil {
		return err
	}
	if _, err := db.AcquireLease(ctx, "tasks", claim.Terms{Token: claim.NewToken(), Lease: time.Hour}); err != nil {
		return err
	}
	return db.ReadyFor(ctx, provider.WorkerService)
}

// relays runs all operations of a relay.
func relays(ctx context.Context, db *postgres.DB) error {
	if _, err := provider.ClaimEntries(ctx, db, provider.EntryQuery{}, claim.Terms{Lease: time.Millisecond}); err != nil {
		return err
	}
	if _, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: 1, To: outbox.Published}}); err != nil {
		return err
	}
	if _, err := db.Requeue(ctx, provider.EntryFilter{}); err != nil {
		return err
	}
	if _, err := db.Skip(ctx, provider.EntryFilter{Key: "nobody's"}); err != nil {
		return err
	}
	if _, err := db.HoldEntries(ctx, time.Second, 10); err != nil {
		return err
	}
	terms := claim.Terms{Token: claim.NewToken(), Lease: time.Millisecond}
	if _, err := db.AcquireLease(ctx, "prune-entries", terms); err != nil {
		return err
	}
	if err := db.ReleaseLease(ctx, "prune-entries", terms.Token); err != nil {
		return err
	}
	_, _, err := db.DeleteEntries(ctx, outbox.EntryRetention{Published: 1}, 0)
	return err
}

// projects runs all operations of a runner.
func projects(ctx context.Context, db *postgres.DB) error {
	me := provider.Worker{Runner: "me"}
	if _, err := db.Beat(ctx, "me", time.Second, time.Hour); err != nil {
		return err
	}
	if err := db.InFlight(ctx, provider.Build{Projector: "p"}, me, []string{"m"}); err != nil {
		return err
	}
	u := marked("m", "poison")
	u.Messages[0].Handlers[0].Was = []string{"p/b"}
	u.Careful = &me
	park := provider.Aside{Message: 1, Parked: provider.Parked{MessageID: "poison", Lane: u.Messages[1].Lane, Handlers: []string{"p/a"}, Attempts: 1}}
	err := db.Do(ctx, u, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Output: []outbox.Message{{Topic: "t"}}, Park: []provider.Aside{park}}, nil
	})
	if err != nil {
		return err
	}
	if err := queue(ctx, db, marked("another"), nil); err != nil {
		return err
	}
	due, err := db.Due(ctx, provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 1, Each: 1})
	if err != nil || len(due) != 1 {
		return errors.Join(err, fmt.Errorf("%d messages are due", len(due)))
	}
	if _, err := db.Try(ctx, due[0], -1, time.Second); err != nil {
		return err
	}
	due[0].Attempts++
	again := provider.Unit{Projector: "p", Messages: []provider.Message{{ID: "poison", Lane: due[0].Lane, Parked: &due[0]}}}
	if err := do(ctx, db, again, nil); err != nil {
		return err
	}
	_, err = db.Outcomes(ctx, []provider.Question{{Handler: "p/a", MessageID: "m"}})
	if err == nil {
		_, err = db.Beat(ctx, "me", 0, time.Hour)
	}
	if err == nil {
		err = reads(ctx, db)
	}
	if err == nil {
		err = switches(ctx, db)
	}
	return err
}

// switches makes another generation live, and clears the first one.
func switches(ctx context.Context, db *postgres.DB) error {
	set := []provider.Generation{
		{Build: provider.Build{Projector: "p", Generation: 2}, State: provider.GenerationLive},
		{Build: provider.Build{Projector: "p", Generation: 1}, State: provider.GenerationStandby},
	}
	err := db.Do(ctx, provider.Unit{Projector: "p", Generation: 2, Once: true, Switch: &provider.Switch{Set: set}},
		func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{}, nil
		})
	if err != nil {
		return err
	}
	first := set[1]
	first.Revision, first.State = 1, provider.GenerationRetired
	if ok, err := db.SetGeneration(ctx, first); err != nil || !ok {
		return errors.Join(err, errors.New("the generation is not retired"))
	}
	_, err = db.ClearGeneration(ctx, first.Build, []string{"p/a"}, nil, 10)
	return err
}

// reads applies an event of the log with each statement of a reader.
func reads(ctx context.Context, db *postgres.DB) error {
	c, terms := provider.Checkpoint{Mode: provider.ModeLive}, claim.Terms{Token: claim.NewToken(), Lease: time.Hour}
	_, err := db.AcquireLease(ctx, "p", terms)
	if err != nil {
		return err
	}
	if _, err = db.SetCheckpoint(ctx, provider.Build{Projector: "p"}, provider.Checkpoint{}, c); err != nil {
		return err
	}
	u := event(map[string]int64{"e": 1}, "e")
	for _, form := range []func() error{
		func() error { return do(ctx, db, u, nil) },
		func() error { return queue(ctx, db, u, nil) },
		func() error { _, err := db.Unapplied(ctx, provider.Build{Projector: "p"}, u.Messages); return err },
		func() error { u.Advance = advance(c, 1); return queue(ctx, db, u, nil) },
		func() error {
			_, err := db.PruneApplied(ctx, provider.Build{Projector: "p"}, []string{"p/a"}, 10)
			return err
		},
		func() error { _, err := db.Checkpoint(ctx, provider.Build{Projector: "p"}); return err },
		func() error { return db.ReleaseLease(ctx, "p", terms.Token) },
	} {
		if err := form(); err != nil {
			return err
		}
	}
	return nil
}
