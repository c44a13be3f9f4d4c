package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
	"github.com/stretchr/testify/require"
)

// A relay reports each step to its observer, with counts and durations.
func TestRelayReportsToItsObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		seen := map[string]int{}
		var took time.Duration
		count := func(what string, n int) {
			mu.Lock()
			defer mu.Unlock()
			seen[what] += n
		}
		pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
			time.Sleep(time.Second)
			for _, m := range ms {
				if m.UUID == "a1" {
					return errors.New("no")
				}
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "a2", "b1")
		stop := start(t, db, pub, outbox.RelayConfig{Keep: outbox.EntryRetention{Published: time.Minute}, Observer: outbox.RelayObserver{
			Claimed: func(entries []outbox.Entry, _ time.Duration, err error) {
				if count("claims", 1); len(entries) == 0 {
					count("empty claims", 1)
				}
				count("claimed", len(entries))
				if err != nil {
					count("claim errors", 1)
				}
			},
			Published: func(topic string, n int, d time.Duration, err error) {
				took = d
				count("calls to "+topic, 1)
				if err == nil {
					count("published", n)
				}
			},
			Marked: func(marks []outbox.Mark, late int, _ time.Duration, _ error) {
				for _, m := range marks {
					count("marked "+string(m.To), 1)
				}
				count("late", late)
			},
			Paused:  func(topic string, d time.Duration) { count("paused "+topic, int(d/time.Second)) },
			Held:    func(n int) { count("held", n) },
			Deleted: func(n int) { count("deleted", n) },
		}})
		time.Sleep(10 * time.Second)
		synctest.Wait()
		mu.Lock()
		require.Equal(t, time.Second, took)
		require.Equal(t, 1, seen["published"])
		require.Equal(t, 1, seen["marked published"])
		require.Equal(t, 1, seen["marked failed"])
		require.Equal(t, 1, seen["held"])
		require.Equal(t, 3, seen["calls to t"], "two together, then one by one")
		require.Greater(t, seen["empty claims"], 1)
		require.Zero(t, seen["late"]+seen["claim errors"])
		mu.Unlock()
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, 1, seen["deleted"])
	})
	synctest.Test(t, func(t *testing.T) {
		db, paused := newDB(t), time.Duration(0)
		pub := newPublisher(func(int, string, []*message.Message) error { return errors.New("down") })
		enqueue(t, db, "a1", "b1", "c1", "d1")
		stop := start(t, db, pub, outbox.RelayConfig{Observer: outbox.RelayObserver{Paused: func(_ string, d time.Duration) { paused = d }}})
		synctest.Wait()
		require.Equal(t, time.Second, paused)
		require.NoError(t, stop())
	})
}

type contextKey struct{}

// The observer of a Publish call sees the messages before it, can add to their contexts, and gets the
// error.
// Promise: G13.1
func TestObserverSurroundsPublishCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log []string
		pub := newPublisher(func(_ int, topic string, ms []*message.Message) error {
			for _, m := range ms {
				log = append(log, fmt.Sprint("publish ", m.UUID, " in ", m.Context().Value(contextKey{})))
			}
			if len(ms) == 1 {
				return errors.New("no")
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "b1")
		stop := start(t, db, pub, outbox.RelayConfig{Observer: outbox.RelayObserver{
			Publishing: func(topic string, ms []*message.Message) func(error) {
				for _, m := range ms {
					m.SetContext(context.WithValue(m.Context(), contextKey{}, topic))
				}
				if len(ms) == 1 {
					return nil
				}
				return func(err error) { log = append(log, fmt.Sprint("ended ", len(ms), " ", err)) }
			},
		}})
		synctest.Wait()
		enqueue(t, db, "c1")
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"publish a1 in t", "publish b1 in t", "ended 2 <nil>", "publish c1 in t"}, log[:4])
	})
}
