package brokers_test

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/internal/testserver"
)

// suiteTimeout is how long Watermill's suite waits for messages: 15 seconds, which a busy machine needs to
// let a second consumer into a group. It has no other way to change it than a build tag.
//
//go:linkname suiteTimeout github.com/ThreeDotsLabs/watermill/pubsub/tests.defaultTimeout
var suiteTimeout time.Duration

func init() { suiteTimeout = patience.Limit() }

// noAck is the case TestNoAck of the suite, which waits for five seconds at the end: the second message arrives after the
// ack of the first one.
func noAck(t *testing.T, suite tests.TestContext, open tests.PubSubConstructor) {
	t.Helper()
	publisher, subscriber := open(t)
	topic := "topic_" + string(suite.TestID)
	require.NoError(t, subscriber.(message.SubscribeInitializer).SubscribeInitialize(topic))
	for range 2 {
		require.NoError(t, publisher.Publish(topic, message.NewMessage(watermill.NewUUID(), []byte("x"))))
	}
	messages, err := subscriber.Subscribe(t.Context(), topic)
	require.NoError(t, err)
	first := patience.Receive(t, messages, "the first message")
	select {
	case second := <-messages:
		require.FailNow(t, "a message arrived before the ack", second.UUID)
	case <-time.After(100 * time.Millisecond): // on a slow machine it shows less, and is not wrong
	}
	first.Ack()
	patience.Receive(t, messages, "the second message").Ack()
	require.NoError(t, publisher.Close())
	require.NoError(t, subscriber.Close())
}

// reconnect is the case TestReconnect of the suite. That one reads the list of published messages while
// another goroutine may still write it. Many goroutines publish while the server is restarted twice. Each
// message must arrive.
func reconnect(t *testing.T, b brokers.Broker, open func(*testing.T, string) (message.Publisher, message.Subscriber), restart func() error) {
	t.Helper()
	const publishers, each = 50, 60
	require.NoError(t, b.Prepare(t.Context(), "reconnect"))
	publisher, subscriber := open(t, "one")
	messages, err := subscriber.Subscribe(t.Context(), "reconnect")
	require.NoError(t, err)
	var ids sync.Map // of published messages
	var sent atomic.Int64
	var work sync.WaitGroup
	for range publishers {
		work.Go(func() {
			for range each {
				m := message.NewMessage(watermill.NewUUID(), []byte("x"))
				ids.Store(m.UUID, true)
				for publisher.Publish("reconnect", m) != nil { // the server is away
					time.Sleep(50 * time.Millisecond) // between two attempts
				}
				sent.Add(1)
			}
		})
	}
	work.Go(func() {
		for _, after := range []int64{publishers * each / 3, publishers * each / 2} {
			for sent.Load() < after {
				time.Sleep(time.Millisecond) // between two polls
			}
			if err := restart(); err != nil {
				t.Error(err)
			}
		}
	})
	got := map[string]bool{}
	for len(got) < publishers*each {
		select {
		case m := <-messages:
			require.NotNil(t, m, "the subscription has ended")
			_, known := ids.Load(m.UUID)
			require.True(t, known)
			got[m.UUID] = true
			m.Ack()
		case <-time.After(patience.Limit()):
			require.FailNow(t, "messages are missing", "%d of %d arrived", len(got), publishers*each)
		}
	}
	work.Wait()
	require.NoError(t, publisher.Close())
	require.NoError(t, subscriber.Close())
}

// prepared calls Prepare for each topic of the suite. Its Close returns after the channels are closed: the suite
// looks at them at once, and Close of watermill-sql may return a moment earlier.
type prepared struct {
	message.Subscriber
	broker brokers.Broker
	mu     sync.Mutex
	opened []<-chan *message.Message
}

func (p *prepared) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	messages, err := p.Subscriber.Subscribe(ctx, topic)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opened = append(p.opened, messages)
	return messages, err
}

func (p *prepared) Close() error {
	err := p.Subscriber.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, messages := range p.opened {
		for messages != nil {
			if _, open := <-messages; !open {
				break
			}
		}
	}
	return err
}

func (p *prepared) SubscribeInitialize(topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience.Limit())
	defer cancel()
	return p.broker.Prepare(ctx, topic)
}

// perTopic is a subscriber with a group for each topic.
type perTopic struct {
	*prepared
	open func(group string) message.Subscriber
}

func (p perTopic) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	return p.open(topic).Subscribe(ctx, topic)
}

// cases are those of the suite, except reconnect. The suite would choose them too, but skips the one in
// fresh, because the subscribers of the others share a group.
var (
	cases = map[string]func(*testing.T, tests.TestContext, tests.PubSubConstructor){
		"PublishSubscribe":                  tests.TestPublishSubscribe,
		"ConcurrentSubscribe":               tests.TestConcurrentSubscribe,
		"ConcurrentSubscribeMultipleTopics": tests.TestConcurrentSubscribeMultipleTopics,
		"ResendOnError":                     tests.TestResendOnError,
		"NoAck":                             noAck,
		"ContinueAfterSubscribeClose":       tests.TestContinueAfterSubscribeClose,
		"ConcurrentClose":                   tests.TestConcurrentClose,
		"ContinueAfterErrors":               tests.TestContinueAfterErrors,
		"PublishSubscribeInOrder":           tests.TestPublishSubscribeInOrder,
		"PublisherClose":                    tests.TestPublisherClose,
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
		return p, &prepared{Subscriber: s, broker: b}
	}
	// Each case has a group of its own: Kafka stops all members of a group while one joins or leaves.
	inGroup := func(name string) tests.PubSubConstructor {
		return func(t *testing.T) (message.Publisher, message.Subscriber) { t.Helper(); return open(t, name) }
	}
	suite := func() tests.TestContext {
		return tests.TestContext{TestID: tests.NewTestID(), Features: tests.Features{
			ConsumerGroups: true, Persistent: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true,
			NewSubscriberReceivesOldMessages: true, ForceShort: !longtest.On(),
		}}
	}
	t.Run("Reconnect", func(t *testing.T) { reconnect(t, b, open, restart) }) // before the others, which run together
	for name, test := range cases {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, suite(), inGroup(name)) })
	}
	// It reads one topic after the other. In one group, Kafka's first consumer would wait for the second one, which does
	// not join again before its message is read.
	t.Run("Topic", func(t *testing.T) {
		t.Parallel()
		tests.TestTopic(t, suite(), func(t *testing.T) (message.Publisher, message.Subscriber) {
			t.Helper()
			p, s := open(t, "Topic")
			return p, perTopic{s.(*prepared), func(group string) message.Subscriber {
				_, own := open(t, group)
				t.Cleanup(func() { require.NoError(t, own.Close()) })
				return own
			}}
		})
	})
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
	s := redistest.Private(t, "--appendonly", "yes", "--appendfsync", "always") // else a kill loses acknowledged messages
	conform(t, s.URL, time.Second, func() error { return errors.Join(s.End("KILL"), s.Begin()) })
}

func TestSQLConforms(t *testing.T) {
	t.Parallel()
	s := pgtest.Private(t)
	conform(t, s.DSN, 0, func() error { return s.Restart("QUIT") })
}

func TestNATSConforms(t *testing.T) {
	t.Parallel()
	address, restart := startNATS(t)
	conform(t, address, 5*time.Second, restart)
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
	port, err := testserver.FreePort()
	require.NoError(t, err)
	return port
}
