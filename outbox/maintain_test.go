package outbox_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// sweeping is the store of one relay, with old entries for some calls of DeleteEntries. Each call
// takes a second, and is counted by its minute and relay.
type sweeping struct {
	*memory.DB
	relay string
	start time.Time
	old   int64
	dies  int64 // at this call the process dies; 0: it does not
	calls *calls
}

type calls struct {
	mu    sync.Mutex
	count map[string]int
}

func (c *calls) add(relay string, at time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[fmt.Sprintf("minute %d, relay %s", int(at.Minutes()), relay)]++
}

func (c *calls) are(t *testing.T, want map[string]int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Equal(t, want, c.count)
}

func (s *sweeping) DeleteEntries(ctx context.Context, _ outbox.EntryRetention, after int64) (int, int64, error) {
	s.calls.add(s.relay, time.Since(s.start))
	if after+1 == s.dies {
		<-ctx.Done()
		return 0, 0, ctx.Err()
	}
	time.Sleep(time.Second) // on the clock of a bubble
	return 1, (after + 1) % s.old, nil
}

func (s *sweeping) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	if s.dies > 0 {
		return nil
	}
	return s.DB.ReleaseLease(ctx, name, token)
}

// Each relay looks for old entries, and one of them deletes the rest. After the relay has died,
// another takes over.
// Promise: G6.16
func TestOneRelayDeletesOldEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, calls, began := newDB(t), &calls{count: map[string]int{}}, time.Now()
		for _, relay := range []string{"a", "b", "c"} {
			s := &sweeping{DB: db, relay: relay, start: began, old: 20, calls: calls}
			if relay == "a" {
				s.dies = 8
			}
			stop := start(t, s, newPublisher(nil), outbox.RelayConfig{})
			defer func() { require.NoError(t, stop()) }()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2*time.Minute + 21*time.Second - time.Since(began))
		free, err := db.AcquireLease(t.Context(), "prune-entries", claim.Terms{Token: claim.NewToken(), Lease: time.Second})
		require.NoError(t, err)
		require.True(t, free, "the relay has released its lease")
		time.Sleep(3*time.Minute - time.Since(began) - time.Second)
		calls.are(t, map[string]int{
			"minute 1, relay a": 8, "minute 1, relay b": 1, "minute 1, relay c": 1,
			"minute 2, relay b": 20, "minute 2, relay c": 1,
		})
	})
}

// plain has no capability except provider.EntryMaintainer.
type plain struct {
	provider.Outbox
	provider.EntryMaintainer
}

// A store without leases works: each relay deletes all old entries.
// Promise: G6.16
func TestRelaysOfAStoreWithoutLeasesDeleteOldEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, calls, began := newDB(t), &calls{count: map[string]int{}}, time.Now()
		for _, relay := range []string{"a", "b"} {
			s := &sweeping{DB: db, relay: relay, start: began, old: 20, calls: calls}
			stop := start(t, plain{db, s}, newPublisher(nil), outbox.RelayConfig{})
			defer func() { require.NoError(t, stop()) }()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2*time.Minute - time.Since(began) - time.Second)
		calls.are(t, map[string]int{"minute 1, relay a": 20, "minute 1, relay b": 20})
	})
}
