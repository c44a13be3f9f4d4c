package brokers_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
)

// startNATS starts a server in this process. restart stops it and starts it again.
func startNATS(t *testing.T) (address string, restart func() error) {
	t.Helper()
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
	return fmt.Sprintf("nats://127.0.0.1:%d", options.Port), func() error {
		stop(s)
		s = start()
		return nil
	}
}

// TestNATSKeepsAMessageInProgress: while a runner works on a message for longer than AckWait, no other
// runner gets it, nor a later one of its partition. A runner that stops gives it to another one at once.
func TestNATSKeepsAMessageInProgress(t *testing.T) {
	t.Parallel()
	address, _ := startNATS(t)
	const ackWait = 500 * time.Millisecond
	for _, c := range []struct {
		takeover time.Duration
		stop     bool
	}{{ackWait, false}, {time.Hour, true}} {
		b, err := brokers.Open(brokers.Config{Address: address, Takeover: c.takeover, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		topic := fmt.Sprint("topic", c.stop)
		require.NoError(t, b.Prepare(t.Context(), topic))
		publisher, err := b.Publisher()
		require.NoError(t, err)
		subscribe := func() (message.Subscriber, <-chan *message.Message) {
			s, err := b.Subscriber("group")
			require.NoError(t, err)
			messages, err := s.Subscribe(t.Context(), topic)
			require.NoError(t, err)
			return s, messages
		}
		first, messages := subscribe()
		ids := []string{watermill.NewUUID(), watermill.NewUUID()}
		for _, id := range ids {
			require.NoError(t, publisher.Publish(topic, message.NewMessage(id, nil))) // without key: one partition
		}
		m := <-messages
		require.Equal(t, ids[0], m.UUID)
		second, others := subscribe()
		if c.stop {
			require.NoError(t, first.Close())
			m = <-others
			require.Equal(t, ids[0], m.UUID)
			m.Ack()
		} else {
			select {
			case other := <-others:
				require.Fail(t, "a message that is in progress was delivered again", other.UUID)
			case <-time.After(4 * ackWait):
			}
			m.Ack()
		}
		select { // the second message, to whichever subscriber
		case m = <-messages:
			if c.stop { // closed
				m = <-others
			}
		case m = <-others:
		}
		require.Equal(t, ids[1], m.UUID)
		m.Ack()
		require.NoError(t, first.Close())
		require.NoError(t, second.Close())
		require.NoError(t, publisher.Close())
	}
}
