package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
)

// postgresReport returns the JSON report of a PostgreSQL database.
func postgresReport(t *testing.T, dsn string) []reportRow {
	t.Helper()
	o := reviews(t, "report", "--db", dsn, "--json")
	require.Zero(t, o.code, o.stderr)
	var rows []reportRow
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
	return rows
}

// process is a process of the program in the background.
type process struct {
	*exec.Cmd
	stderr output
}

// output is a buffer that is safe for concurrent use.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func startProcess(t *testing.T, dsn string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(reviewsBin, args...)}
	p.Env = append(os.Environ(), "REVIEWS_DB="+dsn)
	p.Stderr = &p.stderr
	require.NoError(t, p.Start())
	t.Cleanup(func() {
		if p.ProcessState == nil {
			_ = p.Process.Kill()
			_ = p.Wait()
		}
	})
	return p
}

// queryPostgresInt queries a number from the database itself. It returns 0 if the query fails, as
// for a missing table.
func queryPostgresInt(t *testing.T, conn *pgx.Conn, query string) (n int) {
	t.Helper()
	_ = conn.QueryRow(t.Context(), query).Scan(&n)
	return n
}

// with returns dsn with one more parameter.
func with(dsn, parameter string) string {
	if strings.Contains(dsn, "?") {
		return dsn + "&" + parameter
	}
	return dsn + "?" + parameter
}

func postgresConn(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// TestImportSQLBroker: with topics in the database the first and the second import give the
// expected report.
func TestImportSQLBroker(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 1500, "-seed", "11")
	dsn := postgresDSN(t)
	for range 2 {
		o := reviews(t, "import", "--broker", "sql", "--db", dsn, path)
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, expectedReport(t, path, bad), postgresReport(t, dsn))
	}
	// Again in this process, where the race detector sees it.
	c := &importCmd{File: path, pipelineFlags: pipelineFlags{Broker: sqlKind, Pipeline: true}}
	require.NoError(t, c.DB.UnmarshalText([]byte(postgresDSN(t))))
	require.NoError(t, c.Run(t.Context()))
}

// TestWorkersKilled: the read model is exact although the processes that update it are killed
// repeatedly during an import. The import waits for the messages that they had in flight.
func TestWorkersKilled(t *testing.T) {
	t.Parallel()
	t.Run("log", func(t *testing.T) {
		t.Parallel()
		db := filepath.Join(t.TempDir(), "reviews.db")
		path, bad := generateFile(t, 20_000, "-seed", "13")
		project := []string{"project"}
		importWhileKilling(t, "sqlite:"+db, "none", path, project, project)
		require.Equal(t, expectedReport(t, path, bad), report(t, db))
	})
	t.Run("topics", func(t *testing.T) {
		t.Parallel()
		dsn := postgresDSN(t)
		path, bad := generateFile(t, 4000, "-seed", "12")
		project, relay := []string{"project", "--broker", "sql"}, []string{"relay"}
		importWhileKilling(t, dsn, "sql", path, relay, relay, project, project)
		require.Equal(t, expectedReport(t, path, bad), postgresReport(t, dsn))
	})
}

// importWhileKilling imports a file while workers run, each in its own process. Each is killed a few
// times soon after its start.
func importWhileKilling(t *testing.T, db, broker, file string, workers ...[]string) {
	t.Helper()
	importOverWhileKilling(t, db, []string{"--broker", broker}, file, workers...)
}

// importOverWhileKilling is importWhileKilling with the flags of a broker.
func importOverWhileKilling(t *testing.T, db string, broker []string, file string, workers ...[]string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running sync.WaitGroup
	var mu sync.Mutex
	kills := map[string]int{}
	for _, args := range workers {
		running.Go(func() {
			for n := 1; ctx.Err() == nil; n++ {
				lasts := time.Hour
				if n <= 6 {
					lasts = 300*time.Millisecond + rand.N(1200*time.Millisecond)
				}
				life, cancel := context.WithTimeout(ctx, lasts) // then SIGKILL
				cmd := exec.CommandContext(life, reviewsBin, slices.Concat(args, []string{"--db", db})...)
				err := cmd.Run()
				if ctx.Err() == nil && life.Err() != nil && err != nil {
					mu.Lock()
					kills[args[0]]++
					mu.Unlock()
				}
				cancel()
			}
		})
	}
	o := reviews(t, slices.Concat([]string{"import", "--no-pipeline", "--db", db, file}, broker)...)
	stop()
	running.Wait()
	require.Zero(t, o.code, o.stderr)
	for _, args := range workers {
		require.Positive(t, kills[args[0]], args)
	}
}

// TestProjectWithoutRelay: a projector that is subscribed to topics reads the events from the log if
// no relay publishes them.
func TestProjectWithoutRelay(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 300, "-seed", "14")
	dsn := postgresDSN(t)
	conn := postgresConn(t, dsn)
	p := startProcess(t, dsn, "project", "--broker", "sql")
	live := `select count(*) from kinora.checkpoints where mode = 'live'`
	require.Eventually(t, func() bool { return queryPostgresInt(t, conn, live) == 1 }, patience, 10*time.Millisecond)
	o := reviews(t, "import", "--no-pipeline", "--broker", "sql", "--db", dsn, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, expectedReport(t, path, bad), postgresReport(t, dsn))
	require.Positive(t, queryPostgresInt(t, conn, `select count(*) from kinora.outbox where status = 'pending'`))
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.NoError(t, p.Wait(), p.stderr.String())
}

// TestProjectorTakesOver: one of two projectors has the messages, and the other waits for it
// without polling. When the first is killed in the middle of a batch, the second takes over.
func TestProjectorTakesOver(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "four.json")
	require.NoError(t, os.WriteFile(path, []byte(fourReviews), 0o600))
	dsn := postgresDSN(t)
	conn, other := postgresConn(t, dsn), postgresConn(t, dsn)
	require.Zero(t, reviews(t, "import", "--broker", "sql", "--db", dsn, path).code) // creates the tables
	want := postgresReport(t, dsn)
	_, err := conn.Exec(t.Context(), `truncate ratings_g1, latest_reviews_g1, kinora.markers;
		update kinora.checkpoints set mode = 'live', position = 0, event_id = '', recorded_at = null;
		update watermill_offsets_review set offset_acked = 0, last_processed_transaction_id = '0'`) // redelivers all
	require.NoError(t, err)

	const inBatch = `select count(*) from pg_stat_activity
		where datname = current_database() and query like '%watermill_offsets_review%' and state = 'idle in transaction'`
	const waiting = `from pg_stat_activity
		where datname = current_database() and query like '%watermill_offsets_review%' and wait_event_type = 'Lock'`
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table ratings in exclusive mode`) // makes the handler wait
	require.NoError(t, err)
	project := []string{"project", "--broker", "sql", "--ack-deadline", "1h"} // the second one may take long to start
	first := startProcess(t, dsn, project...)
	require.Eventually(t, func() bool { return queryPostgresInt(t, other, inBatch) == 1 }, patience, 5*time.Millisecond)
	second := startProcess(t, dsn, project...)
	require.Eventually(t, func() bool { return queryPostgresInt(t, other, `select count(*) `+waiting) == 1 }, patience, 5*time.Millisecond)
	since := `select (extract(epoch from min(xact_start)) * 1000)::bigint ` + waiting
	began := queryPostgresInt(t, other, since)
	for range 100 {
		require.Equal(t, began, queryPostgresInt(t, other, since), "still the same transaction: it does not poll")
	}
	require.NoError(t, first.Process.Kill())
	require.Error(t, first.Wait())
	require.NoError(t, tx.Rollback(t.Context()))
	require.Eventually(t, func() bool { return queryPostgresInt(t, other, `select sum(reviews) from ratings`) == 4 }, patience, 10*time.Millisecond)
	require.Equal(t, want, postgresReport(t, dsn))
	require.NoError(t, second.Process.Signal(syscall.SIGTERM))
	require.NoError(t, second.Wait(), second.stderr.String())
}

// TestWorkersStop: on a signal a worker drains and exits with status 0. It logs that it is running,
// and no password.
func TestWorkersStop(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	conn := postgresConn(t, dsn)
	for _, c := range []struct {
		name   string
		signal os.Signal
	}{{"relay", syscall.SIGTERM}, {"project", os.Interrupt}} {
		p := startProcess(t, with(dsn, "application_name="+c.name), c.name)
		require.Eventually(t, func() bool { return strings.Contains(p.stderr.String(), c.name+" is running") },
			patience, 5*time.Millisecond, c.name)
		require.Positive(t, queryPostgresInt(t, conn, `select count(*) from pg_stat_activity where application_name = '`+c.name+`'`))
		require.NoError(t, p.Process.Signal(c.signal))
		require.NoError(t, p.Wait(), p.stderr.String())
		require.NotContains(t, p.stderr.String(), "postgres://")
		require.NotContains(t, p.stderr.String(), "WARN")
		require.NotContains(t, p.stderr.String(), "ERROR")
	}
}

// TestBrokerRefuses: invalid flags fail before anything is opened.
func TestBrokerRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	db, text := "sqlite:"+filepath.Join(dir, "reviews.db"), filepath.Join(dir, "empty.json")
	require.NoError(t, os.WriteFile(text, nil, 0o600))
	nowhere := "postgres://ann:hunter2@127.0.0.1:1/none?connect_timeout=2"
	for _, c := range []struct {
		want string
		args []string
	}{
		{"use --db postgres://", []string{"import", "--broker", "sql", "--db", db, text}},
		{"use another --broker", []string{"import", "--no-pipeline", "--broker", "memory", "--db", db, text}},
		{"use another --broker", []string{"import", "--no-pipeline", "--broker", "memory", "--db", nowhere, text}},
		{"use --db postgres://", []string{"demo", "--broker", "sql"}},
		{"--processes", []string{"demo", "--processes", "2"}},
		{"use --db postgres://", []string{"relay", "--db", db}},
		{"use --db postgres://", []string{"project", "--broker", "sql", "--db", db}},
		{"use sqlite:PATH", []string{"project", "--db", "memory"}},
		{"open postgres", []string{"project", "--db", nowhere}},
	} {
		o := reviews(t, c.args...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
		require.NotContains(t, o.stderr, "hunter2")
		require.NoFileExists(t, filepath.Join(dir, "reviews.db"))
	}
}

// TestUnknownType: an event of an unknown type is parked, whether it is read from the log or from a
// topic, and events of other keys are applied.
func TestUnknownType(t *testing.T) {
	t.Parallel()
	for _, broker := range []string{noneKind, sqlKind} {
		t.Run(broker, func(t *testing.T) {
			t.Parallel()
			s := startService(t, database{kind: "postgres", path: postgresDSN(t)}, pipelineFlags{Broker: broker, Pipeline: true}, patience)
			require.NoError(t, s.db.inTx(t.Context(), func(tx eventstore.TxStore) error {
				_, err := tx.Append(t.Context(), "review-x-y", eventstore.NoStream, []eventstore.Draft{
					{ID: uuid.NewString(), Type: "review.unheard_of", Schema: 1, Data: []byte(`{}`)},
				})
				return err
			}))
			s.eventuallyParked(1)
			require.Equal(t, http.StatusCreated, s.post("tea", "ben", 3).status)
		})
	}
}

// TestDemoSQLBroker: the demo works with topics in the database, with one worker and with several.
func TestDemoSQLBroker(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
	}{{"one worker", nil}, {"processes", []string{"--processes", "2"}}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dsn := postgresDSN(t)
			o, result := demoJSON(t, append(c.args, "--db", dsn, "--broker", "sql",
				"--commands", "400", "--products", "8", "--kills", "2", "--duplicates", "0.9")...)
			require.Zero(t, o.code, "%s\n%s", o.stdout, o.stderr)
			requireNoTrouble(t, o)
			require.Equal(t, true, result["ok"])
			require.Equal(t, 2, intAt(t, result, "kills"))
			require.Zero(t, intAt(t, result, "exactly_once.wrong_products"))
			require.Positive(t, intAt(t, result, "control.wrong_products"))
			require.Equal(t, intAt(t, result, "deliveries"), intAt(t, result, "events")+intAt(t, result, "duplicates"))
			require.Len(t, result, 12)
			require.Contains(t, o.stdout, "between a handler's start and its ack")
			if c.args != nil {
				require.Contains(t, o.stdout, "a relay between its claim and its mark")
			}
			left, err := testBroker(t, dsn, 0).unconsumed(t.Context())
			require.NoError(t, err)
			require.Zero(t, left, "the last copies are delivered too")
		})
	}
}
