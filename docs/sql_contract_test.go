//go:build unix

package docs_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
)

type sold struct{ N int }

var soldTypes = eventstore.NewTypes(eventstore.Type[sold]("shop.sold"))

// sales is the route of the service.
func sales(string, eventstore.Draft) []string { return []string{"sales"} }

// contractSQL returns a block of SQL of the contract.
func contractSQL(t *testing.T, name string) string {
	t.Helper()
	page, err := os.ReadFile("sql-contract.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)<!-- " + regexp.QuoteMeta(name) + " -->\n```sql\n(.*?)```").FindStringSubmatch(string(page))
	require.NotNil(t, block, name)
	return block[1]
}

// psql runs SQL in a psql process with the rights of an appender. It stops at the first error.
func psql(t *testing.T, dsn, sql string, vars map[string]string) (string, error) {
	t.Helper()
	path, err := exec.LookPath("psql")
	require.NoError(t, err, "psql is missing: install postgresql-client")
	args := []string{"-X", "-q", "-A", "-t", "-F", " ", "-v", "ON_ERROR_STOP=1", "-f", "-", dsn}
	for name, value := range vars {
		args = append([]string{"-v", name + "=" + value}, args...)
	}
	c := exec.CommandContext(t.Context(), path, args...)
	c.Stdin = strings.NewReader("set role kinora_appender;\n" + sql)
	var failed strings.Builder
	c.Stderr = &failed
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, failed.String())
	}
	return strings.TrimSpace(string(out)), err
}

func newID() string { return uuid.Must(uuid.NewV7()).String() }

func soldVars(stream string, expected, n int) map[string]string {
	return map[string]string{
		"stream": stream, "expected": strconv.Itoa(expected), "id": newID(), "type": "shop.sold",
		"data": fmt.Sprintf(`{"N": %d, "note": "it's ü"}`, n), "metadata": `{"actor": "ann"}`, "topic": "sales",
	}
}

// producer appends to the stream with SQL. It returns the version and the position, or zeros for a conflict.
type producer func(t *testing.T, vars map[string]string) (version, position int64, err error)

func psqlProducer(t *testing.T, dsn string) producer {
	block := contractSQL(t, "postgres: append")
	return func(t *testing.T, vars map[string]string) (version, position int64, err error) {
		out, err := psql(t, dsn, block+";", vars)
		if err == nil && out != "" {
			_, err = fmt.Sscan(out, &version, &position)
		}
		return version, position, err
	}
}

func sqliteProducer(t *testing.T, db *sql.DB) producer {
	block := contractSQL(t, "sqlite: append")
	return func(t *testing.T, vars map[string]string) (version, position int64, err error) {
		conn, err := db.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		for statement := range strings.SplitSeq(strings.TrimSpace(block), ";\n") {
			statement = strings.TrimSuffix(statement, ";")
			if strings.HasPrefix(statement, "select version") {
				err = conn.QueryRowContext(t.Context(), statement, named(statement, vars)...).Scan(&version, &position)
				if err == sql.ErrNoRows { //nolint:errorlint // never wrapped
					err = nil
				}
			} else {
				_, err = conn.ExecContext(t.Context(), statement, named(statement, vars)...)
			}
			if err != nil {
				_, _ = conn.ExecContext(context.WithoutCancel(t.Context()), "rollback")
				return 0, 0, err
			}
		}
		return version, position, nil
	}
}

// named returns the parameters that a statement has.
func named(statement string, vars map[string]string) (args []any) {
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		if !regexp.MustCompile(`:` + name + `\b`).MatchString(statement) {
			continue
		}
		var value any = vars[name]
		if name == "expected" {
			value, _ = strconv.Atoi(vars[name])
		}
		args = append(args, sql.Named(name, value))
	}
	return args
}

// services runs a projector that reads the log, and one that reads what a relay publishes, until stop.
func services[Tx any](t *testing.T, db provider.Provider[Tx], ob provider.Outbox, log provider.Log, write func(context.Context, Tx, string, eventstore.Event[sold]) error) (stop func()) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100, BlockPublishUntilSubscriberAck: true}, nil)
	project := func(name string, opts projector.Options) *projector.Projector[Tx] {
		return projector.Define(name, soldTypes, opts, projector.On("sum", func(ctx context.Context, tx Tx, e eventstore.Event[sold]) error {
			if e.Metadata.Actor != "ann" && e.Data.N != 0 && e.Stream != "shop-go" {
				return fmt.Errorf("the metadata is %+v", e.Metadata)
			}
			return write(ctx, tx, name, e)
		}))
	}
	cfg := projector.RunnerConfig{Logger: quiet}
	direct, err := projector.NewRunner(db, projector.FromLog(log), cfg, project("log", projector.Options{}))
	require.NoError(t, err)
	relayed, err := projector.NewRunner(db, projector.Subscribe(broker, "sales"), cfg, project("relay", projector.Options{Markers: true, BrokerOnly: true}))
	require.NoError(t, err)
	relay, err := outbox.NewRelay(ob, broker, &outbox.RelayConfig{Logger: quiet, Poll: 20 * time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, run := range []func(context.Context) error{relayed.Run, direct.Run} {
		all.Go(func() { require.NoError(t, run(ctx)) })
	}
	<-relayed.Running()
	all.Go(func() { require.NoError(t, relay.Run(ctx)) })
	return func() {
		cancel()
		all.Wait()
		require.NoError(t, broker.Close())
	}
}

// Two producers append to two streams with SQL. One in three of their attempts expects an old version,
// and they conflict with each other.
func produce(t *testing.T, p producer) (total map[string]int) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	total = map[string]int{}
	conflicts := 0
	next := map[string]int64{}
	for who := range 2 {
		wg.Go(func() {
			for n := 1; n <= 12; n++ {
				stream := fmt.Sprint("shop-", n%2)
				for done := false; !done; {
					mu.Lock()
					expected := next[stream]
					mu.Unlock()
					if n%3 == 0 && who == 0 {
						v, _, err := p(t, soldVars(stream, int(expected)-1, 1000))
						require.NoError(t, err)
						require.Zero(t, v, "an old version")
					}
					v, position, err := p(t, soldVars(stream, int(expected), n))
					require.NoError(t, err)
					mu.Lock()
					if done = v > 0; done {
						require.Equal(t, expected+1, v)
						require.Positive(t, position)
						total[stream] += n
						next[stream] = v
					} else {
						conflicts++
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d conflicts", conflicts)
	return total
}

// Promise: G11.2
func TestSQLContractOnPostgreSQL(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, `create table sums (projector text, stream text, n bigint, versions text, primary key (projector, stream))`)
	db, err := postgres.Open(t.Context(), dsn, &postgres.Config{Route: sales})
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	for _, script := range []func(string) (string, error){postgres.RolesSQL, postgres.GrantsSQL} {
		text, err := script("kinora")
		require.NoError(t, err)
		_, err = db.Pool().Exec(t.Context(), text)
		require.NoError(t, err)
	}
	stop := services(t, provider.Provider[pgx.Tx](db), db, db, func(ctx context.Context, tx pgx.Tx, name string, e eventstore.Event[sold]) error {
		_, err := tx.Exec(ctx, `insert into sums values ($1, $2, $3, $4) on conflict (projector, stream) do update
			set n = sums.n + excluded.n, versions = sums.versions || excluded.versions`, name, e.Stream, e.Data.N, fmt.Sprint(e.Version, " "))
		return err
	})
	p := psqlProducer(t, dsn)
	read := func(name, stream string) (n int, versions string) {
		_ = db.Pool().QueryRow(t.Context(), `select n, versions from sums where projector = $1 and stream = $2`, name, stream).Scan(&n, &versions)
		return n, versions
	}
	contract(t, p, read)

	// What is rolled back is not seen, and holds nothing back.
	_, err = psql(t, dsn, "begin;\n"+contractSQL(t, "postgres: append")+";\nrollback;", soldVars("shop-gone", 0, 5))
	require.NoError(t, err)
	appendsInGo(t, db)
	project(t, read, "shop-go", 7)
	stop()
	n, _ := read("log", "shop-gone")
	require.Zero(t, n)
	e := lastEvent(t, db, "shop-0")
	require.Equal(t, "ann", e.Metadata.Actor)

	id := newID()
	for range 2 {
		_, err = psql(t, dsn, contractSQL(t, "postgres: enqueue")+";", map[string]string{
			"id": id, "topic": "mails", "key": "ann", "payload": "it's ü", "headers": `{"lang": "en"}`,
		})
		require.NoError(t, err)
	}
	enqueued(t, db, id)
}

// Promise: G11.2
func TestSQLContractOnSQLite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "shop.db")
	db, err := sqlite.Open(t.Context(), path, &sqlite.Config{Route: sales})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	_, err = db.SQL().Exec(`create table sums (projector text, stream text, n integer, versions text, primary key (projector, stream))`)
	require.NoError(t, err)
	foreign, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(600000)")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, foreign.Close()) })
	stop := services(t, provider.Provider[*sql.Tx](db), db, db, func(ctx context.Context, tx *sql.Tx, name string, e eventstore.Event[sold]) error {
		_, err := tx.ExecContext(ctx, `insert into sums values (?1, ?2, ?3, ?4) on conflict (projector, stream) do update
			set n = n + excluded.n, versions = versions || excluded.versions`, name, e.Stream, e.Data.N, fmt.Sprint(e.Version, " "))
		return err
	})
	read := func(name, stream string) (n int, versions string) {
		_ = db.SQL().QueryRow(`select n, versions from sums where projector = ? and stream = ?`, name, stream).Scan(&n, &versions)
		return n, versions
	}
	contract(t, sqliteProducer(t, foreign), read)
	appendsInGo(t, db)
	project(t, read, "shop-go", 7)
	stop()

	id := newID()
	for range 2 {
		vars := map[string]string{"id": id, "topic": "mails", "key": "ann", "payload": "it's ü", "headers": `{"lang": "en"}`}
		statement := contractSQL(t, "sqlite: enqueue")
		_, err = foreign.Exec(statement, named(statement, vars)...)
		require.NoError(t, err)
	}
	enqueued(t, db, id)
}

// contract checks that what producers append is projected exactly, and what they repeat is refused.
func contract(t *testing.T, p producer, read func(projector, stream string) (int, string)) {
	t.Helper()
	total := produce(t, p)
	for stream, n := range total {
		project(t, read, stream, n)
	}
	first := soldVars("shop-new", 0, 9)
	v, position, err := p(t, first)
	require.NoError(t, err)
	require.Equal(t, int64(1), v)
	next := maps.Clone(first)
	next["expected"] = "1"
	_, _, err = p(t, next)
	require.Error(t, err, "an id of an event that exists")
	next = maps.Clone(first)
	next["stream"], next["expected"] = "shop-other", "0"
	_, _, err = p(t, next)
	require.Error(t, err, "an id of an event of another stream")
	again, place, err := p(t, first)
	require.NoError(t, err)
	if again != 0 { // SQLite returns the place of the event
		require.Equal(t, []int64{v, position}, []int64{again, place})
	}
	project(t, read, "shop-new", 9)
}

// project waits until both projectors have the sum of a stream, from each of its events once, in order.
func project(t *testing.T, read func(projector, stream string) (int, string), stream string, want int) {
	t.Helper()
	for _, name := range []string{"log", "relay"} {
		patience.Until(t, func() bool { n, _ := read(name, stream); return n >= want }, "%s %s", name, stream)
		n, versions := read(name, stream)
		require.Equal(t, want, n)
		for i, v := range strings.Fields(versions) {
			require.Equal(t, strconv.Itoa(i+1), v, "%s %s", name, versions)
		}
	}
}

// appendsInGo appends to the streams of the producers, and to a new one, in Go.
func appendsInGo(t *testing.T, db eventstore.Store) {
	t.Helper()
	drafts, err := soldTypes.Encode(t.Context(), sold{7})
	require.NoError(t, err)
	at, err := db.Append(t.Context(), "shop-go", eventstore.NoStream, drafts)
	require.NoError(t, err)
	require.Equal(t, int64(1), at.Version)
	e := lastEvent(t, db, "shop-0")
	drafts, err = soldTypes.Encode(t.Context(), sold{0})
	require.NoError(t, err)
	at, err = db.Append(t.Context(), "shop-0", eventstore.Expected(e.Version), drafts)
	require.NoError(t, err)
	require.Equal(t, e.Version+1, at.Version)
}

func lastEvent(t *testing.T, db eventstore.Store, stream string) (last eventstore.Raw) {
	t.Helper()
	for e, err := range db.ReadStream(t.Context(), stream, 0) {
		require.NoError(t, err)
		if strings.Contains(string(e.Data), "note") {
			last = e
		}
	}
	return last
}

// enqueued checks that the outbox has the message once, and that it is as the wire form requires.
func enqueued(t *testing.T, db interface {
	Entries(context.Context, outbox.Filter) ([]outbox.Entry, error)
}, id string) {
	t.Helper()
	list, err := db.Entries(t.Context(), outbox.Filter{Topic: "mails"})
	require.NoError(t, err)
	require.Len(t, list, 1)
	m := outbox.ToWatermill(list[0])
	require.Equal(t, id, m.UUID)
	require.Equal(t, "it's ü", string(m.Payload))
	require.Equal(t, "ann", m.Metadata[outbox.HeaderKey])
	require.Equal(t, "en", m.Metadata["lang"])
	require.WithinDuration(t, time.Now(), list[0].CreatedAt, 10*time.Minute)
}
