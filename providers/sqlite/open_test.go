package sqlite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"", ":memory:"} {
		_, err := sqlite.Open(context.Background(), path, nil)
		require.ErrorContains(t, err, "providers/memory")
	}
	_, err := sqlite.Open(context.Background(), "file:x.db?mode=memory", nil)
	require.ErrorContains(t, err, "New")
	_, err = sqlite.Open(context.Background(), "a\x00b", nil)
	require.ErrorContains(t, err, "NUL")
	_, err = sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "no", "such", "dir.db"), nil)
	require.ErrorContains(t, err, "unable to open database file")
	_, err = sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "x.db"), &sqlite.Config{RequeueWindow: -1})
	require.ErrorContains(t, err, "RequeueWindow")
	_, err = sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "x.db"), &sqlite.Config{MaxPayload: -1})
	require.ErrorContains(t, err, "MaxPayload")
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, []byte("this is a text, and no database at all, however long it gets, "+
		"and it has to be at least as long as a header of a database"), 0o600))
	_, err = sqlite.Open(context.Background(), text, nil)
	require.ErrorContains(t, err, "not a database")
}

func TestUnusualPaths(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"plain.db", "with space.db", "what?.db", "50%.db", "%41.db", "a#b.db", "a&b=c;d.db", "a?mode=memory.db",
		"ünïcode ☂.db", `quo"te'.db`, "?_pragma=x", "-dash", "new\nline",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), name+".dir")
			require.NoError(t, os.Mkdir(dir, 0o700))
			path := filepath.Join(dir, name)
			db := openAt(t, path, nil)
			require.NoError(t, db.Migrate(context.Background()))
			_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
			require.NoError(t, err)
			_, err = os.Stat(path)
			require.NoError(t, err, "the file has the requested name")
			for _, also := range []string{"/" + path, filepath.Join(dir, ".", name)} {
				again := openAt(t, also, nil)
				require.Equal(t, 1, count(t, again.SQL(), "kinora_events"))
			}
		})
	}
}

// Promise: G1.14
func TestOpenConfiguresConnections(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for pragma, want := range map[string]string{
		"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "5000",
	} {
		var got string
		require.NoError(t, db.SQL().QueryRow(`pragma `+pragma).Scan(&got))
		require.Equal(t, want, got, pragma)
		require.NoError(t, db.Do(context.Background(), delivery(pragma), pragmaInUnit(t, pragma, want)))
	}
}

func pragmaInUnit(t *testing.T, pragma, want string) handlerFunc {
	if pragma == "busy_timeout" {
		want = "0" // a unit holds the write lock already
	}
	return func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
		var got string
		require.NoError(t, tx.QueryRowContext(ctx, `pragma `+pragma).Scan(&got))
		require.Equal(t, want, got, "%s in a unit", pragma)
		return provider.Closing{}, nil
	}
}

// pooled opens a pool as an application would.
func pooled(t *testing.T, path string, params url.Values) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+path+"?"+params.Encode())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

var immediate = url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(1234)", "journal_mode(wal)"}}

// No service starts on a file that it cannot write.
func TestAReadOnlyFileIsNotReady(t *testing.T) {
	t.Parallel()
	for name, params := range map[string]url.Values{
		"mode=ro":    {"_txlock": {"immediate"}, "mode": {"ro"}},
		"query_only": {"_txlock": {"immediate"}, "_pragma": {"query_only(1)"}},
	} {
		_, err := sqlite.New(pooled(t, migrated(t), params), nil)
		require.ErrorIs(t, err, sqlite.ErrReadOnly, name)
	}
	db := open(t, nil)
	require.NoError(t, db.Ready(t.Context()))
	db.SQL().SetMaxOpenConns(1) // the pragma is of a connection
	_, err := db.SQL().ExecContext(t.Context(), `pragma query_only = 1`)
	require.NoError(t, err)
	require.ErrorIs(t, db.Ready(t.Context()), sqlite.ErrReadOnly)
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := sqlite.New(nil, nil)
	require.ErrorContains(t, err, "requires a pool")

	deferred := pooled(t, migrated(t), url.Values{"_pragma": {"journal_mode(wal)"}})
	_, err = sqlite.New(deferred, nil)
	require.ErrorContains(t, err, "_txlock=immediate")

	rollback := filepath.Join(t.TempDir(), "rollback.db")
	_, err = sqlite.New(pooled(t, rollback, url.Values{"_txlock": {"immediate"}}), nil)
	require.ErrorContains(t, err, "journal_mode(wal)")

	inMemory, err := sql.Open("sqlite", ":memory:")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, inMemory.Close()) })
	_, err = sqlite.New(inMemory, nil)
	require.ErrorContains(t, err, "providers/memory")

	foreign := sql.OpenDB(foreignDriver{})
	t.Cleanup(func() { require.NoError(t, foreign.Close()) })
	_, err = sqlite.New(foreign, nil)
	require.ErrorContains(t, err, "modernc.org/sqlite")
}

// New refuses a deferred pool also while another process writes: a busy file must not make it
// look like an immediate one.
func TestNewRefusesDeferredPoolOfABusyFile(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	other := start(t, "hold-lock", path)
	require.Equal(t, "held", other.line())
	deferred := pooled(t, path, url.Values{"_pragma": {"journal_mode(wal)"}})
	refused := make(chan error)
	go func() {
		_, err := sqlite.New(deferred, nil)
		refused <- err
	}()
	other.send("release")
	require.ErrorContains(t, <-refused, "_txlock=immediate")
	other.wait()
}

func TestNewLeavesThePoolOpen(t *testing.T) {
	t.Parallel()
	pool := pooled(t, migrated(t), immediate)
	db, err := sqlite.New(pool, routed())
	require.NoError(t, err)
	require.Same(t, pool, db.SQL())
	_, err = db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	require.NoError(t, db.Close())
	var timeout int
	require.NoError(t, pool.QueryRow(`pragma busy_timeout`).Scan(&timeout), "the pool stays open")
	require.Equal(t, 1234, timeout, "with its settings unchanged")
	require.Equal(t, 1, count(t, pool, "kinora_outbox"))
}

// foreignDriver is the driver of another database.
type foreignDriver struct{}

var errForeign = errors.New("foreign")

func (foreignDriver) Connect(context.Context) (driver.Conn, error) { return foreignConn{}, nil }
func (d foreignDriver) Driver() driver.Driver                      { return d }
func (foreignDriver) Open(string) (driver.Conn, error)             { return foreignConn{}, nil }

type foreignConn struct{}

func (foreignConn) Prepare(string) (driver.Stmt, error) { return nil, errForeign }
func (foreignConn) Close() error                        { return nil }
func (foreignConn) Begin() (driver.Tx, error)           { return nil, errForeign }
