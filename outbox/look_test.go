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
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// looked is a store whose looks everywhere take long, as over much that waits for others.
type looked struct {
	*memory.DB
	everywhere time.Duration
	behind     time.Duration // what was claimed last
	mu         sync.Mutex
	looks      []time.Time // everywhere
	nearby     int
}

func (l *looked) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	l.mu.Lock()
	var cost time.Duration
	switch {
	case q.Near:
		l.nearby++
	case q.After > 0:
		cost = l.behind
	default:
		l.looks = append(l.looks, time.Now())
		cost = l.everywhere
	}
	l.mu.Unlock()
	time.Sleep(cost)
	return l.DB.ClaimEntries(ctx, q, t)
}

// added is a store to which an entry is added while a relay looks everywhere, after the look.
type added struct {
	*memory.DB
	add func()
}

func (a *added) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	found, err := a.DB.ClaimEntries(ctx, q, t)
	if add := a.add; add != nil && len(found) == 0 && !q.Near && q.After == 0 {
		a.add = nil
		add()
	}
	return found, err
}

// What is added during the last look before a pause ends the pause.
func TestRelayHearsWhatIsAddedWhileItLooks(t *testing.T) {
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

// asked is a store to which an entry is added each second, as soon as its hint is asked for, and whose looks everywhere take long.
type asked struct {
	looked
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

// What was added before a hint was asked for is looked at before the relay sleeps.
func TestRelayLooksOnceItHasAskedForAHint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		n := 0
		store := &asked{looked: looked{DB: b.db, everywhere: 300 * time.Millisecond}, last: time.Now()}
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

// hinted is a store that hints again and again at what this relay does not want, and counts its looks.
type hinted struct {
	*memory.DB
	hints, looks int
}

func (h *hinted) Enqueued() <-chan struct{} {
	if h.hints--; h.hints < 0 {
		return nil
	}
	hint := make(chan struct{})
	time.AfterFunc(time.Millisecond, func() { close(hint) })
	return hint
}

func (h *hinted) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	h.looks++
	return h.DB.ClaimEntries(ctx, q, t)
}

// A poll as long as a Duration can be is a relay that only listens: it does not look again and again.
func TestRelayThatNeverPolls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &hinted{DB: newDB(t), hints: 100}
		stop := start(t, db, newPublisher(nil), outbox.RelayConfig{Poll: math.MaxInt64})
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.InDelta(t, 300, db.looks, 150)
	})
}

// limits is a store that tells how much is claimed at once.
type limits struct {
	*memory.DB
	last atomic.Int64
}

func (l *limits) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	l.last.Store(int64(t.Limit))
	return l.DB.ClaimEntries(ctx, q, t)
}

// A topic of which nothing passed has claims look deeper while it is tried, and not for ever.
func TestRelayForgetsHowDeepItHadToLook(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(topic, _ string, _ time.Duration) bool { return topic == "away" })
		db := &limits{DB: b.db}
		stop := start(t, db, b, outbox.RelayConfig{})
		b.add("away", "a-1")
		time.Sleep(10 * time.Minute)
		require.EqualValues(t, 50<<5, db.last.Load())
		_, err := b.db.Skip(t.Context(), outbox.Filter{Topic: "away"}) // or another relay has published it
		require.NoError(t, err)
		time.Sleep(10 * time.Minute)
		b.add("t", "b-1")
		time.Sleep(time.Second)
		require.EqualValues(t, 50, db.last.Load())
		require.NoError(t, stop())
	})
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
		stop := start(t, db, unhurried{b, 2 * time.Millisecond}, outbox.RelayConfig{Batch: 100, Poll: time.Minute, Backoff: claim.Backoff{Base: time.Second, Max: time.Second}})
		for i := range 5000 { // some are there whenever those before them are published
			b.add("t", fmt.Sprintf("new%d-1", i))
			time.Sleep(time.Millisecond)
		}
		everywhere, nearby := db.count()
		require.NoError(t, stop())
		require.Less(t, b.sentAt["late-2"], 3200*time.Millisecond)
		require.Less(t, everywhere, 3, "and %d nearby", nearby)
		require.Greater(t, nearby, 2000)
	})
}

// A backlog of many keys, of which each batch is claimed while the one before it is published, is no reason to forget
// what has to be tried again.
func TestRelayLooksAtTheFrontOfABacklog(t *testing.T) {
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
		require.Less(t, b.sentAt["late-2"], 3200*time.Millisecond, "the first batch takes 2 s, as one of it is refused; the backoff another")
		require.Greater(t, b.sentAt["new11999-1"], 4*time.Second, "it was a backlog all the while")
	})
}

// A relay claims the entries of a dead relay one by one. Next to a backlog they take about half of the time.
func TestARelaySharesItsTimeBetweenSuspectsAndABacklog(t *testing.T) {
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
				lease := max(time.Second, 30*call) // then others are far away
				b := newTraffic(t, func(string, string, time.Duration) bool { return false })
				b.add("t", run("dead", n, 1)...)
				_, err := b.db.ClaimEntries(t.Context(), outbox.Query{}, claim.Terms{Lease: lease, Limit: n})
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
				require.InDelta(t, n*call.Seconds(), others.Seconds(), 0.4*n*call.Seconds()+0.2, "what others had meanwhile: each look everywhere begins with a suspect, too")
				require.Less(t, last, lease+n*call+others+300*time.Millisecond)
			})
		})
	}
}

// Much that waits behind the claims of a relay that died is passed by what does not.
func TestRelayPassesWhatWaitsForAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return false })
		db := &looked{DB: b.db, everywhere: 500 * time.Millisecond, behind: 5 * time.Millisecond}
		b.add("t", run("dead", 10, 1)...)
		_, err := b.db.ClaimEntries(t.Context(), outbox.Query{}, claim.Terms{Lease: time.Hour, Limit: 100})
		require.NoError(t, err)
		for n := range 200 { // every fourth one waits
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

// unhurried takes its time for each call.
type unhurried struct {
	*traffic
	each time.Duration
}

func (u unhurried) Publish(topic string, ms ...*message.Message) error {
	time.Sleep(u.each)
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
