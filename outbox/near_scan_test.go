package outbox_test

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// slowScans is a store whose full scans take long, as with many waiting entries.
type slowScans struct {
	*memory.DB
	fullScan  time.Duration
	behind    time.Duration // duration of a scan behind the last claim
	mu        sync.Mutex
	fullScans []time.Time // times of the full scans
	nearScans int
}

func (l *slowScans) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	l.mu.Lock()
	var cost time.Duration
	switch {
	case q.Near:
		l.nearScans++
	case q.After > 0:
		cost = l.behind
	default:
		l.fullScans = append(l.fullScans, time.Now())
		cost = l.fullScan
	}
	l.mu.Unlock()
	time.Sleep(cost) // on the clock of a bubble
	return l.DB.ClaimEntries(ctx, q, t)
}

// added is a store to which an entry is added at the end of a full scan.
type added struct {
	*memory.DB
	add func()
}

func (a *added) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	found, err := a.DB.ClaimEntries(ctx, q, t)
	if add := a.add; add != nil && len(found) == 0 && !q.Near && q.After == 0 {
		a.add = nil
		add()
	}
	return found, err
}

// An entry that is added during the last scan before a pause ends the pause.
func TestRelayNoticesEntriesAddedDuringAScan(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		store := &added{DB: db}
		begin := time.Now()
		var at time.Duration
		store.add = func() {
			at = time.Since(begin)
			enqueue(t, db, "a1")
		}
		stop := start(t, store, pub, outbox.RelayConfig{Poll: time.Hour})
		time.Sleep(24 * time.Hour)
		require.NoError(t, stop())
		require.Equal(t, []string{"a1"}, pub.ids())
		require.InDelta(t, at.Seconds(), pub.log[0].at.Seconds(), 1e-6)
	})
}

// asked is a store to which an entry is added each second, as soon as its hint is requested. Its
// full scans take long.
type asked struct {
	slowScans
	add  func()
	last time.Time
}

func (a *asked) Enqueued() <-chan struct{} {
	if now := time.Now(); now.Sub(a.last) > time.Second {
		a.last = now
		a.add()
	}
	return a.DB.Enqueued()
}

// Entries that were added before the hint was requested are found before the relay sleeps.
func TestRelayScansAfterAskingForAHint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		n := 0
		store := &asked{slowScans: slowScans{DB: b.db, fullScan: 300 * time.Millisecond}, last: time.Now()}
		store.add = func() {
			n++
			b.add("t", fmt.Sprintf("new-%d", n))
		}
		stop := start(t, store, b, outbox.RelayConfig{Poll: time.Hour})
		for i := range 20 {
			time.Sleep(20 * time.Second)
			b.add("t", fmt.Sprintf("a-%d", i+1))
		}
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Positive(t, n)
		b.in("new", 301*time.Millisecond)
	})
}

// hinted is a store that keeps hinting at entries of other topics. It counts the scans.
type hinted struct {
	*memory.DB
	hints, scans int
}

func (h *hinted) Enqueued() <-chan struct{} {
	if h.hints--; h.hints < 0 {
		return nil
	}
	hint := make(chan struct{})
	time.AfterFunc(time.Millisecond, func() { close(hint) })
	return hint
}

func (h *hinted) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	h.scans++
	return h.DB.ClaimEntries(ctx, q, t)
}

// With the longest possible poll a relay only reacts to hints: it does not scan repeatedly.
func TestRelayThatNeverPolls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &hinted{DB: newDB(t), hints: 100}
		stop := start(t, db, newPublisher(nil), outbox.RelayConfig{Poll: math.MaxInt64})
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.InDelta(t, 300, db.scans, 150)
	})
}

// limits is a store that records the limit of the last claim.
type limits struct {
	*memory.DB
	last atomic.Int64
}

func (l *limits) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	l.last.Store(int64(t.Limit))
	return l.DB.ClaimEntries(ctx, q, t)
}

// If no message of a topic passed, claims scan deeper while the topic is tried, but not for ever.
func TestRelayForgetsItsScanDepth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(topic, _ string, _ time.Duration) bool { return topic == "away" })
		db := &limits{DB: b.db}
		stop := start(t, db, b, outbox.RelayConfig{})
		b.add("away", "a-1")
		time.Sleep(10 * time.Minute)
		require.EqualValues(t, 50<<5, db.last.Load())
		// Or another relay has published it.
		_, err := b.db.Skip(t.Context(), outbox.Filter{Topic: "away"})
		require.NoError(t, err)
		time.Sleep(10 * time.Minute)
		b.add("t", "b-1")
		time.Sleep(time.Second)
		require.EqualValues(t, 50, db.last.Load())
		require.NoError(t, stop())
	})
}

func (l *slowScans) count() (fullScan, nearScans int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.fullScans), l.nearScans
}

func ids(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("%c-%s-%d", 'a'+i%26, prefix, i))
	}
	return all
}

// Long scans are rare, and meanwhile a relay still finds new entries.
func TestRelayBacksOffFromLongScans(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		db := &slowScans{DB: b.db, fullScan: 300 * time.Millisecond}
		stop := start(t, db, b, outbox.RelayConfig{})
		b.add("t", "a-1")
		time.Sleep(10 * time.Second) // the relay has measured a full scan
		before, _ := db.count()
		for i := range 60 {
			b.add("t", fmt.Sprintf("new-%d", i+2))
			time.Sleep(time.Second)
		}
		after, _ := db.count()
		require.NoError(t, stop())
		require.InDelta(t, 60/3.3, after-before, 2)
		b.in("new", 301*time.Millisecond) // the running scan may be a long one
		prompt := 0
		for id, at := range b.sentAt {
			if at-b.added[id] < time.Millisecond {
				prompt++
			}
		}
		require.Greater(t, prompt, 50)
	})
}

// Even with a constant flow of new entries, the entries behind them are scanned.
func TestRelayScansBehindNewEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, at time.Duration) bool { return id == "late-1" && at < 2*time.Second })
		db := &slowScans{DB: b.db}
		b.add("t", "late-1", "late-2")
		b.add("t", ids("first", 1500)...)
		stop := start(t, db, unhurried{b, 2 * time.Millisecond}, outbox.RelayConfig{Batch: 100, Poll: time.Minute, Backoff: claim.Backoff{Base: time.Second, Max: time.Second}})
		for i := range 5000 { // as soon as entries are published, the next ones are there
			b.add("t", fmt.Sprintf("new%d-1", i))
			time.Sleep(time.Millisecond)
		}
		fullScan, nearScans := db.count()
		require.NoError(t, stop())
		require.Less(t, b.sentAt["late-2"], 3200*time.Millisecond)
		require.Less(t, fullScan, 3, "and %d near scans", nearScans)
		require.Greater(t, nearScans, 2000)
	})
}

// Each batch of a backlog with many keys is claimed while the previous batch is published. The
// relay must still scan the front for entries that are due for a retry.
func TestRelayScansTheFrontOfABacklog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, id string, at time.Duration) bool { return id == "late-1" && at < 900*time.Millisecond })
		b.add("t", "late-1", "late-2")
		for i := range 12_000 {
			b.add("t", fmt.Sprintf("new%d-1", i))
		}
		stop := start(t, b.db, unhurried{b, 20 * time.Millisecond}, outbox.RelayConfig{Batch: 100, Backoff: claim.Backoff{Base: time.Second, Max: time.Second}})
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		b.allOut(2)
		require.Less(t, b.sentAt["late-2"], 3200*time.Millisecond, "the first batch takes 2 s, because one message is refused, and its backoff 1 s")
		require.Greater(t, b.sentAt["new11999-1"], 4*time.Second, "there was a backlog during the whole test")
	})
}

// The entries of a relay that died are claimed one by one. With a backlog, that takes about half of
// the time.
func TestRelayGivesSuspectsTheirTurn(t *testing.T) {
	t.Parallel()
	calls := []time.Duration{10 * time.Millisecond, 60 * time.Millisecond, 200 * time.Millisecond}
	if longtest.On() {
		calls = append(calls, 2*time.Millisecond) // a backlog of 80,000 entries
	}
	for _, call := range calls {
		t.Run(call.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const n = 50
				lease := max(time.Second, 30*call) // so that others are far away
				b := newTraffic(t, func(string, string, time.Duration) bool { return false })
				b.add("t", run("dead", n, 1)...)
				_, err := b.db.ClaimEntries(t.Context(), provider.EntryQuery{}, claim.Terms{Lease: lease, Limit: n})
				require.NoError(t, err)
				backlog := 50 * int((lease+2*time.Second)/call+2*n)
				for i := range backlog {
					b.add("t", fmt.Sprintf("new%d-1", i))
				}
				stop := start(t, b.db, unhurried{b, call}, outbox.RelayConfig{Batch: 50})
				time.Sleep(lease + time.Duration(backlog/50+2*n)*call)
				require.NoError(t, stop())
				b.allOut(2)
				var last time.Duration
				for i := range n {
					last = max(last, b.sentAt[fmt.Sprintf("dead%d-1", i)])
				}
				calls := map[time.Duration]bool{}
				for id, at := range b.sentAt {
					if strings.HasPrefix(id, "new") && at > lease && at < last {
						calls[at] = true
					}
				}
				others := time.Duration(len(calls)) * call
				require.InDelta(t, n*call.Seconds(), others.Seconds(), 0.4*n*call.Seconds()+0.2, "the time that other entries had meanwhile: each full scan begins with a suspect, too")
				require.Less(t, last, lease+n*call+others+300*time.Millisecond)
			})
		})
	}
}

// Entries of other keys pass the many entries that wait for the claims of a relay that died.
func TestRelayPassesEntriesThatWaitForAnotherRelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		db := &slowScans{DB: b.db, fullScan: 500 * time.Millisecond, behind: 5 * time.Millisecond}
		b.add("t", run("dead", 10, 1)...)
		_, err := b.db.ClaimEntries(t.Context(), provider.EntryQuery{}, claim.Terms{Lease: time.Hour, Limit: 100})
		require.NoError(t, err)
		for n := range 200 { // every fourth entry waits
			b.add("t", fmt.Sprintf("dead%d-%d", n%10, 2+n/10))
			b.add("t", run(fmt.Sprint("new", n, "k"), 3, 1)...)
		}
		stop := start(t, db, b, outbox.RelayConfig{Batch: 50})
		time.Sleep(2 * time.Second)
		for n := range 1000 {
			if n%4 == 0 {
				b.add("t", fmt.Sprintf("dead%d-%d", n/4%10, 22+n/40))
			} else {
				b.add("t", fmt.Sprintf("tip%d-1", n))
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		require.NoError(t, stop())
		b.in("new", 500*time.Millisecond)
		b.in("tip", 100*time.Millisecond)
		require.Len(t, b.sent, 600+750)
	})
}

// unhurried is a publisher whose calls take a while.
type unhurried struct {
	*traffic
	each time.Duration
}

func (u unhurried) Publish(topic string, ms ...*message.Message) error {
	time.Sleep(u.each) // on the clock of a bubble
	return u.traffic.Publish(topic, ms...)
}

// A batch does not exceed the payload limit, even if it was claimed ahead. A larger message goes
// alone.
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
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
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
