package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/stretchr/testify/require"
)

func testBroker(t *testing.T, cfg brokerConfig) *broker {
	t.Helper()
	tr, err := openTrace(filepath.Join(t.TempDir(), "trace"))
	require.NoError(t, err)
	cfg.Groups = []string{"g"}
	b, err := newBroker(filepath.Join(t.TempDir(), "s"), 1, tr, cfg)
	require.NoError(t, err)
	t.Cleanup(b.close)
	return b
}

func numbered(stream string, n int) *message.Message {
	payload, _ := json.Marshal(moved{Stream: stream, N: n})
	m := message.NewMessage(fmt.Sprintf("%s/%d", stream, n), payload)
	m.Metadata[keyHeader] = stream
	return m
}

// When a consumer disconnects, its unacked messages go to the other consumer, in the order of their
// key.
func TestBrokerKeepsOrderAndLosesNothing(t *testing.T) {
	t.Parallel()
	const streams, each = 20, 50
	b := testBroker(t, brokerConfig{Duplicate: 0.2})
	first := map[string]int{}
	var mu sync.Mutex
	consume := func(ctx context.Context, name string, share int) {
		s := &subscriber{socket: b.socket, name: name, group: "g", acking: func(string) {}}
		in, err := s.Subscribe(ctx, "t")
		require.NoError(t, err)
		handled := 0
		for m := range in {
			var got moved
			_ = json.Unmarshal(m.Payload, &got)
			mu.Lock()
			if got.N > first[got.Stream]+1 {
				t.Errorf("%s: %d after %d", got.Stream, got.N, first[got.Stream])
			}
			first[got.Stream] = max(first[got.Stream], got.N)
			mu.Unlock()
			if handled++; share == 0 || handled <= share {
				m.Ack()
			}
		}
	}
	pub := &publisher{socket: b.socket, name: "p"}
	defer func() { require.NoError(t, pub.Close()) }()
	for n := range each {
		for s := range streams {
			require.NoError(t, pub.Publish("t", numbered(fmt.Sprint("s", s), n+1)))
		}
	}
	doomed, kill := context.WithCancel(t.Context())
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { consume(doomed, "doomed", 200) })
	patience.Until(t, func() bool { return b.count("acked") >= 150 }, "150 acks")
	require.NotEmpty(t, b.unacked("doomed"))
	all.Go(func() { consume(ctx, "other", 0) })
	kill()
	patience.Until(t, func() bool { _, idle := b.idle(); return idle }, "an idle broker")
	stop()
	all.Wait()
	require.Equal(t, streams*each, b.count("acked"))
	require.Positive(t, b.count("twin"))
	require.Positive(t, b.count("again"))
	require.Empty(t, b.wrong)
	for stream, n := range first {
		require.Equal(t, each, n, stream)
	}
}

// A first publication out of order is recorded, a repeated one is not.
func TestBrokerRecordsPublicationsOutOfOrder(t *testing.T) {
	t.Parallel()
	b := testBroker(t, brokerConfig{})
	pub := &publisher{socket: b.socket, name: "p"}
	defer func() { require.NoError(t, pub.Close()) }()
	for _, n := range []int{1, 2, 1, 3, 2} {
		require.NoError(t, pub.Publish("t", numbered("a", n)))
	}
	require.Empty(t, b.wrong)
	require.NoError(t, pub.Publish("t", numbered("a", 5)))
	require.Len(t, b.wrong, 1)
	require.NoError(t, pub.Publish("t", numbered("a", 4)))
	require.Len(t, b.wrong, 2)
}

// If the reply is lost, Publish returns an error although the message is published.
func TestBrokerLosesReplies(t *testing.T) {
	t.Parallel()
	b := testBroker(t, brokerConfig{LoseReply: 1})
	pub := &publisher{socket: b.socket, name: "p"}
	defer func() { require.NoError(t, pub.Close()) }()
	require.ErrorIs(t, pub.Publish("t", numbered("a", 1)), errCutOff)
	require.Equal(t, 1, b.count("published"))
}

// Acks of a disconnected consumer are late.
func TestAckAfterDisconnectIsLate(t *testing.T) {
	t.Parallel()
	b := testBroker(t, brokerConfig{})
	pub := &publisher{socket: b.socket, name: "p"}
	defer func() { require.NoError(t, pub.Close()) }()
	require.NoError(t, pub.Publish("t", numbered("a", 1)))
	s := &subscriber{socket: b.socket, name: "c", group: "g", acking: func(string) {}}
	in, err := s.Subscribe(t.Context(), "t")
	require.NoError(t, err)
	m := <-in
	b.disconnect("c")
	m.Ack()
	again := <-in
	require.Equal(t, m.UUID, again.UUID)
	require.Zero(t, b.count("acked"))
	again.Ack()
	patience.Until(t, func() bool { return b.count("acked") == 1 }, "an ack")
	require.Equal(t, 2, b.count("delivered"))
}

// A key waits for its message, even if a corrupted copy before it is acked.
func TestKeyWaitsForMessageBehindCorruptedOne(t *testing.T) {
	t.Parallel()
	b := testBroker(t, brokerConfig{Serial: true, Tap: func(_ *rand.Rand, l letter) []letter {
		return []letter{{ID: "corrupt", Payload: l.Payload, Meta: l.Meta}, l}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &subscriber{socket: b.socket, name: "c", group: "g", acking: func(string) {}}
	in, err := s.Subscribe(ctx, "t")
	require.NoError(t, err)
	pub := &publisher{socket: b.socket, name: "p"}
	require.NoError(t, pub.Publish("t", numbered("a", 1), numbered("a", 2)))
	bad, first := <-in, <-in
	require.Equal(t, []string{"corrupt", "a/1"}, []string{bad.UUID, first.UUID})
	bad.Ack()
	select {
	case m := <-in:
		t.Errorf("%s was delivered before a/1 was acked", m.UUID)
	case <-time.After(100 * time.Millisecond):
	}
	first.Ack()
	require.Equal(t, "corrupt", (<-in).UUID)
	require.Equal(t, "a/2", (<-in).UUID)
}
