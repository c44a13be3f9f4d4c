package redistest_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/internal/testserver"
)

func TestAKilledServerStartsWithTheDataOnItsDisk(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settings      []string
		save, delete  bool
		first, second string
	}{
		"nothing without a snapshot":         {first: "none", second: "none"},
		"its last snapshot":                  {save: true, first: "1", second: "none"},
		"nothing if the snapshot is deleted": {save: true, delete: true, first: "none", second: "none"},
		"all of an append-only file": {settings: []string{"--appendonly", "yes", "--appendfsync", "always"},
			first: "1", second: "2"},
		"nothing if the append-only file is deleted": {settings: []string{"--appendonly", "yes"}, delete: true,
			first: "none", second: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Private(t, c.settings...)
			client := redistest.Client(t, s.URL)
			set(t, client, "first", "1")
			if c.save {
				require.NoError(t, client.Save(t.Context()).Err())
			}
			set(t, client, "second", "2")
			require.NoError(t, s.End("KILL"))
			require.Error(t, redistest.Client(t, s.URL, oneTry).Ping(t.Context()).Err())
			if c.delete {
				require.NoError(t, s.DeleteData())
			}
			require.NoError(t, s.Begin())
			require.Equal(t, c.first, value(t, client, "first"))
			require.Equal(t, c.second, value(t, client, "second"))
		})
	}
}

func TestSettingsOverrideThoseOfTheServer(t *testing.T) {
	t.Parallel()
	s := redistest.Private(t, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--save", "3600 1")
	config, err := redistest.Client(t, s.URL).ConfigGet(t.Context(), "*").Result()
	require.NoError(t, err)
	require.Equal(t, "allkeys-lru", config["maxmemory-policy"])
	require.Equal(t, "67108864", config["maxmemory"])
	require.Equal(t, "3600 1", config["save"])
}

func TestASuspendedServerAnswersAfterResume(t *testing.T) {
	t.Parallel()
	s := redistest.Private(t)
	client := redistest.Client(t, s.URL, oneTry)
	set(t, client, "key", "before")
	require.NoError(t, s.Suspend())
	require.ErrorContains(t, client.Set(t.Context(), "key", "during", 0).Err(), "timeout")
	require.NoError(t, s.Resume())
	require.Equal(t, "during", value(t, redistest.Client(t, s.URL), "key"), "the server had received the request")

	require.NoError(t, s.Suspend())
	require.NoError(t, s.End("KILL"))
	require.NoError(t, s.Begin())
	require.Equal(t, "none", value(t, redistest.Client(t, s.URL), "key"))
}

// child suspends a server, prints its address, and waits.
func child() error {
	s, err := redistest.Start()
	if err != nil {
		return err
	}
	if err := s.Suspend(); err != nil {
		return err
	}
	fmt.Println(s.Addr)
	select {}
}

// The kernel continues a suspended process whose parent ends, and sends it SIGHUP.
func TestASuspendedServerEndsWithTheTestProcess(t *testing.T) {
	t.Parallel()
	testserver.Skip(t, "redis")
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), "KINORA_CHILD=suspend"), os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait(), "it was killed")
	require.NoError(t, err)
	eventually(t, "the server has ended", func() bool {
		c, err := net.Dial("tcp", strings.TrimSpace(line))
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
}

// A server whose port another program has taken ends while it starts. That is an error at once, and not after the limit.
func TestAServerThatEndsWhileItStartsIsAnError(t *testing.T) {
	t.Parallel()
	_, err := redistest.Start("--port", "1", "--bind", "192.0.2.1")
	require.ErrorIs(t, err, testserver.ErrOtherServer)
	require.ErrorContains(t, err, "listening")
}
