package brokers

import (
	"context"
	"errors"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/outbox"
)

// kafkaBroker is Kafka.
type kafkaBroker struct {
	hosts    []string
	takeover time.Duration
	log      watermill.LoggerAdapter
}

// kafkaPartitions limits how many runners of a projector work at the same time. Changing it moves
// keys to other partitions: their order is not kept meanwhile.
const kafkaPartitions = 8

// kafkaReplicas should be 3, with min.insync.replicas 2, if there are three servers.
const kafkaReplicas = 1

// kafkaMarshaler takes the ordering key as partition key. The default one sets no key.
var kafkaMarshaler = kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) {
	return m.Metadata[outbox.HeaderKey], nil
})

// Prepare creates topics.
func (k kafkaBroker) Prepare(_ context.Context, topics ...string) (err error) {
	config := sarama.NewConfig()
	config.Version = sarama.V2_1_0_0
	admin, err := sarama.NewClusterAdmin(k.hosts, config)
	if err != nil {
		return wrap("connect to Kafka", err)
	}
	defer func() { err = errors.Join(err, admin.Close()) }()
	for _, topic := range topics {
		err := admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: kafkaPartitions, ReplicationFactor: kafkaReplicas}, false)
		if err != nil && !errors.Is(err, sarama.ErrTopicAlreadyExists) {
			return wrap("create topic "+topic, err)
		}
	}
	return nil
}

func (k kafkaBroker) Publisher() (message.Publisher, error) {
	config := kafka.DefaultSaramaSyncPublisherConfig()
	config.Version = sarama.V2_1_0_0
	// The default waits for the leader alone: a failover would lose what the others do not have.
	config.Producer.RequiredAcks = sarama.WaitForAll
	// A retry after a lost reply neither doubles a message nor overtakes an earlier one.
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1
	// The outbox retries too. Its relay should not wait here for long.
	config.Producer.Retry.Max, config.Metadata.Retry.Backoff = 3, 250*time.Millisecond
	return kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: k.hosts, Marshaler: kafkaMarshaler, OverwriteSaramaConfig: config,
	}, k.log)
}

func (k kafkaBroker) Subscriber(group string) (message.Subscriber, error) {
	config := kafka.DefaultSaramaSubscriberConfig()
	config.Version = sarama.V2_1_0_0
	// The default is the newest: a new group would lose the messages before its beginning.
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	// The partitions of a killed runner go to others after the session timeout. It must be within
	// the server's group.min.session.timeout.ms (6s) and group.max.session.timeout.ms.
	config.Consumer.Group.Session.Timeout = k.takeover
	config.Consumer.Group.Heartbeat.Interval = k.takeover / 10
	return kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: k.hosts, ConsumerGroup: group, Unmarshaler: kafkaMarshaler, OverwriteSaramaConfig: config,
		NackResendSleep: 100 * time.Millisecond, // then it is sent again, in this process
	}, k.log)
}
