package outbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Poison among good traffic, even sparse traffic, is abandoned after exactly its attempts, and only
// its key waits.
// Promise: G3.3
func TestPoisonAmongGoodTrafficIsAbandoned(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{3 * time.Second, 17 * time.Second, 3 * time.Minute} {
		t.Run(every.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id == "p-1" })
				stop := start(t, b.db, b, outbox.RelayConfig{})
				b.add("t", "g-0", "p-1", "p-2")
				n := 1
				for ; time.Since(b.start) < 2*time.Hour; n++ {
					b.add("t", fmt.Sprintf("g%d-%d", n%9, n))
					time.Sleep(every)
				}
				require.NoError(t, stop())
				p := entries(t, b.db)["p-1"]
				require.Equal(t, outbox.Abandoned, p.Status)
				require.Equal(t, 8, p.Attempts)
				require.Len(t, b.sent, n)
				b.in("g", time.Second)
			})
		})
	}
}

// Poison at the front of a topic does not delay other entries for long, even if the relay has just
// started and no message has been published yet.
// Promise: G3.3
func TestPoisonAtTheFrontDelaysOthersOnlyBriefly(t *testing.T) {
	t.Parallel()
	for _, cfg := range []outbox.RelayConfig{{}, {OrderedPublisher: true}, {Unordered: true}} {
		for _, keys := range []int{1, 3, 6, 12, 40} {
			t.Run(fmt.Sprintf("%d keys, ordered publisher %t, no order %t", keys, cfg.OrderedPublisher, cfg.Unordered), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					b := newTraffic(t, func(_, id string, _ time.Duration) bool { return strings.HasPrefix(id, "p") })
					b.add("t", run("p", keys, 1)...)
					b.add("t", run("g", 20, 2)...)
					stop := start(t, b.db, b, cfg)
					time.Sleep(time.Hour)
					b.in("g", map[bool]time.Duration{true: time.Minute, false: 10 * time.Minute}[keys < 20])
					more := 0
					for ; more < 30; more++ {
						b.add("t", fmt.Sprintf("h%d-1", more))
						time.Sleep(10 * time.Minute)
					}
					require.NoError(t, stop())
					b.in("h", 65*time.Second) // at most a pause
					for id, e := range entries(t, b.db) {
						// With more poison it takes longer.
						if strings.HasPrefix(id, "p") && keys < 20 {
							require.Equal(t, outbox.Abandoned, e.Status, id)
							require.Equal(t, 8, e.Attempts, id)
						}
					}
				})
			})
		}
	}
}

// Poison alone cannot be distinguished from an outage: no attempt counts, and the topic does not
// wait for it. Once other messages pass, it is abandoned.
func TestPoisonAloneIsNotCounted(t *testing.T) {
	t.Parallel()
	for _, alone := range []time.Duration{time.Hour, time.Hour + 30*time.Second, time.Hour + time.Minute, time.Hour + 90*time.Second} {
		synctest.Test(t, func(t *testing.T) {
			b := newTraffic(t, func(_, id string, _ time.Duration) bool { return id == "p-1" })
			b.add("t", "p-1")
			stop := start(t, b.db, b, outbox.RelayConfig{})
			time.Sleep(alone)
			synctest.Wait()
			require.Zero(t, entries(t, b.db)["p-1"].Attempts)
			b.add("t", "g-1")
			time.Sleep(2 * time.Hour)
			require.NoError(t, stop())
			b.in("g", 50*time.Millisecond)
			p := entries(t, b.db)["p-1"]
			require.Equal(t, outbox.Abandoned, p.Status)
			require.Equal(t, 8, p.Attempts)
		})
	}
}

// An entry that ends each relay that claims it is abandoned by the claim after its last attempt, and not published once more.
// Promise: G3.4
func TestAnEntryThatEndsItsRelaysIsAbandonedAtTheLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "b1")
		for range 3 { // relays that were killed
			got, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{Attempts: 3}, claim.Terms{Lease: time.Minute, Limit: 1})
			require.NoError(t, err)
			require.Equal(t, "a1", got[0].ID)
			time.Sleep(2 * time.Minute)
		}
		stop := start(t, db, pub, outbox.RelayConfig{Backoff: claim.Backoff{Attempts: 3}})
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"b1"}, pub.ids())
		a := entries(t, db)["a1"]
		require.Equal(t, []any{outbox.Abandoned, 3}, []any{a.Status, a.Attempts})
	})
}

// foreign is a store that reports the entry b1 as written by other software.
type foreign struct{ provider.Outbox }

func (f foreign) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	taken, err := f.Outbox.ClaimEntries(ctx, q, t)
	for i := range taken {
		taken[i].Malformed = taken[i].ID == "b1"
	}
	return taken, err
}

func TestRelayAbandonsMalformedEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "b1", "b2", "a2")
		stop := start(t, foreign{db}, pub, outbox.RelayConfig{})
		synctest.Wait()
		require.Equal(t, []string{"a1", "a2"}, pub.ids())
		all := entries(t, db)
		require.Equal(t, []any{outbox.Abandoned, provider.LastErrorMalformed}, []any{all["b1"].Status, all["b1"].LastError})
		require.Zero(t, all["b2"].Attempts)
		n, err := db.Skip(t.Context(), outbox.Filter{Seqs: []int64{all["b1"].Seq}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a1", "a2", "b2"}, pub.ids())
	})
}
