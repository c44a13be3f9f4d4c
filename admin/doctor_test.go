package admin_test

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Promise: O3.2
func TestDoctorFindsNothingInAHealthyService(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner(projector.RunnerConfig{}), w.relay(outbox.RelayConfig{}), w.worker())
	for i := range 20 {
		w.price(fmt.Sprint(i), 100, 200)
	}
	w.enqueue(greet.New("greet-ann", "ann"))
	w.eventually(func() error {
		f := w.facts()
		if len(f.Services) < 3 || f.Log.Head == 0 || len(f.Projectors) != 1 || f.Projectors[0].Position < f.Log.Head || len(f.Outbox)+len(f.Tasks) > 0 {
			return fmt.Errorf("not idle: %+v", f)
		}
		return nil
	})
	limits := provider.DiagnosisLimits{Skew: time.Minute} // a report of a busy machine has the clock of a while ago
	found, err := findings(w.ops.Doctor(t.Context(), limits))
	require.NoError(t, err)
	require.Empty(t, titles(found))
}

// Check 1. The remedy ends what the others wait for.
// Promise: O3.2
func TestDoctorNamesATransactionThatReadersWaitFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner(projector.RunnerConfig{}))
	w.price("tea", 1)
	tx, err := w.db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `set local application_name = 'forgotten'`)
	require.NoError(t, err)
	_, err = w.db.InTx(tx).Append(t.Context(), "product-cup", eventstore.Any, drafts(t, 2))
	require.NoError(t, err)
	w.price("tea", 3)
	f := w.finds(soon, provider.FindingWait, "open transaction: pid ")
	require.Equal(t, "forgotten", value(f, "application"))
	require.Contains(t, f.Meaning, "Readers of the log")
	require.NotEmpty(t, value(f, "open for"))
	require.NotEmpty(t, f.Private, "the text of the query")
	require.NotContains(t, fmt.Sprint(f.Title, f.Meaning, f.Facts, f.Remedy), "insert", "the text of a query may have data")
	w.exec(f.Remedy[0])
	w.quietly(soon, provider.FindingWait)
	w.eventually(func() error { return w.applied(3) })
}

func (w *world) applied(cents int) error {
	var is int
	if err := w.db.Pool().QueryRow(w.Context(), `select coalesce(max(cents), 0) from prices`).Scan(&is); err != nil || is != cents {
		return fmt.Errorf("the price is %d: %w", is, err)
	}
	return nil
}

// Promise: O3.2
func TestDoctorNamesATransactionThatAppendsWaitFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.price("tea", 1)
	tx, err := w.db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `update kinora.streams set version = version`)
	require.NoError(t, err)
	appended := make(chan error, 1)
	go func() {
		_, err := w.db.Append(context.WithoutCancel(t.Context()), "product-tea", eventstore.Any, drafts(t, 2))
		appended <- err
	}()
	f := w.finds(soon, provider.FindingWait, "open transaction: pid ")
	require.Contains(t, value(f, "keeps waiting"), "pid ")
	w.exec(f.Remedy[0])
	require.NoError(t, <-appended)
	w.quietly(soon, provider.FindingWait)
}

// Promise: O3.2
func TestDoctorNamesAPreparedTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.price("tea", 1)
	tx, err := w.db.Pool().Begin(t.Context())
	require.NoError(t, err)
	_, err = w.db.InTx(tx).Append(t.Context(), "product-cup", eventstore.Any, drafts(t, 2))
	require.NoError(t, err)
	name := fmt.Sprintf("it's %d", time.Now().UnixNano())
	_, err = tx.Exec(t.Context(), `prepare transaction '`+strings.ReplaceAll(name, "'", "''")+`'`)
	require.NoError(t, err)
	_ = tx.Rollback(t.Context())
	f := w.finds(soon, provider.FindingWait, "prepared transaction "+name)
	w.exec(f.Remedy[0])
	w.quietly(soon, provider.FindingWait, provider.FindingSnapshot)
}

// Check 2.
// Promise: O3.2
func TestDoctorNamesARelayThatIsGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.price("tea", 1, 2, 3)
	_, err := provider.ClaimEntries(t.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "host-1/77", Lease: time.Hour})
	require.NoError(t, err)
	gone := provider.ServiceReport{ID: "1", Kind: "relay", Holder: "host-1/77", Process: "host-1/77", Clock: time.Now()}
	require.NoError(t, w.db.Report(t.Context(), gone, time.Hour))
	w.quietly(soon, provider.FindingGone)
	require.NoError(t, w.db.Report(t.Context(), gone, time.Millisecond))
	f := w.finds(soon, provider.FindingGone, "A relay has ended with work in its hands: host-1/77")
	require.Contains(t, value(f, "claimed entries"), "3, until ")
	require.Contains(t, f.Remedy[0], "start another relay")
	w.start(w.relay(outbox.RelayConfig{}))
	w.eventually(func() error {
		f := w.finds(soon, provider.FindingGone, "A relay has ended")
		if !strings.Contains(f.Remedy[0], "1 other relay take over") {
			return fmt.Errorf("the remedy is %s", f.Remedy)
		}
		return nil
	})
	w.exec(`update kinora.outbox set next_attempt_at = now() - interval '1 hour'`) // the lease ends
	w.quietly(soon, provider.FindingGone)
}

// Promise: O3.2
func TestDoctorNamesARunnerAndAWorkerThatAreGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	terms := claim.Terms{Holder: "runner-1", Token: claim.NewToken(), Lease: time.Hour}
	has, err := w.db.AcquireLease(t.Context(), "reader/prices", terms)
	require.NoError(t, err)
	require.True(t, has)
	w.enqueue(greet.New("greet-ann", "ann"))
	_, err = provider.ClaimTasks(t.Context(), w.db, provider.TaskQuery{Kinds: []string{"mail/greet"}}, claim.Terms{Holder: "worker-1", Lease: time.Hour})
	require.NoError(t, err)
	for _, kind := range []string{"runner", "worker"} {
		r := provider.ServiceReport{ID: kind, Kind: kind, Holder: kind + "-1", Process: "host/" + kind, Clock: time.Now()}
		require.NoError(t, w.db.Report(t.Context(), r, time.Millisecond))
	}
	f := w.finds(soon, provider.FindingGone, "A runner has ended with work in its hands: host/runner")
	require.Contains(t, value(f, "lease"), "reader/prices, until ")
	f = w.finds(soon, provider.FindingGone, "A worker has ended with work in its hands: host/worker")
	require.Contains(t, value(f, "claimed tasks"), "1, until ")
}

// Promise: O3.2
func TestDoctorNamesWorkThatNobodyDoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.price("tea", 1)
	w.enqueue(greet.New("greet-ann", "ann"))
	w.finds(soon, provider.FindingGone, "Entries wait, and no relay runs")
	w.finds(soon, provider.FindingGone, "Tasks are due, and no worker runs: mail/greet")
	w.start(w.relay(outbox.RelayConfig{}), w.worker())
	w.quietly(soon, provider.FindingGone)
}

// Promise: O3.2
func TestDoctorNamesKindsOfTasksThatNoWorkerDefines(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.worker())
	w.enqueue(greet.New("greet-ann", "ann"), provider.TaskDraft{ID: "part-ann", Kind: "mail/part", Input: json.RawMessage("1")})
	f := w.finds(soon, provider.FindingGone, "Tasks are due, and no worker defines their kind: mail/part")
	require.Equal(t, "1", value(f, "workers of other kinds"))
	require.Contains(t, value(f, "due"), "since ")
	require.Contains(t, f.Remedy[0], "deploy a worker that defines mail/part")
	part := provider.ServiceReport{ID: "part", Kind: "worker", Kinds: []string{"mail/part"}, Clock: time.Now()}
	require.NoError(t, w.db.Report(t.Context(), part, time.Hour))
	w.quietly(soon, provider.FindingGone)
}

// Check 3.
// Promise: O3.2
func TestDoctorNamesWhatIsPaused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.relay(outbox.RelayConfig{}))
	w.deaf.Store(true)
	w.price("tea", 1)
	f := w.finds(soon, provider.FindingPaused, "Every publish to the topic product fails")
	require.Contains(t, value(f, "error"), "errors.errorString", "the class, and not the text")
	w.deaf.Store(false)
	w.quietly(soon, provider.FindingPaused)

	w.start(w.runner(projector.RunnerConfig{Concurrency: 1}))
	w.price("copper", -1)
	w.price("zinc", -1)
	w.price("lead", -1)
	w.price("tin", -1)
	f = w.finds(soon, provider.FindingPaused, "Messages of the projector prices fail one after the other")
	require.Equal(t, "prices/priced", value(f, "handler"))
	w.fixed.Store(true)
	w.price("gold", 1)
	w.quietly(soon, provider.FindingPaused)
	for kind, of := range map[string][2]string{provider.PauseTopic: {"outbox", "product"}, provider.PauseProjector: {"projectors", "prices"}} {
		set, err := w.ops.Pause(t.Context(), kind, of[1], by)
		require.NoError(t, err)
		require.True(t, set)
		f = w.finds(soon, provider.FindingPaused, "The "+kind+" "+of[1]+" is paused")
		require.Equal(t, "a test", value(f, "reason"))
		require.Contains(t, f.Remedy[0], "kinora "+of[0]+" resume "+of[1])
		_, err = w.ops.Resume(t.Context(), kind, of[1], by)
		require.NoError(t, err)
	}
	_, err := w.ops.Pause(t.Context(), provider.PauseProjector, "nosuch", by)
	require.ErrorIs(t, err, provider.ErrInput)
	w.quietly(soon, provider.FindingPaused)
}

// Check 5.
// Promise: O3.2
func TestDoctorNamesParkedKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner(projector.RunnerConfig{}))
	w.price("tea", 0, 5, 6)
	w.price("it's", 0)
	w.eventually(func() error {
		f := w.finds(soon, provider.FindingParked, "prices are stuck")
		if value(f, "messages of all keys") != "4" {
			return fmt.Errorf("parked: %v", f.Facts)
		}
		require.Equal(t, "2", value(f, "keys that wait for a person"))
		require.Contains(t, fmt.Sprint(f.Facts), "key product-tea, type product.priced, handler prices/priced, class permanent")
		require.Contains(t, fmt.Sprint(f.Facts), "2 wait behind it")
		require.Contains(t, fmt.Sprint(f.Facts), `'product-it'\''s'`)
		require.Contains(t, fmt.Sprint(f.Remedy), "kinora parked replay --projector prices --key product-tea")
		return nil
	})
	w.fixed.Store(true)
	n, err := w.ops.Replay(t.Context(), projector.ParkedFilter{Projector: "prices"}, by)
	require.NoError(t, err)
	require.Equal(t, 4, n)
	w.quietly(soon, provider.FindingParked)
}

// Check 6.
// Promise: O3.2
func TestDoctorNamesAProjectorThatLags(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.start(w.runner(projector.RunnerConfig{}))
	w.price("tea", 1)
	w.eventually(func() error { return w.applied(1) })
	stop()
	w.price("tea", 2, 3)
	f := w.finds(soon, provider.FindingLag, "The projector prices lags")
	require.Equal(t, "2", value(f, "events not applied"))
	require.Equal(t, []string{"start a runner of prices", `if no program has it any more: kinora projectors forget prices --reason "…"`}, f.Remedy)

	tx, err := w.db.Pool().Begin(t.Context()) // its handler waits for a lock
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `lock table prices`)
	require.NoError(t, err)
	w.start(w.runner(projector.RunnerConfig{}))
	w.eventually(func() error {
		if f := w.finds(soon, provider.FindingLag, "The projector prices lags"); !strings.Contains(f.Meaning, "stands still") {
			return fmt.Errorf("says %s", f.Meaning)
		}
		return nil
	})
	w.finds(soon, provider.FindingWait, "open transaction: pid ") // the cause comes first
	require.NoError(t, tx.Rollback(t.Context()))
	w.quietly(soon, provider.FindingLag, provider.FindingWait)
}

// Check 7.
// Promise: O3.2
func TestDoctorNamesAnOldSnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	tx, err := w.db.Pool().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `select from prices`)
	require.NoError(t, err)
	f := w.finds(soon, provider.FindingSnapshot, "An old transaction keeps dead rows: pid ")
	require.Equal(t, "idle in transaction", value(f, "state"))
	w.exec(f.Remedy[0])
	w.quietly(soon, provider.FindingSnapshot)
}

// Check 8.
// Promise: O3.2
func TestDoctorNamesMissingAndNewerMigrations(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Create(t, pgtest.Shared(t), "empty", func(context.Context, string) error { return nil })
	db, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	defer db.Close()
	found, err := findings(adminOf(t, db).Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "The database "+db.Pool().Config().ConnConfig.Database+" has no tables of Kinora", found[0].Title)
	require.Contains(t, found[0].Meaning, "Otherwise --db is that of another database")
	require.Equal(t, []string{"kinora migrate up"}, found[0].Remedy)
	require.NoError(t, db.Migrate(t.Context()))
	wrong, err := postgres.Open(t.Context(), dsn, &postgres.Config{Schema: "wrong"})
	require.NoError(t, err)
	defer wrong.Close()
	d, err := adminOf(t, wrong).Doctor(t.Context(), soon)
	require.NoError(t, err)
	require.Len(t, d.Findings, 1)
	require.Contains(t, d.Findings[0].Title, "The schema wrong of the database ")
	require.Equal(t, "use --schema kinora, or KINORA_SCHEMA", d.Findings[0].Remedy[0], "not to create tables in the wrong place")
	require.Equal(t, "everything else", d.Unchecked[0].What)
	found, err = findings(adminOf(t, db).Doctor(t.Context(), provider.DiagnosisLimits{}))
	require.NoError(t, err)
	require.Empty(t, titles(found))
	_, err = db.Pool().Exec(t.Context(), `insert into kinora.migrations (version_id, is_applied) values (99, true)`)
	require.NoError(t, err)
	found, err = findings(adminOf(t, db).Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Contains(t, titles(found)[0], "A newer program has migrated the database")
	require.Equal(t, "99", value(found[0], "database"))
	_, err = db.Pool().Exec(t.Context(), `update kinora.migrations set oldest = 1 where version_id = 99`)
	require.NoError(t, err)
	found, err = findings(adminOf(t, db).Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Equal(t, "Programs of this version run on it.", found[0].Meaning, "during a deployment")
	require.False(t, found[0].Blocks)
}

// Check 9.
// Promise: O3.2
func TestDoctorNamesRolesThatMayDoTooMuchOrTooLittle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, script := range []func(string) (string, error){postgres.RolesSQL, postgres.GrantsSQL} {
		sql, err := script("kinora")
		require.NoError(t, err)
		w.exec(sql)
	}
	w.quietly(soon, provider.FindingRights)
	w.exec(`grant update on kinora.events to kinora_projector; revoke insert on kinora.markers from kinora_projector; grant insert on kinora.events to public`)
	f := w.finds(soon, provider.FindingRights, "kinora_projector may do too much")
	require.Equal(t, "update on kinora.events", value(f, "rights"))
	w.exec(f.Remedy[0])
	f = w.finds(soon, provider.FindingRights, "kinora_projector lacks rights")
	require.Equal(t, "insert on kinora.markers", value(f, "rights"))
	w.exec(f.Remedy[0])
	f = w.finds(soon, provider.FindingRights, "public may do too much")
	w.exec(f.Remedy[0])
	w.quietly(soon, provider.FindingRights)
}

// Check 10.
// Promise: O3.2
func TestDoctorNamesAPoolerThatLosesStatements(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, setup)
	pooler := pgtest.NewPooler(t, pgtest.Shared(t), "default_pool_size=8")
	found := func(dsn string) (list []string) {
		db, err := postgres.Open(t.Context(), dsn, nil)
		require.NoError(t, err)
		defer db.Close()
		all, err := findings(adminOf(t, db).Doctor(t.Context(), provider.DiagnosisLimits{}))
		require.NoError(t, err)
		for _, f := range all {
			require.Equal(t, provider.FindingPooler, f.Check)
			list = append(list, f.Title)
		}
		return list
	}
	lost := found(pooler.DSN(t, dsn))
	require.Equal(t, []string{"A pooler on the way loses prepared statements", "A pooler on the way loses notifications"}, lost)
	require.Equal(t, []string{"A pooler on the way loses notifications"}, found(pooler.DSN(t, dsn, "default_query_exec_mode=cache_describe")))
	require.Empty(t, found(dsn))
}

// Check 11.
// Promise: O3.2
func TestDoctorNamesClocksThatDiffer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.relay(outbox.RelayConfig{}), w.runner(projector.RunnerConfig{}))
	relay := provider.ServiceReport{ID: "1", Kind: "relay", Holder: "h/1", Process: "h/1", Clock: time.Now().Add(-time.Hour)}
	require.NoError(t, w.db.Report(t.Context(), relay, time.Hour))
	f := w.finds(provider.DiagnosisLimits{Skew: time.Minute}, provider.FindingClock, "The clock of a relay differs")
	require.Contains(t, value(f, "clock"), "behind that of the database")
	require.Contains(t, value(f, "clock"), "0m")
	all, err := findings(w.ops.Doctor(t.Context(), provider.DiagnosisLimits{Skew: time.Minute}))
	require.NoError(t, err)
	require.Len(t, all, 1, titles(all))
}

// Check 12.
// Promise: O3.2
func TestDoctorNamesSequencesWithACache(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`alter table kinora.outbox alter id set cache 20`)
	f := w.finds(soon, provider.FindingSequence, "kinora.outbox draws numbers out of order")
	require.Equal(t, "20", value(f, "cache"))
	w.exec(f.Remedy[0])
	w.quietly(soon, provider.FindingSequence)
}

// Check 13.
// Promise: O3.2
func TestDoctorNamesAbandonedEntriesAndTasks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.price("tea", 1)
	entries, err := provider.ClaimEntries(t.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "r"})
	require.NoError(t, err)
	_, err = w.db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: entries[0].Seq, Token: entries[0].Token, To: outbox.Abandoned, Error: "refused"}})
	require.NoError(t, err)
	w.enqueue(greet.New("greet-nobody", ""))
	w.start(w.worker(), w.relay(outbox.RelayConfig{}))
	f := w.finds(soon, provider.FindingAbandoned, "Entries of the outbox are abandoned")
	require.Equal(t, "1", value(f, "entries"))
	f = w.finds(soon, provider.FindingAbandoned, "Tasks are abandoned")
	require.Equal(t, "1", value(f, "tasks"))
	n, err := w.ops.Requeue(t.Context(), outbox.Filter{Seqs: []int64{entries[0].Seq}}, by)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.NoError(t, w.db.CompleteTask(t.Context(), "greet-nobody", []byte("true"), by))
	w.quietly(soon, provider.FindingAbandoned)
	acts, err := w.ops.Acts(t.Context(), provider.ActFilter{})
	require.NoError(t, err)
	require.Len(t, acts, 1)
	require.Equal(t, "requeue", acts[0].Verb)
	require.Equal(t, provider.ActDone, acts[0].State)
	require.Equal(t, by, acts[0].Decision)
	require.JSONEq(t, fmt.Sprintf(`{"seqs":[%d]}`, entries[0].Seq), string(acts[0].Detail))
	require.Equal(t, int64(1), acts[0].Applied)
	full := outbox.Filter{
		Status: []outbox.Status{outbox.Failed}, Topic: "t", Key: "k", Stream: "s", Seqs: []int64{7}, Older: time.Hour, After: 1, Limit: 1, Force: true,
	}
	_, err = w.ops.Requeue(t.Context(), full, by)
	require.NoError(t, err)
	acts, err = w.ops.Acts(t.Context(), provider.ActFilter{Limit: 1})
	require.NoError(t, err)
	var recorded map[string]any
	require.NoError(t, json.Unmarshal(acts[0].Detail, &recorded))
	require.Len(t, recorded, reflect.TypeFor[outbox.Filter]().NumField()-2, "each condition is recorded, without After and Limit")
}

// What applies to other stores.
// Promise: O3.2
func TestDoctorOnOtherStores(t *testing.T) {
	t.Parallel()
	file, err := sqlite.Open(t.Context(), t.TempDir()+"/a.db", nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, file.Close()) })
	found, err := findings(adminOf(t, file).Doctor(t.Context(), soon))
	require.NoError(t, err)
	require.Contains(t, titles(found)[0], "missing, or older")
	require.NoError(t, file.Migrate(t.Context()))
	mem, err := memory.New(nil)
	require.NoError(t, err)
	for name, db := range map[string]interface {
		eventstore.Store
		provider.Registry
		provider.Acts
	}{"sqlite": file, "memory": mem} {
		t.Run(name, func(t *testing.T) {
			var ops = adminOf(t, file)
			if name == "memory" {
				ops = adminOf(t, mem)
			}
			found, err := findings(ops.Doctor(t.Context(), soon))
			require.NoError(t, err)
			require.Empty(t, titles(found))
			_, err = ops.Pause(t.Context(), provider.PauseTopic, "a", by)
			require.NoError(t, err)
			require.NoError(t, db.Report(t.Context(), provider.ServiceReport{ID: "1", Kind: "relay", Process: "h/1", Clock: time.Now().Add(time.Hour)}, time.Hour))
			found, err = findings(ops.Doctor(t.Context(), soon))
			require.NoError(t, err)
			require.Len(t, found, 2)
			require.Equal(t, provider.FindingPaused, found[0].Check)
			require.Equal(t, provider.FindingClock, found[1].Check)
		})
	}
}
