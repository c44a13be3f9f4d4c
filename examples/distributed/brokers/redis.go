package brokers

import (
	"context"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
)

// redisBroker is Redis Streams.
type redisBroker struct {
	url      string
	takeover time.Duration
	log      watermill.LoggerAdapter
}

// Prepare does nothing: the first subscription of a group creates the stream and the group.
func (r redisBroker) Prepare(context.Context, ...string) error { return nil }

func (r redisBroker) Publisher() (message.Publisher, error) {
	client, err := r.client()
	if err != nil {
		return nil, err
	}
	// No MaxLen: Redis would delete messages that no group has read yet. Trim with XTRIM MINID up
	// to what all groups have acked.
	return redisstream.NewPublisher(redisstream.PublisherConfig{Client: client}, r.log)
}

func (r redisBroker) Subscriber(group string) (message.Subscriber, error) {
	client, err := r.client() // of its own: Close closes it
	if err != nil {
		return nil, err
	}
	return redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client:        client,
		ConsumerGroup: group,
		OldestId:      "0", // a new group begins with the oldest message
		// A message that was not acked within MaxIdleTime is given to another consumer, also if its
		// runner is only slow. ClaimInterval is how often a consumer looks for such messages.
		MaxIdleTime:   r.takeover,
		ClaimInterval: max(r.takeover/4, 100*time.Millisecond),
		// After a nack the message is sent again, in this process. Later messages wait.
		NackResendSleep: 100 * time.Millisecond,
		// Otherwise the first read blocks without limit, and Close leaves a goroutine behind.
		DisableIndefiniteInitialBlock: true,
		// If Redis has lost the group, reading fails for ever. This ends the subscription, and so the
		// runner. Its next start creates the group.
		ShouldStopOnReadErrors: func(err error) bool { return strings.HasPrefix(err.Error(), "NOGROUP") },
	}, r.log)
}

func (r redisBroker) client() (redis.UniversalClient, error) {
	options, err := redis.ParseURL(r.url)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(options), nil
}
