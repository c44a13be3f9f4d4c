package postgres_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// The read models of runners in tests, and the broker's table: deliveries by consumer, and
// whether they are acked.
const noteTables = `
create table broker (seq bigint generated always as identity primary key, consumer int not null, id text not null, key text not null,
	n int not null, acked boolean not null default false);
create index on broker (consumer, seq) where not acked;
create table sums (key text primary key, n bigint not null);
create table lists (key text primary key, items int[] not null)`

// noted is the event of these tests.
type noted struct {
	Key string
	N   int
}

var notes = eventstore.NewTypes(eventstore.Type[noted]("noted"))

// tableBroker is a broker that delivers its messages in order without waiting for acks. It
// delivers unacked messages again to the next subscriber. With keys, the messages of one key are
// in a lane.
type tableBroker struct {
	pool     *pgxpool.Pool
	consumer int
	keys     bool
}

func (b *tableBroker) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	rows, err := b.pool.Query(ctx, `select seq, id, key, n from broker where consumer = $1 and not acked order by seq`, b.consumer)
	if err != nil {
		return nil, err
	}
	type row struct {
		Seq     int64
		ID, Key string
		N       int
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return nil, err
	}
	to := make(chan *message.Message)
	go func() {
		for _, r := range all {
			payload, _ := json.Marshal(noted{r.Key, r.N})
			m := message.NewMessage(r.ID, payload)
			m.Metadata[provider.HeaderType] = "noted"
			if b.keys {
				m.Metadata[outbox.HeaderKey] = r.Key
			}
			go func() {
				select {
				case <-m.Acked():
					_, _ = b.pool.Exec(context.WithoutCancel(ctx), `update broker set acked = true where seq = $1`, r.Seq)
				case <-ctx.Done():
				}
			}()
			select {
			case to <- m:
			case <-ctx.Done():
				return
			}
		}
	}()
	return to, nil
}

func (*tableBroker) Close() error { return nil }

// sum adds to a sum, and takes a little time.
func sum(ctx context.Context, tx pgx.Tx, e eventstore.Event[noted]) error {
	_, err := tx.Exec(ctx, `insert into sums as s (key, n) select $1, $2 from pg_sleep(0.005) on conflict (key) do update set n = s.n + $2`, e.Data.Key, e.Data.N)
	return err
}

// list appends to a list, which shows the order.
func list(ctx context.Context, tx pgx.Tx, e eventstore.Event[noted]) error {
	_, err := tx.Exec(ctx, `insert into lists as l (key, items) values ($1, array[$2::int]) on conflict (key) do update set items = l.items || $2::int`, e.Data.Key, e.Data.N)
	return err
}

// watched is a provider that records when each unit began and ended, and may kill its process
// between its commit and its ack.
type watched struct {
	*postgres.DB
	spans *os.File
	kill  bool
}

func (w *watched) Do(ctx context.Context, u provider.Unit, run func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error)) error {
	begin := time.Now()
	err := w.DB.Do(ctx, u, run)
	end := time.Now()
	for _, m := range u.Messages {
		if m.Mark {
			_, _ = fmt.Fprintf(w.spans, "%s %d %d\n", m.ID, begin.UnixNano(), end.UnixNano())
		}
	}
	if err == nil && w.kill {
		die()
	}
	return err
}

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// untilStopped runs a child until SIGTERM. Its environment configures it.
func untilStopped(run func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func project(ctx context.Context) error {
	dir, kill := os.Getenv("KINORA_TEST_DIR"), os.Getenv("KINORA_TEST_KILL")
	consumer, _ := strconv.Atoi(os.Getenv("KINORA_TEST_CONSUMER"))
	lanes, _ := strconv.Atoi(os.Getenv("KINORA_TEST_LANES"))
	db, err := postgres.Open(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=8", nil)
	if err != nil {
		return err
	}
	defer db.Close()
	broker, err := pgxpool.New(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=4")
	if err != nil {
		return err
	}
	defer broker.Close()
	errs, err := os.Create(filepath.Join(dir, fmt.Sprint("errors-", consumer)))
	if err != nil {
		return err
	}
	spans, err := os.Create(filepath.Join(dir, fmt.Sprint("spans-", consumer)))
	if err != nil {
		return err
	}
	fn := sum
	if os.Getenv("KINORA_TEST_LIST") != "" {
		fn = list
	}
	p := projector.Define("noted", notes, projector.Options{Markers: os.Getenv("KINORA_TEST_UNMARKED") == ""},
		projector.On("noted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[noted]) error {
			if err := fn(ctx, tx, e); err != nil {
				return err
			}
			if kill == "handler" {
				die()
			}
			return nil
		}))
	lease, together := time.Second, os.Getenv("KINORA_TEST_TOGETHER") != ""
	if together { // and none is killed: a runner that is slow does not lose its lease
		lease = patience.Limit()
	}
	cfg := projector.RunnerConfig{Concurrency: max(lanes, 1), Lease: lease, Logger: slog.New(slog.NewTextHandler(errs, nil)), LogErrors: true}
	from := &tableBroker{broker, consumer, os.Getenv("KINORA_TEST_KEYS") != ""}
	runner, err := projector.NewRunner(&watched{db, spans, kill == "commit"}, projector.Subscribe(from, "notes"), cfg, p)
	if err != nil {
		return err
	}
	if together { // at the same time as the other one
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint("ready-", consumer)), nil, 0o600); err != nil {
			return err
		}
		for ctx.Err() == nil {
			if _, err := os.Stat(filepath.Join(dir, "go")); err == nil {
				break
			}
			time.Sleep(time.Millisecond) // it polls for the file
		}
	}
	return runner.Run(ctx)
}

// projectors runs runners in separate processes.
type projectors struct {
	*testing.T
	db  *postgres.DB
	dsn string
	dir string
}

func newProjectors(t *testing.T) *projectors {
	t.Helper()
	db := postgrestest.OpenBusy(t, nil, totals)
	dsn := db.Pool().Config().ConnString()
	_, err := db.Pool().Exec(t.Context(), noteTables)
	require.NoError(t, err)
	return &projectors{t, db, dsn, t.TempDir()}
}

// start starts a runner. env adds to its configuration.
func (p *projectors) start(consumer int, env ...string) *exec.Cmd {
	p.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(append(os.Environ(), "KINORA_TEST_CHILD=project", "KINORA_TEST_DSN="+p.dsn, "KINORA_TEST_DIR="+p.dir,
		fmt.Sprint("KINORA_TEST_CONSUMER=", consumer)), env...)
	c.Stderr = os.Stderr
	require.NoError(p, c.Start())
	p.Cleanup(func() { _ = c.Process.Kill() })
	return c
}

// stop stops a runner, which must drain.
func (p *projectors) stop(c *exec.Cmd) {
	p.Helper()
	require.NoError(p, c.Process.Signal(syscall.SIGTERM))
	require.NoError(p, c.Wait())
}

// kill kills a runner.
func (p *projectors) kill(c *exec.Cmd) {
	_ = c.Process.Kill()
	_ = c.Wait()
}

// finished waits until all messages are acked and none is parked.
func (p *projectors) finished() {
	p.Helper()
	patience.Until(p, func() bool {
		return count(p.T, p.db, `select (select count(*) from broker where not acked) + (select count(*) from kinora.parked)`) == 0
	}, "no message to wait or be parked")
}

// spansOf returns when a process had each message in a unit.
func (p *projectors) spansOf(consumer int) map[string][][2]int64 {
	p.Helper()
	text, err := os.ReadFile(filepath.Join(p.dir, fmt.Sprint("spans-", consumer)))
	require.NoError(p, err)
	spans := map[string][][2]int64{}
	for line := range bytes.Lines(text) {
		var id string
		var begin, end int64
		_, err := fmt.Sscanf(string(line), "%s %d %d", &id, &begin, &end)
		require.NoError(p, err)
		spans[id] = append(spans[id], [2]int64{begin, end})
	}
	return spans
}

// Two processes receive each message fifty times, at the same time, in no lane. The expected sum
// is computed from the messages. Without markers the same deliveries give a wrong sum.
// Promise: G4.1
func TestDeliveredAHundredTimesThroughTwoProcesses(t *testing.T) {
	t.Parallel()
	const ids, copies = 40, 50
	for name, control := range map[string]bool{"markers": false, "control arm": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newProjectors(t)
			expected, env := 0, []string{"KINORA_TEST_LANES=16", "KINORA_TEST_TOGETHER=1"}
			if control {
				env = append(env, "KINORA_TEST_UNMARKED=1")
			}
			for i := range ids {
				expected += i + 1
			}
			_, err := p.db.Pool().Exec(t.Context(), `
				insert into broker (consumer, id, key, n)
				select c, 'm' || i, 'k', i from generate_series(1, $2) copy, generate_series(1, $1) i, generate_series(1, 2) c order by copy, i`, ids, copies)
			require.NoError(t, err)
			one, other := p.start(1, env...), p.start(2, env...)
			patience.Until(t, func() bool {
				ready, err := filepath.Glob(filepath.Join(p.dir, "ready-*"))
				return err == nil && len(ready) == 2
			}, "both runners")
			require.NoError(t, os.WriteFile(filepath.Join(p.dir, "go"), nil, 0o600))
			p.finished()
			p.stop(one)
			p.stop(other)
			total := count(t, p.db, `select n from sums where key = 'k'`)
			if control {
				require.Greater(t, total, 2*expected, "without markers each unit counts, and a unit has several deliveries of a message")
				return
			}
			require.Equal(t, expected, total)
			require.Zero(t, count(t, p.db, `select count(*) from kinora.parked`))
			mine, theirs := p.spansOf(1), p.spansOf(2)
			held := 0
			for id, spans := range mine {
				held += overlapping(spans, theirs[id])
			}
			t.Logf("%d messages, %d deliveries: %d ids were in units of both processes at once", ids, 2*copies*ids, held)
			require.Positive(t, held, "otherwise this test shows nothing")
			for _, consumer := range []string{"1", "2"} {
				text, err := os.ReadFile(filepath.Join(p.dir, "errors-"+consumer))
				require.NoError(t, err)
				require.Empty(t, string(text), "no error is logged")
			}
		})
	}
}

// overlapping returns 1 if any span of a overlaps one of b.
func overlapping(a, b [][2]int64) int {
	for _, x := range a {
		for _, y := range b {
			if x[0] < y[1] && y[0] < x[1] {
				return 1
			}
		}
	}
	return 0
}

// A process that is killed between its handler and the commit leaves no trace of the handler. One
// that is killed between the commit and the ack leaves a marker, and the redelivery is skipped.
// Promise: G4.1
func TestKilledAroundTheCommit(t *testing.T) {
	t.Parallel()
	for at, c := range map[string]struct{ kills, left int }{"handler": {1, 0}, "commit": {3, 7}} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			p := newProjectors(t)
			_, err := p.db.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n) values (1, 'm', 'k', 7)`)
			require.NoError(t, err)
			for range c.kills {
				killed := p.start(1, "KINORA_TEST_KILL="+at)
				require.Error(t, killed.Wait())
				require.True(t, killed.ProcessState.Sys().(syscall.WaitStatus).Signaled())
				require.Equal(t, c.left, count(t, p.db, `select coalesce(sum(n), 0) from sums`))
				require.Equal(t, 1, count(t, p.db, `select count(*) from broker where not acked`))
			}
			last := p.start(1)
			p.finished()
			p.stop(last)
			require.Equal(t, 7, count(t, p.db, `select sum(n) from sums`))
		})
	}
}

// Order by key through lanes: a list to which each message appends is 1 to n, with 32 lanes and
// kills.
// Promise: G4.11
func TestLanesKeepOrderUnderKills(t *testing.T) {
	t.Parallel()
	keys, each := longtest.Or(30, 60), longtest.Or(30, 60)
	for !lanesKeepOrder(t, keys, each) { // a slow test may kill too late
		each *= 2
		require.Less(t, each, 10_000, "no kill left a message")
	}
}

// lanesKeepOrder reports whether messages were left after the last kill.
func lanesKeepOrder(t *testing.T, keys, each int) bool {
	t.Helper()
	const kills = 4
	p := newProjectors(t)
	_, err := p.db.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n)
		select 1, 'm' || k || '-' || n, 'k' || k, n from generate_series(1, $2) n, generate_series(1, $1) k order by n, random()`, keys, each)
	require.NoError(t, err)
	env := []string{"KINORA_TEST_LANES=32", "KINORA_TEST_KEYS=1", "KINORA_TEST_LIST=1"}
	for i := range kills {
		c := p.start(1, env...)
		goal := (i + 1) * keys * each / (kills + 2)
		patience.Until(t, func() bool { return count(t, p.db, `select count(*) from kinora.markers`) > goal }, "%d markers", goal)
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // so that the kill hits any step
		p.kill(c)
	}
	left := count(t, p.db, `select count(*) from broker where not acked`)
	applied := count(t, p.db, `select count(*) from kinora.markers`)
	t.Logf("after %d kills %d of %d messages are applied, and %d of those will be redelivered", kills, applied, keys*each, applied-(keys*each-left))
	last := p.start(1, env...)
	p.finished()
	p.stop(last)
	require.Equal(t, keys, count(t, p.db, `select count(*) from lists`))
	require.Zero(t, count(t, p.db, fmt.Sprintf(`select count(*) from lists where items <> array(select generate_series(1, %d))`, each)))
	return left > 0
}

// The database is unreachable while messages arrive: no message is parked or lost, because such
// attempts do not count.
// Promise: G6.1
func TestAnOutageParksNothing(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	_, err := direct.Pool().Exec(t.Context(), noteTables)
	require.NoError(t, err)
	_, err = direct.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n) select 1, 'm' || n, 'k' || n % 7, n from generate_series(1, 300) n`)
	require.NoError(t, err)
	var logged bytes.Buffer
	var retried atomic.Int64
	p := projector.Define("noted", notes, projector.Options{Markers: true}, projector.On("noted", sum))
	cfg := projector.RunnerConfig{
		Concurrency: 4, Logger: slog.New(slog.NewTextHandler(&logged, nil)), Timeout: patience.Limit(),
		Observer: projector.RunnerObserver{Retried: func(_ string, class projector.Class, _ time.Duration) {
			retried.Add(1)
			if class != projector.ClassTransient && class != provider.ClassAmbiguous {
				t.Errorf("an outage has class %s", class)
			}
		}},
	}
	cfg.Retry.Base, cfg.Retry.Max = time.Millisecond, 20*time.Millisecond
	runner, err := projector.NewRunner(db, projector.Subscribe(&tableBroker{direct.Pool(), 1, true}, "notes"), cfg, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- runner.Run(ctx) }()
	patience.Until(t, func() bool { return count(t, direct, `select count(*) from broker where acked`) > 50 }, "50 messages to be acked")
	proxy.Away(true)
	before := retried.Load()
	patience.Until(t, func() bool { return retried.Load() > before+100 }, "more attempts than may be counted for the messages of four workers")
	require.Positive(t, count(t, direct, `select count(*) from broker where not acked`))
	proxy.Away(false)
	patience.Until(t, func() bool { return count(t, direct, `select count(*) from broker where not acked`) == 0 }, "all messages to be acked")
	cancel()
	require.NoError(t, <-done)
	require.Zero(t, count(t, direct, `select count(*) from kinora.parked`))
	require.Equal(t, 300*301/2, count(t, direct, `select sum(n) from sums`))
	require.Contains(t, logged.String(), "class=transient")
}

// A serialization failure is never a message's fault: no attempt is counted.
// Promise: G6.1
func TestSerializationFailuresCountNoAttempt(t *testing.T) {
	t.Parallel()
	_, db, direct := throughProxy(t)
	_, err := direct.Pool().Exec(t.Context(), noteTables+`; insert into broker (consumer, id, key, n) values (1, 'm', 'k', 7)`)
	require.NoError(t, err)
	tries := 0
	p := projector.Define("noted", notes, projector.Options{Markers: true},
		projector.On("noted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[noted]) error {
			if err := sum(ctx, tx, e); err != nil {
				return err
			}
			if tries++; tries <= 12 {
				_, err := tx.Exec(ctx, `do $$ begin raise exception 'conflict' using errcode = 'serialization_failure'; end $$`)
				return err
			}
			return nil
		}))
	cfg := projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}
	cfg.Retry.Base, cfg.Retry.Max = time.Millisecond, 5*time.Millisecond
	runner, err := projector.NewRunner(db, projector.Subscribe(&tableBroker{direct.Pool(), 1, false}, "notes"), cfg, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- runner.Run(ctx) }()
	patience.Until(t, func() bool { return count(t, direct, `select count(*) from broker where not acked`) == 0 }, "the message to be acked")
	cancel()
	require.NoError(t, <-done)
	require.Equal(t, 13, tries)
	require.Zero(t, count(t, direct, `select count(*) from kinora.parked`))
	require.Equal(t, 7, count(t, direct, `select sum(n) from sums`))
}
