package brokers_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/internal/patience"
)

// startNATS starts a server in this process. restart stops it and starts it again.
func startNATS(t *testing.T) (address string, restart func() error) {
	t.Helper()
	options := natsOptions(t)
	s := runNATS(t, options)
	return natsAddress(options), func() error {
		stopNATS(s)
		s = runNATS(t, options)
		return nil
	}
}

func natsOptions(t *testing.T) *server.Options {
	t.Helper()
	return &server.Options{Host: "127.0.0.1", Port: freePort(t), JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true}
}

func natsAddress(servers ...*server.Options) string {
	var hosts []string
	for _, o := range servers {
		hosts = append(hosts, fmt.Sprint(o.Host, ":", o.Port))
	}
	return "nats://" + strings.Join(hosts, ",")
}

// runNATS starts a server. It stops at the end of the test, or before.
func runNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(o.Clone())
	require.NoError(t, err)
	t.Cleanup(func() { stopNATS(s) })
	s.Start()
	require.True(t, s.ReadyForConnections(patience.Limit()))
	return s
}

func stopNATS(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

// TestNATSWaitsForALeader: while two of three servers are down, the third answers requests with 503, or
// not at all. Prepare and Subscribe wait until a leader is elected.
func TestNATSWaitsForALeader(t *testing.T) {
	t.Parallel()
	var all []*server.Options
	var routes []*url.URL
	for i := range 3 {
		o := natsOptions(t)
		o.ServerName = fmt.Sprint("n", i)
		o.Cluster = server.ClusterOpts{Name: "test", Host: o.Host, Port: freePort(t)}
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprint(o.Host, ":", o.Cluster.Port)})
		all = append(all, o)
	}
	var log observed
	b, err := brokers.Open(brokers.Config{Address: natsAddress(all...), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	servers := make([]*server.Server, len(all))
	run := func(some ...int) {
		for _, i := range some {
			all[i].Routes = routes
			servers[i] = runNATS(t, all[i])
		}
	}
	unanswered := func(what string, ended chan error) {
		patience.Until(t, func() bool { return strings.Contains(log.String(), what) || len(ended) > 0 }, "the request waits")
		require.Empty(t, ended)
	}

	run(0) // alone
	prepared := make(chan error, 1)
	go func() { prepared <- b.Prepare(t.Context(), "topic") }()
	unanswered("create stream topic", prepared)
	run(1, 2)
	require.NoError(t, <-prepared)

	stopNATS(servers[1])
	stopNATS(servers[2])
	conn, err := nats.Connect(natsAddress(all[0]))
	require.NoError(t, err)
	defer conn.Close()
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	patience.Until(t, func() bool { // it notices after some seconds
		_, err := js.AccountInfo(t.Context())
		api := (*jetstream.APIError)(nil)
		return errors.As(err, &api) && api.Code == http.StatusServiceUnavailable
	}, "the server says 503")
	subscriber, err := b.Subscriber("group")
	require.NoError(t, err)
	subscribed := make(chan error, 1)
	go func() {
		_, err := subscriber.Subscribe(t.Context(), "topic")
		subscribed <- err
	}()
	unanswered("create a consumer of topic: nats: API error: code=503", subscribed)
	run(1, 2)
	require.NoError(t, <-subscribed)
	require.NoError(t, subscriber.Close())
}

// observed is a log that is read while it is written.
type observed struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *observed) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *observed) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// TestNATSLeavesAStreamAsItIs: a program that starts changes no stream that exists.
func TestNATSLeavesAStreamAsItIs(t *testing.T) {
	t.Parallel()
	address, _ := startNATS(t)
	conn, err := nats.Connect(address)
	require.NoError(t, err)
	defer conn.Close()
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "kept", Subjects: []string{"kept.*"}, MaxAge: 42 * time.Hour})
	require.NoError(t, err)
	b, err := brokers.Open(brokers.Config{Address: address, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, b.Prepare(t.Context(), "kept", "made"))
	}
	for name, age := range map[string]time.Duration{"kept": 42 * time.Hour, "made": 7 * 24 * time.Hour} {
		stream, err := js.Stream(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, age, stream.CachedInfo().Config.MaxAge, name)
	}
}

// TestNATSKeepsAMessageInProgress: while a runner works on a message for longer than AckWait, no other
// runner gets it, nor a later one of its partition. A runner that stops gives it to another one at once.
func TestNATSKeepsAMessageInProgress(t *testing.T) {
	t.Parallel()
	address, _ := startNATS(t)
	ackWait := 500 * time.Millisecond
	for !keepsInProgress(t, address, ackWait, false) { // a busy machine may not extend a short AckWait in time
		ackWait *= 2
		require.Less(t, ackWait, patience.Limit()/20, "a message that is in progress was delivered again")
	}
	require.True(t, keepsInProgress(t, address, time.Hour, true))
}

// keepsInProgress reports whether another runner gets a message that is in progress for four times AckWait, and requires that
// the next message is delivered after the ack. With stop, the first runner stops instead.
func keepsInProgress(t *testing.T, address string, ackWait time.Duration, stop bool) bool {
	t.Helper()
	b, err := brokers.Open(brokers.Config{Address: address, Takeover: ackWait, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	topic := "topic" + ackWait.String()
	require.NoError(t, b.Prepare(t.Context(), topic))
	publisher, err := b.Publisher()
	require.NoError(t, err)
	defer func() { require.NoError(t, publisher.Close()) }()
	subscribe := func() (message.Subscriber, <-chan *message.Message) {
		s, err := b.Subscriber("group")
		require.NoError(t, err)
		messages, err := s.Subscribe(t.Context(), topic)
		require.NoError(t, err)
		return s, messages
	}
	first, messages := subscribe()
	defer func() { require.NoError(t, first.Close()) }()
	ids := []string{watermill.NewUUID(), watermill.NewUUID()}
	for _, id := range ids {
		require.NoError(t, publisher.Publish(topic, message.NewMessage(id, nil))) // without key: one partition
	}
	m := <-messages
	require.Equal(t, ids[0], m.UUID)
	second, others := subscribe()
	defer func() { require.NoError(t, second.Close()) }()
	if stop {
		require.NoError(t, first.Close())
		m = <-others
		require.Equal(t, ids[0], m.UUID)
	} else {
		select {
		case <-others:
			return false
		case <-time.After(4 * ackWait): // on a slow machine it shows less, and is not wrong
		}
	}
	m.Ack()
	select { // the second message, to whichever subscriber
	case m = <-messages:
		if stop { // closed
			m = <-others
		}
	case m = <-others:
	}
	if !stop && m.UUID == ids[0] { // the ack came after AckWait
		return false
	}
	require.Equal(t, ids[1], m.UUID)
	m.Ack()
	return true
}
