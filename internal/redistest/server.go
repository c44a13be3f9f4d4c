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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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
	skip(t)
	url, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return url
}

// Private starts a server for one test. Settings ("--appendonly", "yes") override its own.
func Private(t testing.TB, settings ...string) *Server {
	t.Helper()
	skip(t)
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

func skip(t testing.TB) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "redis") {
		t.Skip("KINORA_SKIP=redis")
	}
}

// Server is a private server.
type Server struct {
	URL  string
	Addr string   // host and port of URL
	dir  string   // data directory
	life *os.File // the server ends when this is closed, and so when this process ends
	done chan struct{}
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
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s := &Server{Addr: fmt.Sprintf("127.0.0.1:%d", port), dir: dir, life: write, done: make(chan struct{})}
	s.URL = "redis://" + s.Addr + "/0"
	args := append([]string{"-c", keep, "keep", dir, bin, "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir,
		"--save", "", "--daemonize", "no"}, settings...)
	cmd := exec.Command("sh", args...)
	cmd.Dir, cmd.Stdin = dir, read
	// A Ctrl-C for the tests must not reach the server, which ends after them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	_ = read.Close()
	if err != nil {
		_ = write.Close()
		return nil, fmt.Errorf("start redis-server: %w", err)
	}
	go func() { _ = cmd.Wait(); close(s.done) }()
	if err := s.await(); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// End ends the server with a signal ("KILL") and returns when it has ended.
func (s *Server) End(signal string) error {
	if _, err := fmt.Fprintln(s.life, "end", signal); err != nil {
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
	if _, err := fmt.Fprintln(s.life, "start"); err != nil {
		return err
	}
	return s.await()
}

// Stop stops the server and removes its data.
func (s *Server) Stop() {
	_ = s.life.Close()
	<-s.done
}

// await waits until the server answers, and checks that the answering server is this one.
func (s *Server) await() error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c := goredis.NewClient(&goredis.Options{Addr: s.Addr, MaxRetries: -1, PoolSize: 1})
	defer func() { _ = c.Close() }()
	var err error
	for ctx.Err() == nil {
		var dir map[string]string
		if dir, err = c.ConfigGet(ctx, "dir").Result(); err == nil {
			if dir["dir"] != s.dir {
				return fmt.Errorf("the address %s belongs to another server", s.Addr)
			}
			return nil
		}
		select {
		case <-s.done:
			return fmt.Errorf("redis-server stopped while starting: %s", s.output())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return fmt.Errorf("redis-server does not answer: %w: %s", err, s.output())
}

func (s *Server) output() []byte {
	output, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	return output
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}
