package brokers

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kinora-go/kinora/outbox"
)

// natsBroker is NATS JetStream. A topic is a stream, whose subjects "topic.0", "topic.1", … are
// partitions.
type natsBroker struct {
	hosts    []string
	takeover time.Duration
	log      watermill.LoggerAdapter
}

// natsPartitions limits how many messages of a projector are in flight, and so how many runners
// work at the same time. Changing it moves keys to other partitions: their order is not kept
// meanwhile.
const natsPartitions = 8

const (
	natsTimeout = 2 * time.Second  // of a publication, an ack or another request
	natsReport  = 30 * time.Second // between reports that a server has not answered yet
)

// Prepare creates streams. With three servers each stream is on all of them. A stream that exists is
// left as it is: whoever changed it keeps their replicas and limits. It waits for servers that do not
// answer yet, until ctx ends.
func (n natsBroker) Prepare(ctx context.Context, topics ...string) error {
	conn, err := n.connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	for _, topic := range topics {
		stream := jetstream.StreamConfig{
			Name: topic, Subjects: []string{topic + ".*"},
			Storage: jetstream.FileStorage, Replicas: len(n.hosts),
			// Limits, not WorkQueue: each projector reads every message. Messages are deleted by age.
			Retention: jetstream.LimitsPolicy, MaxAge: 7 * 24 * time.Hour, Discard: jetstream.DiscardOld,
			// A message that is published again within this time is dropped. It saves deliveries: markers
			// recognize a repetition at any time.
			Duplicates: 2 * time.Minute,
		}
		_, err := answered(ctx, n.log, "create stream "+topic, func(ctx context.Context) (jetstream.Stream, error) {
			// A cluster does not answer who creates a stream again: it is there if an earlier answer was lost.
			if found, err := js.Stream(ctx, topic); !errors.Is(err, jetstream.ErrStreamNotFound) {
				return found, err
			}
			return js.CreateStream(ctx, stream)
		})
		if err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // meanwhile, with other settings
			return err
		}
	}
	return nil
}

func (n natsBroker) Publisher() (message.Publisher, error) {
	conn, err := n.connect()
	if err != nil {
		return nil, err
	}
	return wmnats.NewPublisherWithNatsConn(conn, wmnats.PublisherPublishConfig{
		Marshaler:         natsMarshaler{},
		SubjectCalculator: wmnats.DefaultSubjectCalculator,
		JetStream: wmnats.JetStreamConfig{
			TrackMsgId:     true, // for Duplicates
			ConnectOptions: []nats.JSOpt{nats.MaxWait(natsTimeout)},
		},
	}, n.log)
}

// natsMarshaler publishes to the partition of the ordering key.
type natsMarshaler struct{ wmnats.NATSMarshaler }

func (m natsMarshaler) Marshal(topic string, msg *message.Message) (*nats.Msg, error) {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(msg.Metadata[outbox.HeaderKey]))
	return m.NATSMarshaler.Marshal(natsSubject(topic, int(hash.Sum32()%natsPartitions)), msg)
}

func natsSubject(topic string, partition int) string { return fmt.Sprintf("%s.%d", topic, partition) }

func (n natsBroker) Subscriber(group string) (message.Subscriber, error) {
	conn, err := n.connect()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(conn)
	if err != nil {
		return nil, err
	}
	s := &natsSubscriber{conn: conn, js: js, log: n.log, consumer: func(partition int, topic string) jetstream.ConsumerConfig {
		return jetstream.ConsumerConfig{
			Durable:       fmt.Sprintf("%s-%d", group, partition), // shared by all runners
			FilterSubject: natsSubject(topic, partition),
			DeliverPolicy: jetstream.DeliverAllPolicy, // a new group begins with the oldest message
			AckPolicy:     jetstream.AckExplicitPolicy,
			// One message of a partition is in flight at a time, in all processes. This keeps the order
			// of a key, also if a runner is killed.
			MaxAckPending: 1,
			AckWait:       n.takeover,
			MaxDeliver:    -1, // without limit: the runner parks messages that it cannot apply
		}
	}}
	s.life, s.end = context.WithCancel(context.Background())
	return s, nil
}

// answered sends a request until a server answers it. While a cluster starts or elects its leaders,
// servers are silent, or say that they cannot answer now.
func answered[T any](ctx context.Context, log watermill.LoggerAdapter, what string, request func(context.Context) (T, error)) (T, error) {
	var reason string
	var reported time.Time
	for {
		try, cancel := context.WithTimeout(ctx, natsTimeout)
		answer, err := request(try)
		cancel()
		if err == nil || !mayPass(err) {
			return answer, wrap(what, err)
		}
		if err.Error() != reason || time.Since(reported) > natsReport {
			log.Error("NATS does not answer yet", wrap(what, err), nil)
			reason, reported = err.Error(), time.Now()
		}
		if !pause(ctx, 100*time.Millisecond) {
			return answer, wrap(what, err)
		}
	}
}

// mayPass reports whether a request failed because of the state of the servers, not of the request.
func mayPass(err error) bool {
	if api := (*jetstream.APIError)(nil); errors.As(err, &api) {
		return api.Code >= http.StatusInternalServerError && api.ErrorCode != jetstream.JSErrCodeJetStreamNotEnabled
	}
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders)
}

func (n natsBroker) connect() (*nats.Conn, error) {
	conn, err := nats.Connect("nats://"+strings.Join(n.hosts, ",nats://"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1),
		nats.ReconnectWait(250*time.Millisecond), nats.Timeout(natsTimeout),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if !errors.Is(err, nats.ErrConsumerLeadershipChanged) {
				n.log.Debug("NATS reports an error", watermill.LogFields{"err": err.Error()})
			}
		}))
	return conn, wrap("connect to NATS", err)
}
