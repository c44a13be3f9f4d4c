package brokers_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/internal/redistest"
)

// TestMain is also the command that the suite runs to restart a server: it connects to the test, which
// then restarts the server, and closes the connection.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "restart" {
		conn, err := net.Dial("tcp", os.Args[2])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_, _ = io.Copy(io.Discard, conn)
		os.Exit(0)
	}
	os.Exit(m.Run()) // without goleak: the suite does not close all its subscribers
}

// onRestart returns a command that calls restart.
func onRestart(t *testing.T, restart func() error) []string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var served sync.WaitGroup
	served.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if err := restart(); err != nil {
				t.Error(err)
			}
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		served.Wait()
	})
	program, err := os.Executable()
	require.NoError(t, err)
	return []string{program, "restart", l.Addr().String()}
}

// prepared calls Prepare for each topic of the suite.
type prepared struct {
	message.Subscriber
	broker brokers.Broker
}

func (p prepared) SubscribeInitialize(topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return p.broker.Prepare(ctx, topic)
}

// cases are those of the suite. The suite would choose them too, but skips the one in fresh, because the
// subscribers of the others share a group.
var (
	cases = map[string]func(*testing.T, tests.TestContext, tests.PubSubConstructor){
		"PublishSubscribe":                  tests.TestPublishSubscribe,
		"ConcurrentSubscribe":               tests.TestConcurrentSubscribe,
		"ConcurrentSubscribeMultipleTopics": tests.TestConcurrentSubscribeMultipleTopics,
		"ResendOnError":                     tests.TestResendOnError,
		"NoAck":                             tests.TestNoAck,
		"ContinueAfterSubscribeClose":       tests.TestContinueAfterSubscribeClose,
		"ConcurrentClose":                   tests.TestConcurrentClose,
		"ContinueAfterErrors":               tests.TestContinueAfterErrors,
		"PublishSubscribeInOrder":           tests.TestPublishSubscribeInOrder,
		"PublisherClose":                    tests.TestPublisherClose,
		"Topic":                             tests.TestTopic,
		"MessageCtx":                        tests.TestMessageCtx,
		"SubscribeCtx":                      tests.TestSubscribeCtx,
	}
	fresh = tests.TestNewSubscriberReceivesOldMessages
)

// conform runs Watermill's suite against the broker at an address. restart restarts the server.
func conform(t *testing.T, address string, takeover time.Duration, restart func() error) {
	t.Helper()
	b, err := brokers.Open(brokers.Config{Address: address, Takeover: takeover, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	open := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		p, err := b.Publisher()
		require.NoError(t, err)
		s, err := b.Subscriber(group)
		require.NoError(t, err)
		return p, prepared{s, b}
	}
	one := func(t *testing.T) (message.Publisher, message.Subscriber) { t.Helper(); return open(t, "one") }
	suite := func() tests.TestContext {
		return tests.TestContext{TestID: tests.NewTestID(), Features: tests.Features{
			ConsumerGroups: true, Persistent: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true,
			NewSubscriberReceivesOldMessages: true, ForceShort: !longtest.On(), RestartServiceCommand: onRestart(t, restart),
		}}
	}
	t.Run("Reconnect", func(t *testing.T) { tests.TestReconnect(t, suite(), one) }) // before the others, which run together
	for name, test := range cases {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, suite(), one) })
	}
	t.Run("ConsumerGroups", func(t *testing.T) { t.Parallel(); tests.TestConsumerGroups(t, suite(), open) })
	t.Run("NewSubscriberReceivesOldMessages", func(t *testing.T) {
		t.Parallel()
		fresh(t, suite(), func(t *testing.T) (message.Publisher, message.Subscriber) {
			t.Helper()
			return open(t, "g"+watermill.NewShortUUID())
		})
	})
}

func TestRedisStreamsConform(t *testing.T) {
	t.Parallel()
	s := redistest.Private(t, "--appendonly", "yes")
	conform(t, s.URL, time.Second, func() error { return errors.Join(s.End("KILL"), s.Begin()) })
}

func TestSQLConforms(t *testing.T) {
	t.Parallel()
	s := pgtest.Private(t)
	conform(t, s.DSN, 0, func() error { return s.Restart("QUIT") })
}

func TestNATSConforms(t *testing.T) {
	t.Parallel()
	options := &server.Options{Host: "127.0.0.1", Port: freePort(t), JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true}
	start := func() *server.Server {
		s, err := server.NewServer(options.Clone())
		require.NoError(t, err)
		s.Start()
		require.True(t, s.ReadyForConnections(10*time.Second))
		return s
	}
	stop := func(s *server.Server) {
		s.Shutdown()
		s.WaitForShutdown()
	}
	s := start()
	t.Cleanup(func() { stop(s) })
	conform(t, fmt.Sprintf("nats://127.0.0.1:%d", options.Port), 5*time.Second, func() error {
		stop(s)
		s = start()
		return nil
	})
}

func TestKafkaConforms(t *testing.T) {
	t.Parallel()
	dir, port := t.TempDir(), freePort(t)
	start := func() *kfake.Cluster {
		c, err := kfake.NewCluster(kfake.Ports(port), kfake.DataDir(dir), kfake.GroupMinSessionTimeout(time.Second))
		require.NoError(t, err)
		return c
	}
	c := start()
	t.Cleanup(func() { c.Close() })
	conform(t, "kafka://127.0.0.1:"+strconv.Itoa(port), 5*time.Second, func() error {
		c.Close()
		c = start()
		return nil
	})
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, port, _ := strings.Cut(l.Addr().String(), ":")
	n, err := strconv.Atoi(port)
	require.NoError(t, err)
	return n
}
