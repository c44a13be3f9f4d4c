package outbox_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// looked is a store whose looks everywhere take long, as over much that waits for others.
type looked struct {
	*memory.DB
	everywhere time.Duration
	mu         sync.Mutex
	looks      []time.Time // everywhere
	nearby     int
}

func (l *looked) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	l.mu.Lock()
	if !q.Near {
		l.looks = append(l.looks, time.Now())
	} else {
		l.nearby++
	}
	l.mu.Unlock()
	if !q.Near {
		time.Sleep(l.everywhere)
	}
	return l.DB.ClaimEntries(ctx, q, t)
}

func (l *looked) count() (everywhere, nearby int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.looks), l.nearby
}

func ids(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("%c-%s-%d", 'a'+i%26, prefix, i))
	}
	return all
}

// A look that takes long is rare, and meanwhile a relay sees what is new.
func TestRelayRestsFromLongLooks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		db := &looked{DB: b.db, everywhere: 300 * time.Millisecond}
		stop := start(t, db, b, outbox.RelayConfig{})
		b.add("t", "a-1")
		time.Sleep(10 * time.Second) // it has found that
		before, _ := db.count()
		for i := range 60 {
			b.add("t", fmt.Sprintf("new-%d", i+2))
			time.Sleep(time.Second)
		}
		after, _ := db.count()
		require.NoError(t, stop())
		require.InDelta(t, 60/3.3, after-before, 2)
		b.in("new", 301*time.Millisecond) // the look that is under way may be a long one
		prompt := 0
		for id, at := range b.sentAt {
			if at-b.added[id] < time.Millisecond {
				prompt++
			}
		}
		require.Greater(t, prompt, 50)
	})
}

// Where there is always something new, what is behind it has its turn as well.
func TestRelayLooksBehind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, at time.Duration) bool { return id == "late-1" && at < 2*time.Second })
		db := &looked{DB: b.db}
		b.add("t", "late-1", "late-2")
		b.add("t", ids("first", 1500)...)
		stop := start(t, db, unhurried{b}, outbox.RelayConfig{Batch: 100, Backoff: claim.Backoff{Base: time.Second, Max: time.Second}})
		for i := range 5000 { // some are there whenever those before them are published
			b.add("t", fmt.Sprintf("new%d-1", i))
			time.Sleep(time.Millisecond)
		}
		everywhere, nearby := db.count()
		require.NoError(t, stop())
		require.Less(t, b.sentAt["late-2"], 3200*time.Millisecond)
		require.InDelta(t, 5, everywhere, 2, "and %d nearby", nearby)
		require.Greater(t, nearby, 2000)
	})
}

// unhurried takes its time for each call.
type unhurried struct{ *traffic }

func (u unhurried) Publish(topic string, ms ...*message.Message) error {
	time.Sleep(2 * time.Millisecond)
	return u.traffic.Publish(topic, ms...)
}

// A batch holds no more payload than it may, whatever is claimed ahead; a larger message goes alone.
func TestRelayBoundsPayload(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var calls [][]int
		pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
			var sizes []int
			for _, m := range ms {
				sizes = append(sizes, len(m.Payload))
			}
			calls = append(calls, sizes)
			return nil
		})
		db := newDB(t)
		require.NoError(t, db.Tx(t.Context(), func(tx *memory.Model) error {
			for i, n := range []int{400, 400, 300, 2000, 600, 500} {
				m := outbox.Message{ID: fmt.Sprint(i), Topic: "t", Key: fmt.Sprint(i), Payload: bytes.Repeat([]byte("x"), n)}
				if err := db.InTx(tx).Enqueue(t.Context(), m); err != nil {
					return err
				}
			}
			return nil
		}))
		stop := start(t, db, pub, outbox.RelayConfig{Bytes: 1000})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, [][]int{{400, 400}, {300}, {2000}, {600}, {500}}, calls)
	})
}
