// Package pgtest provides real PostgreSQL servers for tests.
//
// KINORA_POSTGRES names the server (a superuser's connection string). If it is empty, each test
// process starts a private server from the installed binaries on a free port; the server stops with
// the process, however the process ends. Without either, a test fails with a remedy, unless
// KINORA_SKIP=postgres. The same holds for pgbouncer, which is always private, and
// KINORA_SKIP=pgbouncer.
package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/testserver"
)

const remedy = "no PostgreSQL: install Debian's package postgresql (make test does), or name a server in KINORA_POSTGRES, or set KINORA_SKIP=postgres"

// ErrNoServer means that no server is named and no binaries are installed.
var ErrNoServer = errors.New(remedy)

var shared = sync.OnceValues(func() (string, error) {
	if dsn := os.Getenv("KINORA_POSTGRES"); dsn != "" {
		return dsn, nil
	}
	s, err := Start()
	if err != nil {
		return "", err
	}
	return s.DSN, nil
})

// Shared returns a superuser's connection string to the server that all tests of this process
// share. Each test has its own database (Create).
func Shared(t testing.TB) string {
	t.Helper()
	testserver.Skip(t, "postgres")
	dsn, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return dsn
}

// Private starts a server for one test, which may stop or kill the server or a process of it.
func Private(t testing.TB, settings ...string) *Server {
	t.Helper()
	testserver.Skip(t, "postgres")
	s, err := Start(settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Server is a private server.
type Server struct {
	DSN  string // as superuser, to the database postgres
	Dir  string // data directory
	Port int
	keep *testserver.Process
}

const initialize = `
set -e
"$1/initdb" -D "$2" -U postgres -A trust -E UTF8 --locale=C --no-sync > "$2.log" 2>&1`

// keep follows the making of a database cluster. It runs the server until standard input ends, and removes the data. A line of
// standard input is a signal: it ends the server, which is then started again.
const keep = `
bin=$1; data=$2; shift 2
start() {
	"$bin/postgres" -D "$data" "$@" >> "$data.log" 2>&1 < /dev/null &
	pid=$!
}
start "$@"
set +e
# repeatedly, because a server that has just started ignores a signal
while read -r signal; do
	while kill -"$signal" $pid 2> /dev/null; do sleep 0.02; done
	start "$@"
done
while kill -QUIT $pid 2> /dev/null; do sleep 0.1; done
rm -rf "$data" "$data.log" "${data%/data}"
`

// Start starts a private server. Settings ("max_connections=20") override its own. Unless a setting says otherwise, the
// server runs without fsync, as killed processes lose nothing by that, and does not compile statements, which costs a
// fifth of the tests' CPU time on PostgreSQL.
func Start(settings ...string) (*Server, error) { return start(initialize, settings) }

// Standby starts a replica of the server for one test.
func (s *Server) Standby(t testing.TB) *Server {
	t.Helper()
	standby, err := start(fmt.Sprintf(`
set -e
"$1/pg_basebackup" -D "$2" -d '%s' -R -c fast --no-sync > "$2.log" 2>&1`, s.DSN), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(standby.Stop)
	return standby
}

// start starts a server. If another program takes its port before, it is started again with another one.
func start(initialize string, settings []string) (s *Server, failed error) {
	for range 20 {
		if s, failed = startOnce(initialize, settings); !errors.Is(failed, testserver.ErrOtherServer) {
			break
		}
	}
	return s, failed
}

func startOnce(initialize string, settings []string) (*Server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(parent(settings), "kinora-pg-")
	if err != nil {
		return nil, err
	}
	port, err := testserver.FreePort()
	if err != nil {
		return nil, err
	}
	s := &Server{
		DSN: fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port),
		Dir: filepath.Join(dir, "data"), Port: port,
	}
	args := []string{bin, s.Dir, "-p", strconv.Itoa(port), "-k", dir}
	for _, setting := range append([]string{"listen_addresses=127.0.0.1", "fsync=off", "full_page_writes=off", "max_connections=500",
		"max_prepared_transactions=10", "shared_buffers=64MB", "autovacuum_naptime=5s", "jit=off", "log_min_messages=fatal"}, settings...) {
		args = append(args, "-c", setting)
	}
	if s.keep, err = testserver.RunUnprivileged(dir, initialize+keep, args...); err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	if err := s.keep.Await(s.Log(), s.answers); err != nil {
		s.Stop()
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	return s, nil
}

// Restart ends the server with a signal ("QUIT" is pg_ctl's -m immediate, "INT" its -m fast, "KILL"
// a crash of the parent process alone), starts it again, and returns when it accepts connections.
func (s *Server) Restart(signal string) error {
	var before time.Time
	if err := s.scan("select pg_postmaster_start_time()", &before); err != nil {
		return err
	}
	if err := s.keep.Send(signal); err != nil {
		return err
	}
	limit := time.Now().Add(testserver.Limit)
	for time.Now().Before(limit) {
		var since time.Time
		if err := s.scan("select pg_postmaster_start_time()", &since); err == nil && since.After(before) {
			return nil
		}
		time.Sleep(5 * time.Millisecond) // between two polls
	}
	output, _ := os.ReadFile(s.Log())
	return fmt.Errorf("postgres does not come back after %s: %s", signal, output)
}

// scan queries one value on a new connection.
func (s *Server) scan(query string, value any) error {
	ctx, cancel := context.WithTimeout(context.Background(), testserver.Limit)
	defer cancel()
	c, err := pgx.Connect(ctx, s.DSN)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	return c.QueryRow(ctx, query).Scan(value)
}

// Log returns the path of the server's log file.
func (s *Server) Log() string { return s.Dir + ".log" }

// Stop stops the server, and removes its data.
func (s *Server) Stop() { s.keep.Stop() }

// answers checks that the server takes connections.
func (s *Server) answers(ctx context.Context) error {
	c, err := pgx.Connect(ctx, s.DSN)
	if err != nil {
		if said, _ := os.ReadFile(s.Log()); bytes.Contains(said, []byte("could not create any TCP/IP sockets")) {
			return fmt.Errorf("%w %d", testserver.ErrOtherServer, s.Port)
		}
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	var dir string
	if err := c.QueryRow(ctx, "show data_directory").Scan(&dir); err != nil {
		return err
	}
	if dir != s.Dir {
		return fmt.Errorf("%w %d", testserver.ErrOtherServer, s.Port)
	}
	return nil
}

// parent returns the directory for the data of a server. A database in memory is created ten times faster than one on disk.
// A server that is to be durable stays on disk, and so does every server if TMPDIR is set or if there is little memory.
func parent(settings []string) string {
	const memory, enough = "/dev/shm", 2 << 30
	var free syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || slices.Contains(settings, "fsync=on") || syscall.Statfs(memory, &free) != nil ||
		free.Bavail*uint64(free.Bsize) < enough {
		return ""
	}
	return memory
}

// binaries returns the directory of the newest installed server.
func binaries() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres") // Debian's location
	slices.SortFunc(found, func(a, b string) int {
		major := func(p string) int {
			n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(p))))
			return n
		}
		return major(a) - major(b)
	})
	if len(found) > 0 {
		return filepath.Dir(found[len(found)-1]), nil
	}
	if p, err := exec.LookPath("postgres"); err == nil {
		return filepath.Dir(p), nil
	}
	return "", ErrNoServer
}
