package main

import (
	"context"
	"testing"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/require"
)

// suiteTimeout is how long Watermill's suite waits for messages: 15 seconds, which are too few on a busy
// machine. It has no other way to change it than a build tag.
//
//go:linkname suiteTimeout github.com/ThreeDotsLabs/watermill/pubsub/tests.defaultTimeout
var suiteTimeout time.Duration

func init() { suiteTimeout = patience }

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
	first := next(t, messages)
	select {
	case second := <-messages:
		require.FailNow(t, "a message arrived before the ack", second.UUID)
	case <-time.After(100 * time.Millisecond): // on a slow machine it shows less, and is not wrong
	}
	first.Ack()
	next(t, messages).Ack()
}

// suiteBroker creates the topics of the suite.
type suiteBroker struct{ *sqlBroker }

func (b suiteBroker) SubscribeInitialize(topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	one := &sqlBroker{db: b.db, schema: b.schema, topics: []string{topic}}
	return one.createTables(ctx)
}

// TestSQLBrokerConforms runs Watermill's suite, except for consumer groups: the broker has one. The cases are
// named here, because tests.TestPubSub skips those of other features, and no test may be skipped.
func TestSQLBrokerConforms(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	open := func(t *testing.T) (message.Publisher, message.Subscriber) {
		t.Helper()
		p, err := newSQLBroker(t.Context(), dsn, 0)
		require.NoError(t, err)
		s, err := newSQLBroker(t.Context(), dsn, 20)
		require.NoError(t, err)
		// As in testBroker.
		s.ackDeadline, s.idleTimeout, s.stopTimeout = time.Hour, time.Hour, time.Hour
		t.Cleanup(func() { // not each case closes them
			require.NoError(t, p.Close())
			require.NoError(t, s.Close())
		})
		return p, suiteBroker{s}
	}
	features := tests.Features{Persistent: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, ForceShort: true}
	for name, test := range map[string]func(*testing.T, tests.TestContext, tests.PubSubConstructor){
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
		"Topic":                             tests.TestTopic,
		"MessageCtx":                        tests.TestMessageCtx,
		"SubscribeCtx":                      tests.TestSubscribeCtx,
	} {
		t.Run(name, func(t *testing.T) { test(t, tests.TestContext{TestID: tests.NewTestID(), Features: features}, open) })
	}
}
