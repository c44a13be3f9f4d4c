package sqlite_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// childEnv makes the test binary run one of children instead of the tests.
const childEnv = "KINORA_SQLITE_CHILD"

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := children[name](os.Args[1]); err != nil {
			fmt.Println("child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// children are the programs of a second process with the file at path. Parent and child exchange
// lines.
var children = map[string]func(path string) error{
	"hold-lock":       childHoldsLock,
	"stall":           childStalls,
	"deliver":         childDelivers,
	"append-and-take": childAppendsAndTakes,
	"hammer":          childHammers,
	"migrate":         childMigrates,
	"full-disk":       childFillsDisk,
	"hold":            childHolds,
	"drain":           childDrains,
	"try":             childTries,
	"die":             childDies,
}

// proc is a child process.
type proc struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(t *testing.T, child, path string) *proc {
	t.Helper()
	p := &proc{t: t, cmd: exec.Command(os.Args[0], path)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+child)
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewReader(out)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	})
	return p
}

// line reads the next line of the child.
func (p *proc) line() string {
	p.t.Helper()
	s, err := p.out.ReadString('\n')
	require.NoError(p.t, err, "the child's output ended after %q", s)
	return strings.TrimSuffix(s, "\n")
}

func (p *proc) send(line string) {
	p.t.Helper()
	_, err := io.WriteString(p.in, line+"\n")
	require.NoError(p.t, err)
}

func (p *proc) wait() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Wait())
}

// awaitLine waits, in a child, for a line of its parent.
func awaitLine() string {
	s, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	return strings.TrimSuffix(s, "\n")
}

// template is the content of a migrated file.
var template = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "kinora")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "template.db")
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(context.Background()); err != nil {
		return nil, err
	}
	if _, err := db.SQL().Exec(totalsDDL); err != nil {
		return nil, err
	}
	if err := db.Close(); err != nil {
		return nil, err
	}
	return os.ReadFile(path)
})

// totalsDDL is the read model of the tests.
const totalsDDL = `create table totals (key text primary key, total integer not null) strict`

// migrated returns the path of a migrated file for this test only.
func migrated(t testing.TB) string {
	t.Helper()
	bytes, err := template()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "kinora.db")
	require.NoError(t, os.WriteFile(path, bytes, 0o600))
	return path
}

// open opens a migrated file, and checks its invariants at the end.
func open(t testing.TB, cfg *sqlite.Config) *sqlite.DB {
	t.Helper()
	return openAt(t, migrated(t), cfg)
}

func openAt(t testing.TB, path string, cfg *sqlite.Config) *sqlite.DB {
	t.Helper()
	db, err := sqlite.Open(context.Background(), path, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		checkAtRest(t, db.SQL())
		require.NoError(t, db.Close())
	})
	return db
}

// checkAtRest checks the invariants of a file.
func checkAtRest(t testing.TB, db *sql.DB) {
	t.Helper()
	for what, query := range map[string]string{
		"a stream's version is that of its last event, and its versions are contiguous": `
			select stream, max(version), count(*), max(type = 'kinora.ended') from kinora_events group by stream
			except select stream, version, version, ended from kinora_streams
			except select stream, version, 1, 1 from kinora_streams where ended -- archived`,
		"a stream has events": `
			select stream from kinora_streams except select stream from kinora_events`,
		"versions grow with positions": `
			select id from (
				select id, position < lag(position) over (partition by stream order by version) as back from kinora_events)
			where back`,
		"open agrees with status": `
			select id from kinora_outbox where open <> (status not in ('published', 'held', 'skipped'))`,
		"a claimed entry has a token": `
			select id from kinora_outbox where status = 'claimed' and (token is null or attempts < 1)`,
		"the first open message of a lane has a due time if it waits and needs nothing, and no other message has one": `
			select id from (
				select id, state, needs, due_at, row_number() over (partition by projector, generation, lane, resolved_at is null order by id) = 1 as first
				from kinora_parked)
			where (due_at is not null) <> (first and state = 'waiting' and needs = '')`,
		"a marker with a position is of an event": `
			select handler from kinora_markers where position <= 0`,
		"sqlite itself": `select integrity_check from pragma_integrity_check where integrity_check <> 'ok'`,
	} {
		rows, err := db.Query(query)
		require.NoError(t, err, what)
		require.False(t, rows.Next(), what)
		require.NoError(t, rows.Close())
	}
}

// drafts makes n events.
func drafts(n int) []eventstore.Draft {
	ds := make([]eventstore.Draft, n)
	for i := range ds {
		ds[i] = eventstore.Draft{
			ID: uuid.Must(uuid.NewV7()).String(), Type: "review.posted", Schema: 1,
			Data: fmt.Appendf(nil, `{"product_id":"p1","stars":5,"n":%d}`, i),
		}
	}
	return ds
}

// routed returns a configuration that makes an entry for every event.
func routed() *sqlite.Config { return &sqlite.Config{Route: outbox.ByCategory} }

const handler = "totals/posted"

var totals = provider.Build{Projector: "totals", Generation: 1}

type handlerFunc = func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error)

// delivery returns a unit of deliveries for one handler, each with a separate lane.
func delivery(ids ...string) provider.Unit {
	u := provider.Unit{Projector: "totals"}
	for _, id := range ids {
		u.Messages = append(u.Messages, provider.Message{
			ID: id, Lane: provider.LaneOfMessage(id), Handlers: []provider.Handler{{Name: handler}}, Mark: true,
		})
	}
	return u
}

const addToTotal = `insert into totals values (?1, ?2) on conflict (key) do update set total = total + ?2`

// adds returns a handler that adds 1 to the total of key for each fresh message.
func adds(key string) handlerFunc {
	return func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error) {
		for i, fresh := range found.Fresh {
			found.Begin(i)
			if !slices.Contains(fresh, true) {
				continue
			}
			if err := add(ctx, tx, key); err != nil {
				return provider.Closing{}, err
			}
		}
		return provider.Closing{}, nil
	}
}

func add(ctx context.Context, tx *sql.Tx, key string) error {
	_, err := tx.ExecContext(ctx, addToTotal, key, 1)
	return err
}

// shiftBack makes all stored times older, which has the effect of a later clock.
func shiftBack(db *sql.DB, d time.Duration) error {
	for table, columns := range map[string][]string{
		"kinora_events":          {"recorded_at"},
		"kinora_outbox":          {"next_attempt_at", "created_at", "last_attempt_at", "published_at"},
		"kinora_markers":         {"processed_at"},
		"kinora_low_water_marks": {"pruned_before"},
		"kinora_parked":          {"parked_at", "due_at", "resolved_at"},
		"kinora_runners":         {"expires_at"},
		"kinora_leases":          {"expires_at"},
		"kinora_generations":     {"created_at", "changed_at"},
		"kinora_tasks":           {"next_at", "wait_until", "created_at", "ended_at", "attempted_at"},
		"kinora_task_groups":     {"completed_at"},
		"kinora_task_trail":      {"at"},
		"kinora_snapshots":       {"saved_at"},
		"kinora_services":        {"started_at", "seen_at", "expires_at"},
		"kinora_pauses":          {"paused_at"},
		"kinora_acts":            {"at", "expires_at", "ended_at"},
	} {
		for _, column := range columns {
			shift := fmt.Sprintf(`update %s set %[2]s = %[2]s - %d where %[2]s is not null`, table, column, d.Milliseconds())
			if _, err := db.Exec(shift); err != nil {
				return err
			}
		}
	}
	_, err := db.Exec(`update kinora_checkpoints set recorded_at = recorded_at - ?`, d.Microseconds())
	if err != nil {
		return err
	}
	_, err = db.Exec(`
update kinora_tasks set state = (
	select json_group_object(key, iif(value ->> 'until' is null, json(value), json_set(value, '$.until',
		strftime('%Y-%m-%dT%H:%M:%fZ', value ->> 'until', printf('-%.3f seconds', ?1 / 1000.0)))))
	from json_each(state))
where json_valid(state) and state like '%"until"%'`, d.Milliseconds())
	return err
}

func total(t testing.TB, db *sql.DB, key string) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(`select coalesce((select total from totals where key = ?), 0)`, key).Scan(&n))
	return n
}

func count(t testing.TB, db *sql.DB, table string) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRow(`select count(*) from `+table).Scan(&n))
	return n
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}
