package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
)

// remoteBrokers start a broker each, and return its URL.
var remoteBrokers = map[string]func(t *testing.T) string{
	redisKind: func(t *testing.T) string { return startRedis(t).url() },
	natsKind: func(t *testing.T) string {
		address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
		cmd := exec.Command(distributedBin, "nats", "-listen", address, "-dir", t.TempDir())
		stdin, err := cmd.StdinPipe() // its end is that of the server
		require.NoError(t, err)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			require.NoError(t, stdin.Close())
			require.NoError(t, cmd.Wait())
		})
		ready, err := bufio.NewReader(stdout).ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "ready\n", ready)
		return "nats://" + address
	},
	kafkaKind: func(t *testing.T) string {
		c, err := kfake.NewCluster()
		require.NoError(t, err)
		t.Cleanup(c.Close)
		return "kafka://" + c.ListenAddrs()[0]
	},
}

// TestRemoteBrokers: the report is right although the processes that relay and project are killed, over
// each broker that is a server of its own.
func TestRemoteBrokers(t *testing.T) {
	t.Parallel()
	for kind, start := range remoteBrokers {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			flags := []string{"--broker", kind, "--broker-url", start(t)}
			path, bad := generateFile(t, 8000, "-seed", "15") // imported for longer than the first lives of the workers
			db := filepath.Join(t.TempDir(), "reviews.db")
			worker := func(name string) []string { return slices.Concat([]string{name}, flags) }
			importOverWhileKilling(t, "sqlite:"+db, flags, path, worker("relay"), worker("project"), worker("project"))
			require.Equal(t, expectedReport(t, path, bad), report(t, db))
		})
	}
}

// TestRemoteBrokerInOneProcess: import publishes and applies over the broker, without other processes.
func TestRemoteBrokerInOneProcess(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 300, "-seed", "16")
	db := filepath.Join(t.TempDir(), "reviews.db")
	c := &importCmd{File: path, pipelineFlags: pipelineFlags{Broker: natsKind, Pipeline: true, brokerURL: brokerURL{remoteBrokers[natsKind](t)}}}
	require.NoError(t, c.DB.UnmarshalText([]byte("sqlite:"+db)))
	require.NoError(t, c.Run(t.Context()))
	require.Equal(t, expectedReport(t, path, bad), report(t, db))
	require.Positive(t, queryInt(t, db, `select count(*) from kinora_outbox where status = 'published'`), "published events")
}

func TestBrokerURLMustBeOfTheBroker(t *testing.T) {
	t.Parallel()
	o := reviews(t, "project", "--db", "sqlite:x.db", "--broker", "nats", "--broker-url", "redis://127.0.0.1:1/0")
	require.NotZero(t, o.code)
	require.Contains(t, o.stderr, "--broker-url must begin with nats://")
}
