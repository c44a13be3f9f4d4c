package admin_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

// as returns the database as seen by a role of RolesSQL.
func (w *world) as(role string) *postgres.DB {
	w.Helper()
	cfg := w.db.Pool().Config()
	cfg.MaxConns = 4
	cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "set role "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(w.Context(), cfg)
	require.NoError(w, err)
	w.Cleanup(pool.Close)
	db, err := postgres.New(pool, nil)
	require.NoError(w, err)
	return db
}

// A person with the role kinora_operator can look and decide, and cannot change what was recorded. One with
// kinora_reader can only look.
// Promise: O3.1
func TestTheRolesOfPersons(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, script := range []func(string) (string, error){postgres.RolesSQL, postgres.GrantsSQL} {
		sql, err := script("kinora")
		require.NoError(t, err)
		w.exec(sql)
	}
	w.start(w.runner(projector.RunnerConfig{}), w.worker())
	w.price("tea", 0, 5)
	w.enqueue(greet.New("greet-nobody", ""))
	w.finds(soon, provider.FindingParked, "prices are stuck")
	w.finds(soon, provider.FindingAbandoned, "Tasks are abandoned")
	entries, err := provider.ClaimEntries(t.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "r", Limit: 1})
	require.NoError(t, err)
	_, err = w.db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: entries[0].Seq, Token: entries[0].Token, To: outbox.Abandoned}})
	require.NoError(t, err)
	w.fixed.Store(true)

	w.exec(`do $$ begin create role kinora_test_nobody; exception when duplicate_object or unique_violation then null; end $$`)
	for role, unread := range map[string]string{"kinora_test_nobody": "every table", "kinora_appender": "parked"} {
		found, err := adminOf(t, w.as(role)).Doctor(t.Context(), provider.DiagnosisLimits{})
		require.NoError(t, err)
		require.Len(t, found, 1)
		require.Equal(t, provider.FindingRights, found[0].Check)
		require.Contains(t, found[0].Facts[0].Value, unread)
		require.Contains(t, found[0].Remedy[0], "grant kinora_reader to")
	}

	for _, role := range []string{"kinora_reader", "kinora_operator"} {
		db, allowed := w.as(role), role == "kinora_operator"
		ops := adminOf(t, db)
		_, err := ops.Facts(t.Context())
		require.NoError(t, err, role)
		found, err := ops.Doctor(t.Context(), provider.DiagnosisLimits{})
		require.NoError(t, err, role)
		for _, f := range found {
			require.NotContains(t, f.Title, role)
		}
		for what, do := range map[string]func() (int, error){
			"pause":   func() (int, error) { _, err := ops.Pause(t.Context(), provider.PauseTopic, "t", by); return 1, err },
			"requeue": func() (int, error) { return ops.Requeue(t.Context(), outbox.Filter{Seqs: []int64{entries[0].Seq}}, by) },
			"skip":    func() (int, error) { return ops.SkipEntries(t.Context(), outbox.Filter{Topic: "product"}, by) },
			"dry run": func() (int, error) {
				id, err := ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "prices"}, by)
				if err == nil {
					_, err = ops.Await(t.Context(), id, nil)
				}
				return 1, err
			},
			"replay": func() (int, error) { return ops.Replay(t.Context(), projector.ParkedFilter{Projector: "prices"}, by) },
			"rebuild": func() (int, error) {
				return ops.Rebuild(t.Context(), "prices", projector.Rebuild{How: projector.InPlace, Decision: by})
			},
			"complete": func() (int, error) { return 1, db.CompleteTask(t.Context(), "greet-nobody", []byte("true"), by) },
			"cancel": func() (int, error) {
				return 1, func() error { _, err := db.CancelTasks(t.Context(), task.Filter{IDs: []string{"x"}}, by); return err }()
			},
		} {
			_, err := do()
			if !allowed {
				require.ErrorContains(t, err, "permission denied", "%s %s", role, what)
				continue
			}
			require.NoError(t, err, "%s %s", role, what)
		}
		for _, sql := range []string{`update kinora.events set type = 'x'`, `delete from kinora.parked`, `delete from kinora.events`, `delete from kinora.outbox`} {
			_, err := db.Pool().Exec(t.Context(), sql)
			require.ErrorContains(t, err, "permission denied", "%s: %s", role, sql)
		}
	}
}
