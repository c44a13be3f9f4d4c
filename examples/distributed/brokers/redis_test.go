package brokers_test

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/redistest"
)

// TestRedisStreamsLosesItsData: if Redis has lost the group, the subscription ends, and so the runner.
// The next subscription creates the group.
func TestRedisStreamsLosesItsData(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t) // without AOF
	b, err := brokers.Open(brokers.Config{Address: server.URL, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	publisher, err := b.Publisher()
	require.NoError(t, err)
	defer func() { require.NoError(t, publisher.Close()) }()
	subscribe := func() (message.Subscriber, <-chan *message.Message) {
		s, err := b.Subscriber("group")
		require.NoError(t, err)
		messages, err := s.Subscribe(t.Context(), "topic")
		require.NoError(t, err)
		return s, messages
	}
	receive := func(messages <-chan *message.Message) *message.Message {
		return patience.Receive(t, messages, "a message, or the end of the subscription")
	}
	first, messages := subscribe()
	require.NoError(t, publisher.Publish("topic", message.NewMessage(watermill.NewUUID(), nil)))
	receive(messages).Ack()
	require.NoError(t, errors.Join(server.End("KILL"), server.Begin()))
	require.Nil(t, receive(messages), "the subscription has ended")
	require.NoError(t, first.Close())

	second, messages := subscribe()
	m := message.NewMessage(watermill.NewUUID(), nil)
	require.NoError(t, publisher.Publish("topic", m))
	got := receive(messages)
	require.Equal(t, m.UUID, got.UUID)
	got.Ack()
	require.NoError(t, second.Close())
}
