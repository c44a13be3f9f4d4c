package outbox_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

func TestRelayWithoutOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id == "a-x" })
		b.add("t", "a-x", "a-2", "b-1", "a-3")
		stop := start(t, b.db, b, outbox.RelayConfig{Unordered: true})
		synctest.Wait()
		require.ElementsMatch(t, []string{"a-2", "b-1", "a-3"}, b.sent, "entries of a key do not wait for its failure")
		for n := range 100 {
			b.add("t", fmt.Sprintf("a-%d", 100+n))
			time.Sleep(5 * time.Minute)
		}
		require.NoError(t, stop())
		b.in("a-1", time.Second)
		require.Len(t, b.sent, 103)
		for id, e := range entries(t, b.db) {
			if id == "a-x" {
				require.Equal(t, outbox.Abandoned, e.Status)
			} else {
				require.Equal(t, outbox.Published, e.Status, "%s: nothing is held", id)
			}
		}
	})
}

// An unordered relay publishes its whole claim in one call, whatever the keys, and holds no entry.
func TestRelayWithoutOrderTakesOneCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "a2", "b1")
		taken, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Limit: 1})
		require.NoError(t, err)
		late, err := db.MarkEntries(t.Context(), []outbox.Mark{{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Abandoned}})
		require.NoError(t, err)
		require.Empty(t, late)
		stop := start(t, db, pub, outbox.RelayConfig{Unordered: true, Topics: []string{"other"}})
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, outbox.Pending, entries(t, db)["a2"].Status)
		enqueue(t, db, "b2", "a3")
		stop = start(t, db, pub, outbox.RelayConfig{Unordered: true})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a2", "b1", "b2", "a3"}, pub.ids())
		require.Equal(t, 1, pub.calls)
	})
}

func TestRelayWithoutRetentionKeepsNoPublishedEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id == "a-1" })
		b.add("t", "a-1", "a-2", "b-1", "c-1", "b-2")
		stop := start(t, b.db, b, outbox.RelayConfig{Keep: outbox.EntryRetention{Published: none}})
		synctest.Wait()
		require.NoError(t, stop())
		left := entries(t, b.db)
		require.Len(t, left, 2)
		require.Equal(t, outbox.Failed, left["a-1"].Status)
		require.Equal(t, outbox.Held, left["a-2"].Status)
	})
}

// About once a minute, relays delete resolved entries after their retention, and never unresolved
// ones.
func TestRelayDeletesResolvedEntriesAfterTheirRetention(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id[:1] == "p" })
		b.add("t", "p-1", "p-2", "q-1", "a-1", "b-1")
		stop := start(t, b.db, b, outbox.RelayConfig{
			Backoff: claim.Backoff{Attempts: 1}, Keep: outbox.EntryRetention{Published: time.Hour, Skipped: 3 * time.Hour}, Poll: time.Minute,
		})
		synctest.Wait()
		n, err := b.db.Skip(t.Context(), outbox.Filter{Key: "b"})
		require.NoError(t, err)
		require.Zero(t, n, "the entry is published")
		b.add("t", "p-3")
		n, err = b.db.Skip(t.Context(), outbox.Filter{Key: "p", After: entries(t, b.db)["p-2"].Seq})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		for _, c := range []struct {
			at   time.Duration
			left int
		}{{59 * time.Minute, 6}, {62 * time.Minute, 3}, {179 * time.Minute, 3}, {182 * time.Minute, 2}, {24 * time.Hour, 2}} {
			time.Sleep(c.at - time.Since(b.start))
			require.Len(t, entries(t, b.db), c.left, c.at)
		}
		require.NoError(t, stop())
		left := entries(t, b.db)
		require.Equal(t, outbox.Abandoned, left["p-1"].Status)
		require.Equal(t, outbox.Held, left["p-2"].Status)
	})
}

// Entries behind an abandoned one are held at once; entries added later are held soon.
func TestRelayHoldsSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id == "a-1" })
		b.add("t", "a-1", "a-2", "b-1")
		stop := start(t, b.db, b, outbox.RelayConfig{Backoff: claim.Backoff{Attempts: 1}})
		synctest.Wait()
		require.Equal(t, outbox.Held, entries(t, b.db)["a-2"].Status)
		b.add("t", "a-3")
		time.Sleep(6 * time.Second)
		require.Equal(t, outbox.Held, entries(t, b.db)["a-3"].Status)
		b.refuse = func(string, string, time.Duration) bool { return false }
		_, err := b.db.Requeue(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		b.allOut(1)
	})
}
