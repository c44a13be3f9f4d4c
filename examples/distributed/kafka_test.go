package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
)

// kafkaRole is a process with kfake, an imitation of three Kafka servers in memory and on disk.
const kafkaRole = "kafka"

// serveKafka runs kfake until standard input ends.
func serveKafka(args []string) int {
	var ports []int
	for port := range strings.SplitSeq(args[1], ",") {
		n, err := strconv.Atoi(port)
		if err != nil {
			return 1
		}
		ports = append(ports, n)
	}
	c, err := kfake.NewCluster(kfake.Ports(ports...), kfake.DataDir(args[0]), kfake.GroupMinSessionTimeout(time.Second))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(isReady)
	_, _ = io.Copy(io.Discard, os.Stdin)
	c.Close()
	return 0
}

// kafka is a kfake process.
type kafka struct {
	*process
	args    []string
	address string
}

func startKafka(t *testing.T, ps *processes) *kafka {
	t.Helper()
	addresses, err := freeAddresses(3)
	require.NoError(t, err)
	var ports []string
	for _, a := range addresses {
		_, port, _ := strings.Cut(a, ":")
		ports = append(ports, port)
	}
	k := &kafka{args: []string{t.TempDir(), strings.Join(ports, ",")}, address: "kafka://" + strings.Join(addresses, ",")}
	k.process, err = ps.start(t.Context(), kafkaRole, k.args...)
	require.NoError(t, err)
	return k
}

func (k *kafka) restart(ctx context.Context, ps *processes) (err error) {
	k.kill()
	k.process, err = ps.start(ctx, kafkaRole, k.args...)
	return err
}

// TestKafka: the partition key is the ordering key, so the order of each account is kept, with two
// runners, and through failures.
func TestKafka(t *testing.T) {
	t.Parallel()
	ps := testProcesses(t)
	k := startKafka(t, ps)
	s := newScenario(t, ps, k.address, lease)
	s.outage = func(ctx context.Context) error { return k.restart(ctx, ps) }
	s.finish(t, true)
}
