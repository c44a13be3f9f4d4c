// Package redistest provides real Redis servers for tests.
//
// KINORA_REDIS names the shared server (redis://127.0.0.1:6379/0). If it is empty, each test
// process starts a private server from the installed redis-server on a free port; the server ends
// with the process, however the process ends. Without either, a test fails with a remedy, unless
// KINORA_SKIP=redis.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora/internal/testserver"
	goredis "github.com/redis/go-redis/v9"
)

// ErrNoServer means that no server is named and redis-server is not installed.
var ErrNoServer = errors.New("no Redis: install Debian's package redis-server (make test does), or name a server in KINORA_REDIS, or set KINORA_SKIP=redis")

var shared = sync.OnceValues(func() (string, error) {
	if url := os.Getenv("KINORA_REDIS"); url != "" {
		return url, nil
	}
	s, err := Start()
	if err != nil {
		return "", err
	}
	return s.URL, nil
})

// Shared returns the URL of the server that all tests of this process share. Each test uses its own
// keys, and must not change settings: see Private.
func Shared(t testing.TB) string {
	t.Helper()
	testserver.Skip(t, "redis")
	url, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return url
}

// Private starts a server for one test. Settings ("--appendonly", "yes") override its own.
func Private(t testing.TB, settings ...string) *Server {
	t.Helper()
	testserver.Skip(t, "redis")
	s, err := Start(settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Client returns a client of the server at url, closed when t ends. configure may change its
// options.
func Client(t testing.TB, url string, configure ...func(*goredis.Options)) *goredis.Client {
	t.Helper()
	o, err := goredis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range configure {
		f(o)
	}
	c := goredis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Server is a private server.
type Server struct {
	URL  string
	Addr string // of URL
	dir  string // its data
	keep *testserver.Process
}

// keep runs the server, stops it when standard input ends, and removes its data. A line "end
// SIGNAL" on standard input ends the server, and "start" starts it again.
const keep = `
dir=$1; shift
start() {
	"$@" >> "$dir/log" 2>&1 < /dev/null &
	pid=$!
}
start "$@"
while read -r verb signal; do
	case $verb in
	end) kill -"$signal" $pid; wait $pid;;
	start) start "$@";;
	esac
done
kill -KILL $pid 2> /dev/null
wait $pid
rm -rf "$dir"
`

// Start starts a private server. Settings override its own. The server keeps nothing on disk unless
// a setting says otherwise ("--appendonly", "yes").
func Start(settings ...string) (*Server, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, ErrNoServer
	}
	dir, err := os.MkdirTemp("", "kinora-redis-")
	if err != nil {
		return nil, err
	}
	port, err := testserver.FreePort()
	if err != nil {
		return nil, err
	}
	s := &Server{Addr: fmt.Sprintf("127.0.0.1:%d", port), dir: dir}
	s.URL = "redis://" + s.Addr + "/0"
	args := append([]string{dir, bin, "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir,
		"--save", "", "--daemonize", "no"}, settings...)
	if s.keep, err = testserver.Run(dir, keep, args...); err != nil {
		return nil, fmt.Errorf("start redis-server: %w", err)
	}
	if err := s.await(); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// End ends the server with a signal ("KILL") and returns when it has ended.
func (s *Server) End(signal string) error {
	if err := s.keep.Send("end " + signal); err != nil {
		return err
	}
	for limit := time.Now().Add(60 * time.Second); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		c, err := net.Dial("tcp", s.Addr)
		if err != nil {
			return nil
		}
		_ = c.Close()
	}
	return fmt.Errorf("redis-server did not end after %s", signal)
}

// Begin starts the server again after End, on the same port and data, and returns when it answers.
func (s *Server) Begin() error {
	if err := s.keep.Send("start"); err != nil {
		return err
	}
	return s.await()
}

// Stop stops the server, and removes its data.
func (s *Server) Stop() { s.keep.Stop() }

// await waits until the server answers.
func (s *Server) await() error {
	c := goredis.NewClient(&goredis.Options{Addr: s.Addr, MaxRetries: -1, PoolSize: 1})
	defer func() { _ = c.Close() }()
	err := s.keep.Await(filepath.Join(s.dir, "log"), func(ctx context.Context) error {
		dir, err := c.ConfigGet(ctx, "dir").Result()
		if err == nil && dir["dir"] != s.dir {
			err = fmt.Errorf("%w of %s", testserver.ErrOtherServer, s.Addr)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("start redis-server: %w", err)
	}
	return nil
}
