package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

var errBroker = errors.New("broker away")

// traffic is a broker that refuses the messages that refuse selects, and records all others.
type traffic struct {
	*testing.T
	db     *memory.DB
	start  time.Time
	mu     sync.Mutex
	sent   []string
	sentAt map[string]time.Duration // by id: time of publication
	added  map[string]time.Duration // by id: time of enqueuing
	calls  map[string]int           // by id: number of failed calls
	refuse func(topic, id string, at time.Duration) bool
}

func newTraffic(t *testing.T, refuse func(topic, id string, at time.Duration) bool) *traffic {
	t.Helper()
	return &traffic{
		T: t, db: newDB(t), start: time.Now(), refuse: refuse,
		sentAt: map[string]time.Duration{}, added: map[string]time.Duration{}, calls: map[string]int{},
	}
}

func (b *traffic) Publish(topic string, ms ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := time.Since(b.start)
	for _, m := range ms {
		if b.refuse(topic, m.UUID, at) {
			if len(ms) == 1 {
				b.calls[m.UUID]++
			}
			return errBroker
		}
	}
	for _, m := range ms {
		b.sent = append(b.sent, m.UUID)
		b.sentAt[m.UUID] = at
	}
	return nil
}

func (*traffic) Close() error { return nil }

// add enqueues messages with ids "key-n" to a topic.
func (b *traffic) add(topic string, ids ...string) {
	b.Helper()
	require.NoError(b, b.db.Transact(b.Context(), func(_ context.Context, tx *memory.Model) error {
		for _, id := range ids {
			b.added[id] = time.Since(b.start)
			key, _, _ := strings.Cut(id, "-")
			if err := b.db.InTx(tx).Enqueue(b.Context(), outbox.Message{ID: id, Topic: topic, Key: key}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// run returns n message ids for each of that many keys.
func run(prefix string, keys, n int) (ids []string) {
	for i := range n {
		for k := range keys {
			ids = append(ids, fmt.Sprintf("%s%d-%d", prefix, k, i+1))
		}
	}
	return ids
}

// allOut checks that every message was published once, in the order of its key, and that no entry
// counted more than this many attempts.
func (b *traffic) allOut(attempts int) {
	b.Helper()
	last := map[string]int{}
	for _, id := range b.sent {
		key, n, _ := strings.Cut(id, "-")
		at, err := strconv.Atoi(n)
		require.NoError(b, err)
		before, any := last[key]
		require.True(b, !any || before < at, "%s, of %v", id, b.sent)
		last[key] = at
	}
	require.Len(b, b.sent, len(b.added))
	for id, e := range entries(b.T, b.db) {
		require.Equal(b, outbox.Published, e.Status, id)
		require.LessOrEqual(b, e.Attempts, attempts, id)
	}
}

// in checks that messages whose ids begin with prefix were published within limit.
func (b *traffic) in(prefix string, limit time.Duration) {
	b.Helper()
	for id, added := range b.added {
		if strings.HasPrefix(id, prefix) {
			at, ok := b.sentAt[id]
			require.True(b, ok && at-added <= limit, "%s: published %t, after %s", id, ok, at-added)
		}
	}
}
