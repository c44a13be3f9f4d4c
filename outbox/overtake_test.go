package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// The store's clock steps forward while a relay's call is slow, as in a failover to a host whose
// clock is ahead. Another relay takes over only the first entry of a key. The first relay's renewal
// reports that, and the relay releases the entries behind it: they would overtake.
// Promise: G3.1
func TestRelayNeverOvertakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, step := newSteppingDB(t)
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
			return db.InTx(tx).Enqueue(t.Context(), outbox.Message{ID: "x1", Topic: "other", Key: "x"},
				outbox.Message{ID: "v1", Topic: "t", Key: "k"}, outbox.Message{ID: "v2", Topic: "t", Key: "k"}, outbox.Message{ID: "v3", Topic: "t", Key: "k"})
		}))
		var mu sync.Mutex
		var order []string
		relay := func(slow string, d time.Duration) func() error {
			return start(t, db, newPublisher(func(_ int, _ string, ms []*message.Message) error {
				if ms[0].UUID == slow {
					time.Sleep(d)
				}
				mu.Lock()
				defer mu.Unlock()
				for _, m := range ms {
					if m.UUID[0] == 'v' {
						order = append(order, m.UUID)
					}
				}
				return nil
			}), outbox.RelayConfig{Lease: time.Minute})
		}
		first := relay("x1", 50*time.Second)
		synctest.Wait()
		step(61 * time.Second)
		second := relay("v1", 100*time.Second)
		time.Sleep(10 * time.Minute)
		require.NoError(t, first())
		require.NoError(t, second())
		require.Equal(t, []string{"v1", "v2", "v3"}, order)
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
		}
	})
}

// More poison at the front than one claim takes, for a relay that has not used the topic yet, and
// for one that has: the good messages behind the poison are published, and the poison is abandoned
// among later traffic.
// Promise: G3.3
func TestMorePoisonAtTheFrontThanAClaimTakes(t *testing.T) {
	t.Parallel()
	for _, keys := range []int{60, 100} {
		for _, warm := range []bool{false, true} {
			t.Run(fmt.Sprint(keys, " ", warm), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					b := newTraffic(t, func(_, id string, _ time.Duration) bool { return strings.HasPrefix(id, "p") })
					stop := start(t, b.db, b, outbox.RelayConfig{Poll: 5 * time.Second})
					if warm {
						b.add("t", run("w", 20, 1)...)
						time.Sleep(time.Minute)
					}
					b.add("t", run("p", keys, 1)...)
					b.add("t", run("g", 20, 2)...)
					time.Sleep(time.Hour)
					require.NoError(t, stop())
					for id, e := range entries(t, b.db) {
						if id[0] != 'p' {
							require.Equal(t, outbox.Published, e.Status, id)
						}
					}
				})
			})
		}
	}
}

// A relay was killed while a topic was down, and its entries are claimed one by one. The topic
// still pauses, and other topics continue.
// Promise: G3.7
func TestCrashedClaimsOfADownTopicDelayNoOtherTopic(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, n := newDB(t), 50
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
			for i := range n {
				if err := db.InTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "down", Key: fmt.Sprint(i)}); err != nil {
					return err
				}
			}
			return db.InTx(tx).Enqueue(t.Context(), outbox.Message{ID: "good", Topic: "up"})
		}))
		_, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Lease: time.Second, Limit: n})
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		begin, took := time.Now(), time.Duration(0)
		stop := start(t, db, newPublisher(func(_ int, topic string, _ []*message.Message) error {
			if topic == "down" {
				time.Sleep(5 * time.Second)
				return errors.New("down")
			}
			took = time.Since(begin)
			return nil
		}), outbox.RelayConfig{})
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Equal(t, outbox.Published, entries(t, db)["good"].Status)
		require.Less(t, took, time.Minute)
	})
}
