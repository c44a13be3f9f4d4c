package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// redisServer is a redis-server of one test. It keeps nothing on disk.
type redisServer struct {
	*testing.T
	port int
	cmd  *exec.Cmd
}

// startRedis starts a server. KINORA_SKIP=redis skips the test.
func startRedis(t *testing.T) *redisServer {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "redis") {
		t.Skip("KINORA_SKIP=redis")
	}
	s := &redisServer{T: t, port: freePort(t)}
	s.start()
	t.Cleanup(s.kill)
	return s
}

// freePort returns a port for a server.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 10000 + rand.IntN(22000) // below those of outgoing connections
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
	require.Fail(t, "no port is free")
	return 0
}

func (s *redisServer) url() string { return fmt.Sprintf("redis://127.0.0.1:%d/0", s.port) }

// start starts the server, empty, and waits until it answers.
func (s *redisServer) start() {
	s.Helper()
	s.cmd = exec.Command("redis-server", "--bind", "127.0.0.1", "--port", fmt.Sprint(s.port), "--save", "", "--appendonly", "no")
	s.cmd.Dir = s.TempDir()
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	require.NoError(s, s.cmd.Start(), "install Debian's package redis-server (make test does), or set KINORA_SKIP=redis")
	require.Eventually(s, func() bool {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(time.Second)) // then it asks again
		reply := make([]byte, 7)
		_, err1 := conn.Write([]byte("PING\r\n"))
		n, err2 := conn.Read(reply)
		return err1 == nil && err2 == nil && string(reply[:n]) == "+PONG\r\n"
	}, patience, 5*time.Millisecond, "redis-server does not answer")
}

// kill ends the server with SIGKILL: it loses all data.
func (s *redisServer) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// do runs commands.
func (s *redisServer) do(commands ...[]any) {
	s.Helper()
	o, err := goredis.ParseURL(s.url())
	require.NoError(s, err)
	client := goredis.NewClient(o)
	defer func() { require.NoError(s, client.Close()) }()
	for _, c := range commands {
		require.NoError(s, client.Do(s.Context(), c...).Err(), "%v", c)
	}
}

// newRedis returns a new SQLite file whose read model is in a server of its own.
func newRedis(t *testing.T) (*redisServer, database) {
	s := startRedis(t)
	return s, database{kind: "sqlite", path: filepath.Join(t.TempDir(), "reviews.db"), redis: redisKeys{s.url(), "reviews"}}
}

// args returns the flags that name a database and the place of its read model.
func (d database) args() []string {
	args := []string{"--db", d.flag()}
	if d.redis.url != "" {
		args = append(args, "--projection", "redis", "--redis", d.redis.url)
	}
	return args
}

// onEachProjection runs a test on each kind of database, and with the read model in Redis.
func onEachProjection(t *testing.T, test func(t *testing.T, d database)) {
	t.Helper()
	onEachDatabase(t, test)
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		_, d := newRedis(t)
		test(t, d)
	})
}
