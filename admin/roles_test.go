package admin_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
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
		found, err := findings(adminOf(t, w.as(role)).Doctor(t.Context(), provider.DiagnosisLimits{}))
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
		found, err := findings(ops.Doctor(t.Context(), provider.DiagnosisLimits{}))
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

// A role that may not see the sessions of others still finds an append that stays open, and says what it cannot know.
// Promise: O3.2
func TestDoctorSaysWhatItMayNotSee(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, script := range []func(string) (string, error){postgres.RolesSQL, postgres.GrantsSQL} {
		sql, err := script("kinora")
		require.NoError(t, err)
		w.exec(sql)
	}
	for role, also := range map[string]string{"kinora_test_looker": "", "kinora_test_seer": ", pg_monitor"} {
		w.exec(`do $$ begin create role ` + role + `; exception when duplicate_object or unique_violation then null; end $$`)
		w.exec(`grant kinora_reader` + also + ` to ` + role)
	}
	looker, seer := adminOf(t, w.as("kinora_test_looker")), adminOf(t, w.as("kinora_test_seer"))
	tx, err := w.db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = w.db.InTx(tx).Append(t.Context(), "product-cup", eventstore.Any, drafts(t, 2))
	require.NoError(t, err)

	for _, c := range []struct {
		ops      *admin.Admin
		openFor  string
		unchecks int
	}{{looker, "^at least [0-9]", 1}, {seer, "^[0-9]", 0}} {
		var d provider.Diagnosis
		w.eventually(func() (err error) {
			d, err = c.ops.Doctor(t.Context(), soon)
			require.NoError(t, err)
			if len(d.Findings) == 0 {
				return errors.New("nothing is found")
			}
			return nil
		})
		require.Len(t, d.Findings, 1, titles(d.Findings))
		require.Contains(t, d.Findings[0].Title, "Others wait for an open transaction: pid ")
		require.Regexp(t, c.openFor, value(d.Findings[0], "open for"))
		require.Contains(t, d.Findings[0].Remedy[0], "pg_terminate_backend")
		require.Len(t, d.Unchecked, c.unchecks, "%+v", d.Unchecked)
		if c.unchecks > 0 {
			require.Contains(t, d.Unchecked[0].Why, "the role kinora_test_looker may not see")
			require.Equal(t, []string{`grant pg_monitor to "kinora_test_looker";`}, d.Unchecked[0].Remedy)
		}
	}
	require.NoError(t, tx.Rollback(t.Context()))
	w.eventually(func() error {
		d, err := looker.Doctor(t.Context(), soon)
		require.NoError(t, err)
		if len(d.Findings) > 0 {
			return fmt.Errorf("%v", titles(d.Findings))
		}
		require.Len(t, d.Unchecked, 1)
		return nil
	})
}

// Others wait for a session that waits itself for another one: only that one is named.
// Promise: O3.2
func TestDoctorNamesTheRootBlocker(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`create table mine (n int); create table yours (n int)`)
	begin := func(name, table string) pgx.Tx {
		tx, err := w.db.Pool().Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `set local application_name = '`+name+`'; lock table `+table)
		require.NoError(t, err)
		return tx
	}
	root, middle := begin("root", "mine"), begin("middle", "yours")
	ended := make(chan error, 2)
	defer func() {
		require.NoError(t, root.Rollback(context.WithoutCancel(t.Context())))
		for range cap(ended) {
			require.NoError(t, patience.Receive(t, ended, "the end of a session that waits"))
		}
	}()
	go func() {
		_, err := middle.Exec(t.Context(), `lock table mine`)
		ended <- errors.Join(err, middle.Rollback(context.WithoutCancel(t.Context())))
	}()
	go func() {
		_, err := w.db.Pool().Exec(t.Context(), `select from yours`)
		ended <- err
	}()
	w.eventually(func() error {
		if all := w.facts().Waits; len(all) != 2 {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	f := w.finds(soon, provider.FindingWait, "Others wait for an open transaction")
	all, err := findings(w.ops.Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Len(t, all, 1, titles(all))
	require.Equal(t, "root", value(f, "application"))
}
