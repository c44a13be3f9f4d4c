package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
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

// postgresReport is what the program reports as JSON.
func postgresReport(t *testing.T, dsn string) []reportRow {
	t.Helper()
	o := reviews(t, "report", "--db", dsn, "--json")
	require.Zero(t, o.code, o.stderr)
	var rows []reportRow
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
	return rows
}

// process is one of the program's, in the background.
type process struct {
	*exec.Cmd
	stderr output
}

// output may be read while it is written.
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

func background(t *testing.T, dsn string, args ...string) *process {
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

// postgresNumber asks the database itself; a table that is not there yet counts as 0.
func postgresNumber(t *testing.T, conn *pgx.Conn, query string) (n int) {
	t.Helper()
	_ = conn.QueryRow(t.Context(), query).Scan(&n)
	return n
}

// with is dsn with one more parameter.
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

// TestImportSQLBroker: the topics in the database change nothing about the report, the first time and again.
func TestImportSQLBroker(t *testing.T) {
	t.Parallel()
	path, bad := generated(t, 1500, "-seed", "11")
	dsn := postgresDSN(t)
	for range 2 {
		o := reviews(t, "import", "--broker", "sql", "--db", dsn, path)
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, expected(t, path, bad), postgresReport(t, dsn))
	}
	// In this process, where the race detector sees it.
	c := &importCmd{File: path, pipelineFlags: pipelineFlags{sqlKind, true}}
	require.NoError(t, c.DB.UnmarshalText([]byte(postgresDSN(t))))
	require.NoError(t, c.Run(t.Context()))
}

// TestWorkersKilled: two relays and two projectors, each in a process of its own and killed at any moment, over
// and over, while an import goes on: the read model is what it must be.
func TestWorkersKilled(t *testing.T) {
	t.Parallel()
	path, bad := generated(t, 4000, "-seed", "12")
	dsn := postgresDSN(t)
	ctx, stop := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	var mu sync.Mutex
	kills := map[string]int{}
	for _, name := range []string{"relay", "relay", "project", "project"} {
		workers.Go(func() {
			for ctx.Err() == nil {
				life, cancel := context.WithTimeout(ctx, 300*time.Millisecond+rand.N(1200*time.Millisecond)) // then SIGKILL
				cmd := exec.CommandContext(life, reviewsBin, name, "--db", dsn)
				err := cmd.Run()
				if ctx.Err() == nil && life.Err() != nil && err != nil {
					mu.Lock()
					kills[name]++
					mu.Unlock()
				}
				cancel()
			}
		})
	}
	o := reviews(t, "import", "--no-pipeline", "--broker", "sql", "--db", dsn, path)
	stop()
	workers.Wait()
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, expected(t, path, bad), postgresReport(t, dsn))
	require.Positive(t, kills["relay"])
	require.Positive(t, kills["project"])
}

// TestTakeOver: of two projectors one has the messages and the other waits for it, without asking again and
// again. When the first is killed in the middle of a batch, the second takes over.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "four.json")
	require.NoError(t, os.WriteFile(path, []byte(fourReviews), 0o600))
	dsn := postgresDSN(t)
	conn, other := postgresConn(t, dsn), postgresConn(t, dsn)
	require.Zero(t, reviews(t, "import", "--broker", "sql", "--db", dsn, path).code) // makes the tables
	want := postgresReport(t, dsn)
	_, err := conn.Exec(t.Context(), `truncate ratings, latest_reviews, kinora.markers;
		update watermill_offsets_review set offset_acked = 0, last_processed_transaction_id = '0'`) // all once more
	require.NoError(t, err)

	const inBatch = `select count(*) from pg_stat_activity
		where datname = current_database() and query like '%watermill_offsets_review%' and state = 'idle in transaction'`
	const waiting = `from pg_stat_activity
		where datname = current_database() and query like '%watermill_offsets_review%' and wait_event_type = 'Lock'`
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `lock table ratings in exclusive mode`) // its handler waits
	require.NoError(t, err)
	first := background(t, dsn, "project")
	require.Eventually(t, func() bool { return postgresNumber(t, other, inBatch) == 1 }, 20*time.Second, 5*time.Millisecond)
	background(t, dsn, "project")
	require.Eventually(t, func() bool { return postgresNumber(t, other, `select count(*) `+waiting) == 1 }, 20*time.Second, 5*time.Millisecond)
	since := `select (extract(epoch from min(xact_start)) * 1000)::bigint ` + waiting
	began := postgresNumber(t, other, since)
	for range 100 {
		require.Equal(t, began, postgresNumber(t, other, since), "it is still the same look")
	}
	require.NoError(t, first.Process.Kill())
	require.Error(t, first.Wait())
	require.NoError(t, tx.Rollback(t.Context()))
	require.Eventually(t, func() bool { return postgresNumber(t, other, `select sum(reviews) from ratings`) == 4 }, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, want, postgresReport(t, dsn))
}

// TestWorkersStop: told to stop, a worker drains and its exit status is 0. It says that it runs, and no password.
func TestWorkersStop(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	conn := postgresConn(t, dsn)
	for _, c := range []struct {
		name   string
		signal os.Signal
	}{{"relay", syscall.SIGTERM}, {"project", os.Interrupt}} {
		p := background(t, with(dsn, "application_name="+c.name), c.name)
		require.Eventually(t, func() bool { return strings.Contains(p.stderr.String(), c.name+" is running") },
			20*time.Second, 5*time.Millisecond, c.name)
		require.Positive(t, postgresNumber(t, conn, `select count(*) from pg_stat_activity where application_name = '`+c.name+`'`))
		require.NoError(t, p.Process.Signal(c.signal))
		require.NoError(t, p.Wait(), p.stderr.String())
		require.NotContains(t, p.stderr.String(), "postgres://")
		require.NotContains(t, p.stderr.String(), "WARN")
		require.NotContains(t, p.stderr.String(), "ERROR")
	}
}

// TestBrokerRefuses: what cannot work says so before anything is opened.
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
		{"wants --db postgres://", []string{"import", "--broker", "sql", "--db", db, text}},
		{"use --broker sql", []string{"import", "--no-pipeline", "--db", db, text}},
		{"use --broker sql", []string{"import", "--no-pipeline", "--db", nowhere, text}},
		{"wants --db postgres://", []string{"demo", "--broker", "sql"}},
		{"--processes", []string{"demo", "--processes", "2"}},
		{"use postgres://", []string{"relay", "--db", db}},
		{"use postgres://", []string{"project", "--db", db}},
		{"open postgres", []string{"project", "--db", nowhere}},
	} {
		o := reviews(t, c.args...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
		require.NotContains(t, o.stderr, "hunter2")
		require.NoFileExists(t, filepath.Join(dir, "reviews.db"))
	}
}

// TestParkedSQLBroker: a message that nobody understands is set aside, and the ones behind it are applied.
func TestParkedSQLBroker(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "four.json")
	require.NoError(t, os.WriteFile(path, []byte(fourReviews), 0o600))
	dsn := postgresDSN(t)
	db, err := createPostgres(t.Context(), dsn)
	require.NoError(t, err)
	require.NoError(t, db.inTx(t.Context(), func(tx eventstore.TxStore) error {
		_, err := tx.Append(t.Context(), "review-x-y", eventstore.NoStream, []eventstore.Draft{
			{ID: uuid.NewString(), Type: "review.unheard_of", Schema: 1, Data: []byte(`{}`)},
		})
		return err
	}))
	require.NoError(t, db.Close())
	o := reviews(t, "import", "--broker", "sql", "--db", dsn, path)
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "1 messages are parked")
	require.Len(t, postgresReport(t, dsn), 2)
}

// TestDemoSQLBroker: killed and doubled, with the topics in the database, in one process and in several.
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
			require.Empty(t, o.stderr)
			require.Equal(t, true, result["ok"])
			require.Equal(t, 2, number64(t, result, "kills"))
			require.Zero(t, number64(t, result, "exactly_once.wrong_products"))
			require.Positive(t, number64(t, result, "control.wrong_products"))
			require.Equal(t, number64(t, result, "deliveries"), number64(t, result, "events")+number64(t, result, "duplicates"))
			require.Len(t, result, 12)
			require.Contains(t, o.stdout, "between a handler's start and its ack")
			if c.args != nil {
				require.Contains(t, o.stdout, "a relay between its claim and its mark")
			}
			left, err := testBroker(t, dsn, 0).unconsumed(t.Context())
			require.NoError(t, err)
			require.Zero(t, left, "the last copies were delivered, too")
		})
	}
}
