package outbox_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/stretchr/testify/require"
)

// down is much longer than pauses grow: they are a minute long after the first two minutes.
var down = longtest.Or(3*time.Hour, 10*time.Hour)

const catchUp = 2*time.Minute + 10*time.Second

// A broker that is down for hours costs at most one attempt per message and abandons none. Once
// the broker is back, all messages are published in order within about two minutes.
// Promise: G3.7
func TestOutageAbandonsNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, meanwhile []string
		// Interval between further messages while the broker is down.
		every time.Duration
		cfg   outbox.RelayConfig
	}{
		"a key":                          {meanwhile: run("a", 1, 5)},
		"a key that worked":              {before: []string{"a0-0"}, meanwhile: run("a", 1, 5)},
		"a message of a key that worked": {before: run("b", 1, 1), meanwhile: run("a", 1, 1)},
		"two keys that worked":           {before: run("b", 1, 1), meanwhile: run("a", 2, 2)},
		"keys":                           {meanwhile: run("a", 15, 3)},
		"keys that worked":               {before: run("b", 8, 2), meanwhile: run("a", 15, 3)},
		"an ordered publisher":           {before: run("b", 8, 2), meanwhile: run("a", 15, 3), cfg: outbox.RelayConfig{OrderedPublisher: true}},
		"no order":                       {before: run("b", 3, 2), meanwhile: run("a", 3, 1), cfg: outbox.RelayConfig{Unordered: true}},
		"a backlog":                      {before: run("b", 1, 1), meanwhile: run("a", 70, 2)},
		"a trickle":                      {before: run("b", 1, 1), every: 3 * time.Minute},
		"a thin trickle":                 {before: run("b", 1, 1), every: 47 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newTraffic(t, func(_, _ string, at time.Duration) bool { return at >= time.Minute && at < time.Minute+down })
				b.add("t", c.before...)
				c.cfg.Poll = 5 * time.Second
				stop := start(t, b.db, b, c.cfg)
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Len(t, b.sent, len(c.before))
				b.add("t", c.meanwhile...)
				for n := 1; c.every > 0 && time.Since(b.start)+c.every < down; n++ {
					time.Sleep(c.every)
					b.add("t", fmt.Sprintf("%c-%d", 'c'+n%7, n))
				}
				time.Sleep(time.Minute + down + catchUp - time.Since(b.start))
				require.NoError(t, stop())
				b.allOut(2)
			})
		})
	}
}

// Each of many relays detects the outage itself, which costs at most one attempt each.
func TestOutageCostsEachRelayOneAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, _ string, at time.Duration) bool { return at >= time.Minute && at < time.Minute+down })
		var stops []func() error
		for range 3 {
			stops = append(stops, start(t, b.db, b, outbox.RelayConfig{Poll: 5 * time.Second}))
		}
		b.add("t", run("b", 20, 1)...)
		time.Sleep(time.Minute)
		b.add("t", run("a", 15, 2)...)
		time.Sleep(down + catchUp)
		for _, stop := range stops {
			require.NoError(t, stop())
		}
		b.allOut(1 + len(stops))
	})
}

// An outage in the middle of a batch counts for the rest of the batch. Only a few messages count an
// attempt.
// Promise: G3.7
func TestOutageInTheMiddleOfABatch(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string]int{"a key": 1, "keys": 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var b *traffic
				b = newTraffic(t, func(_, _ string, at time.Duration) bool { return at < down && len(b.sent) >= keys })
				b.add("t", run("a", keys, 4)...)
				stop := start(t, b.db, b, outbox.RelayConfig{Batch: 4 * keys, Poll: 5 * time.Second})
				synctest.Wait()
				counted := 0
				for _, e := range entries(t, b.db) {
					if e.Status == outbox.Failed {
						counted++
					}
				}
				require.LessOrEqual(t, counted, 10)
				time.Sleep(down + catchUp)
				require.NoError(t, stop())
				b.allOut(2)
			})
		})
	}
}

// A broker that goes down repeatedly abandons no message.
// Promise: G3.7
func TestFlappingOutageAbandonsNothing(t *testing.T) {
	t.Parallel()
	for _, half := range []time.Duration{30 * time.Second, 3 * time.Minute, 11 * time.Minute} {
		for _, every := range []time.Duration{5 * time.Second, 19 * time.Second, 7 * time.Minute} {
			t.Run(fmt.Sprint(half, " ", every), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					b := newTraffic(t, func(_, _ string, at time.Duration) bool { return at < 10*half*2 && (at/half)%2 == 1 })
					stop := start(t, b.db, b, outbox.RelayConfig{})
					for n := 1; time.Since(b.start) < 10*half*2; n++ {
						b.add("t", fmt.Sprintf("%c-%d", 'a'+n%5, n))
						time.Sleep(every)
					}
					// Messages that counted an attempt or two wait for their backoff.
					time.Sleep(20 * time.Minute)
					require.NoError(t, stop())
					b.allOut(5)
				})
			})
		}
	}
}

// A relay forgets a long outage when it is over: a short outage afterwards delays messages only
// briefly.
func TestShortOutageAfterALongOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(_, _ string, at time.Duration) bool {
			return at < time.Hour || at > 2*time.Hour && at < 2*time.Hour+3*time.Second
		})
		b.add("t", run("a", 20, 1)...)
		stop := start(t, b.db, b, outbox.RelayConfig{})
		time.Sleep(2*time.Hour + time.Second)
		b.add("t", run("b", 13, 1)...)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		b.in("b", 35*time.Second) // messages that counted an attempt wait for their backoff
		b.allOut(2)
	})
}

// A topic that is down delays no other topic.
// Promise: G3.7
func TestOutageOfOneTopicDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(topic, _ string, at time.Duration) bool { return topic == "down" && at < down })
		b.add("down", run("a", 15, 2)...)
		stop := start(t, b.db, b, outbox.RelayConfig{Poll: 5 * time.Second})
		for n := 1; time.Since(b.start) < down; n++ {
			b.add("up", fmt.Sprintf("u-%d", n))
			b.add("down", fmt.Sprintf("d-%d", n))
			time.Sleep(5 * time.Minute)
		}
		time.Sleep(catchUp)
		require.NoError(t, stop())
		b.in("u", 50*time.Millisecond)
		b.allOut(2)
	})
}

// While a topic is paused, a stop is immediate, and the entries' LastError says why they wait.
// Promise: G9.2
func TestRelayStopsAtOnceWhileATopicIsPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newTraffic(t, func(string, string, time.Duration) bool { return true })
		b.add("t", run("a", 20, 1)...)
		stop := start(t, b.db, b, outbox.RelayConfig{})
		time.Sleep(10 * time.Minute)
		for id, e := range entries(t, b.db) {
			require.Equal(t, outbox.Pending, e.Status, id)
			require.Zero(t, e.Attempts, id)
			tried := slices.Contains([]string{"a0-1", "a1-1", "a2-1"}, id)
			require.True(t, e.LastError == "*errors.errorString" || !tried && e.LastError == "", "%s %q", id, e.LastError)
		}
		begin := time.Now()
		require.NoError(t, stop())
		require.Zero(t, time.Since(begin))
	})
}
