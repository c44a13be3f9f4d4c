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
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora/internal/testserver"
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
	// a busy server is slow, and not away
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = testserver.Limit, testserver.Limit, testserver.Limit, testserver.Limit
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
	port int
	bus  int    // port of the bus, of a node of a cluster
	dir  string // its data, the log and the file pid
	keep *testserver.Process
}

// keep runs the server, stops it when standard input ends, and removes its data. A line "end
// SIGNAL" on standard input ends the server, "start" starts it again, and "signal SIGNAL" sends it
// a signal that does not end it. The file pid exists while the server runs.
//
// The kernel sends SIGHUP if the test process ends while the server is suspended.
const keep = `
trap '' HUP
dir=$1; shift
start() {
	"$@" >> "$dir/log" 2>&1 < /dev/null &
	pid=$!
	echo $pid > "$dir/pid"
}
start "$@"
while read -r verb signal; do
	case $verb in
	end) while kill -"$signal" $pid 2> /dev/null; do sleep 0.02; done; rm -f "$dir/pid";; # one that has just started ignores some
	start) start "$@";;
	signal) kill -"$signal" $pid;;
	esac
done
kill -KILL $pid 2> /dev/null
wait $pid
rm -rf "$dir"
`

// Start starts a private server. Settings override its own. The server keeps nothing on disk unless
// a setting says otherwise ("--appendonly", "yes").
//
// If another program takes a port before the server does, it is started again with others.
func Start(settings ...string) (s *Server, failed error) {
	for range 20 {
		bus, err := testserver.FreePort()
		if err != nil {
			return nil, err
		}
		if s, err = prepare(); err != nil {
			return nil, err
		}
		s.bus = bus
		args := []string{"--bind", "127.0.0.1", "--port", strconv.Itoa(s.port), "--dir", s.dir, "--save", "", "--daemonize", "no"}
		if slices.Contains(settings, "--cluster-enabled") { // the default, 10,000 above the port, may belong to an outgoing connection
			args = append(args, "--cluster-port", strconv.Itoa(bus))
		}
		if err = s.run(append(args, settings...)...); err == nil {
			return s, nil
		}
		if failed = err; !errors.Is(err, testserver.ErrOtherServer) {
			break
		}
	}
	return nil, failed
}

// prepare returns a server that is not started, with a port and an empty directory.
func prepare() (*Server, error) {
	port, err := testserver.FreePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kinora-redis-")
	if err != nil {
		return nil, err
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	return &Server{URL: "redis://" + addr + "/0", Addr: addr, port: port, dir: dir}, nil
}

// run starts redis-server with arguments, and returns when it answers. If it returns an error, it
// has stopped the server and removed its directory.
func (s *Server) run(args ...string) error {
	bin, err := exec.LookPath("redis-server")
	if err == nil {
		s.keep, err = testserver.Run(s.dir, keep, append([]string{s.dir, bin}, args...)...)
	} else {
		err = ErrNoServer
	}
	if err != nil {
		_ = os.RemoveAll(s.dir)
		return err
	}
	if err := s.await(); err != nil {
		s.Stop()
		return err
	}
	return nil
}

// End ends the server with a signal ("KILL") and returns when it has ended.
func (s *Server) End(signal string) error {
	if err := s.keep.Send("end " + signal); err != nil {
		return err
	}
	return until(func(context.Context) error {
		if _, err := os.Stat(s.file("pid")); !errors.Is(err, os.ErrNotExist) {
			return errors.Join(fmt.Errorf("redis-server did not end after %s", signal), err)
		}
		return nil
	})
}

// Begin starts the server again after End, on the same port and data, and returns when it answers. It
// answers with LOADING until it has loaded its data, which is noticeable only if they are large.
func (s *Server) Begin() error {
	if err := s.keep.Send("start"); err != nil {
		return err
	}
	return s.await()
}

// DeleteData deletes the snapshot and the append-only file of a server that has ended. After Begin
// the server is empty. A node of a cluster keeps its slots.
func (s *Server) DeleteData() error {
	return errors.Join(os.RemoveAll(s.file("dump.rdb")), os.RemoveAll(s.file("appendonlydir")))
}

// Suspend stops the server's process (SIGSTOP) and returns when it has stopped. The server still
// accepts connections, and answers nothing. End("KILL") ends a suspended server.
func (s *Server) Suspend() error {
	if err := s.keep.Send("signal STOP"); err != nil {
		return err
	}
	pid, err := s.pid()
	if err != nil {
		return err
	}
	return until(func(context.Context) error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if _, state, _ := strings.Cut(string(stat), ") "); err == nil && !strings.HasPrefix(state, "T") {
			err = fmt.Errorf("redis-server did not stop: %s", stat)
		}
		return err
	})
}

// Resume continues a suspended server (SIGCONT) and returns when it answers. The server handles the
// requests that it received while it was suspended.
func (s *Server) Resume() error {
	if err := s.keep.Send("signal CONT"); err != nil {
		return err
	}
	return s.await()
}

// Stop stops the server, and removes its data.
func (s *Server) Stop() { s.keep.Stop() }

// await waits until the server answers. It may still load its data.
func (s *Server) await() error {
	c := s.admin()
	defer func() { _ = c.Close() }()
	err := s.keep.Await(s.file("log"), func(ctx context.Context) error {
		conn, err := net.Dial("tcp", s.Addr) // the client would log each failure, and pause for a second
		if err != nil {
			return s.orEnded(err)
		}
		_ = conn.Close()
		info := c.InfoMap(ctx)
		if err := info.Err(); err != nil {
			return err
		}
		pid, err := s.pid()
		switch {
		case err != nil: // the shell has not written the file yet
			return err
		case info.Item("Server", "process_id") != strconv.Itoa(pid):
			return fmt.Errorf("%w of %s", testserver.ErrOtherServer, s.Addr)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("start redis-server: %w", err)
	}
	return nil
}

// orEnded returns ErrOtherServer with the log if the server has ended, mostly because another one has its port; else err.
func (s *Server) orEnded(err error) error {
	pid, unknown := s.pid()
	if unknown != nil {
		return err
	}
	stat, gone := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if _, state, _ := strings.Cut(string(stat), ") "); gone == nil && !strings.HasPrefix(state, "Z") {
		return err
	}
	said, _ := os.ReadFile(s.file("log"))
	return fmt.Errorf("%w, or redis-server ended for another reason: %s", testserver.ErrOtherServer, said)
}

// admin returns a client with one connection, which tries each command once.
func (s *Server) admin() *goredis.Client {
	return goredis.NewClient(&goredis.Options{Addr: s.Addr, MaxRetries: -1, DialerRetries: 1, PoolSize: 1})
}

func (s *Server) file(name string) string { return filepath.Join(s.dir, name) }

func (s *Server) pid() (int, error) {
	text, err := os.ReadFile(s.file("pid"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// until calls try until it returns nil. After testserver.Limit it returns the last error.
func until(try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), testserver.Limit)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
}
