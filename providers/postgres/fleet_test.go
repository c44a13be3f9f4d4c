package postgres_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/stretchr/testify/require"
)

var fleetEntries = flag.Int("fleet.entries", 8000, "how many entries four relays publish while they are killed and paused")

const fleetLease = 300 * time.Millisecond

// TestFourRelaysKeepOrder runs relays in separate processes. It kills them, and pauses them for
// longer than their leases. Their publisher sometimes fails. Each key's first publications are in
// order, all entries are published, and a key that is always refused blocks only itself.
func TestFourRelaysKeepOrder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.set("refuse-refused")
	keys := []string{"refused"}
	for k := range 199 {
		keys = append(keys, fmt.Sprintf("k%d", k))
	}
	env := func(i int) []string {
		env := []string{"LEASE=" + fleetLease.String(), "FAILED=0.02", "SLOW=1ms"}
		if i%2 == 1 {
			env = append(env, "ORDERED=1")
		}
		return env
	}
	relays := make([]*exec.Cmd, 4)
	for i := range relays {
		relays[i] = f.start(fmt.Sprintf("r%d", i), env(i)...)
	}
	next := map[string]int{}
	kills, pauses := 0, 0
	for enqueued := 0; ; {
		if enqueued < *fleetEntries {
			f.enqueue(next, keys, 200)
			enqueued += 200
		} else if f.open() <= next["refused"] {
			break
		}
		i := rand.IntN(len(relays))
		// limits the kills, so that the relays make progress
		if kills+pauses > enqueued/100 {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if rand.IntN(2) == 0 {
			require.NoError(t, relays[i].Process.Kill())
			_ = relays[i].Wait()
			relays[i] = f.start(fmt.Sprintf("r%d", i), env(i)...)
			kills++
			continue
		}
		require.NoError(t, relays[i].Process.Signal(syscall.SIGSTOP))
		pauses++
		paused := relays[i].Process
		time.AfterFunc(fleetLease+time.Duration(rand.Int64N(int64(fleetLease))), func() { _ = paused.Signal(syscall.SIGCONT) })
		time.Sleep(20 * time.Millisecond)
	}
	for _, l := range f.published() {
		require.NotEqual(t, "refused", l.key)
	}
	f.unset("refuse-refused")
	f.await("the refused key is published", time.Minute, func() bool { return f.open() == 0 })
	repeats := f.inOrder(next)
	suspects := count(t, f.db, `select count(*) from kinora.outbox where suspect`)
	t.Logf("%d entries, %d kills, %d pauses past the lease: %d claims crashed, %d publications were repeats", *fleetEntries, kills, pauses, suspects, repeats)
	require.Positive(t, suspects, "kills and pauses hit claims")
}

// TestAKilledRelaysWorkMovesWithinItsLease checks that another relay takes over within the lease
// and not earlier, because a live relay renews. After a clean stop it takes over at once.
func TestAKilledRelaysWorkMovesWithinItsLease(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		lease  time.Duration
		within time.Duration // latest time of the takeover
	}{
		{"killed", syscall.SIGKILL, 2 * time.Second, 2*time.Second + 500*time.Millisecond},
		{"stopped", syscall.SIGTERM, time.Minute, 2 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			first := f.start("first", "LEASE="+c.lease.String(), "SLOW=250ms")
			next := map[string]int{}
			f.enqueue(next, []string{"k"}, 50) // one entry a call, because they have one key
			f.await("the first relay has published", time.Minute, func() bool { return len(f.published()) > 0 })
			for i := range 3 {
				f.start(fmt.Sprintf("other%d", i), "LEASE="+c.lease.String())
			}
			if c.signal == syscall.SIGKILL {
				begin := time.Now()
				f.await("the first relay works for longer than its lease", time.Minute, func() bool { return time.Since(begin) > c.lease*5/4 })
			}
			for _, l := range f.published() {
				require.Equal(t, "first", l.by, "the first relay renews its claim, so no other has these entries")
			}
			require.NoError(t, first.Process.Signal(c.signal))
			at := time.Now()
			f.await("the others publish the remaining entries", time.Minute, func() bool { return f.open() == 0 })
			f.inOrder(next)
			for _, l := range f.published() {
				if l.by != "first" {
					moved := l.at.Sub(at)
					t.Logf("another relay took over %s after the first was %s, with a lease of %s", moved.Round(time.Millisecond), c.name, c.lease)
					require.Less(t, moved, c.within)
					break
				}
			}
		})
	}
}

// TestAMessageThatKillsItsRelay checks that the message is abandoned after exactly its attempts,
// the other 49 of its batch are published, and its key waits. After a requeue its attempts count
// from zero, and the key continues in order.
func TestAMessageThatKillsItsRelay(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	next := map[string]int{}
	var keys []string
	for k := range 25 {
		keys = append(keys, fmt.Sprintf("k%d", k))
	}
	f.enqueue(next, keys, 50)
	all, err := f.db.Entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	deadly := all[20]
	f.set("deadly-" + deadly.ID)
	const attempts = 4
	run := func(until func() bool) (deaths int) {
		for limit := time.Now().Add(time.Minute); !until(); {
			require.True(t, time.Now().Before(limit))
			relay := f.start("r", "LEASE=200ms", fmt.Sprintf("ATTEMPTS=%d", attempts), "ORDERED=1")
			ended := make(chan error, 1)
			go func() { ended <- relay.Wait() }()
			for alive := true; alive && !until(); {
				select {
				case <-ended:
					deaths++
					alive = false
				case <-time.After(5 * time.Millisecond):
				}
			}
			_ = relay.Process.Signal(syscall.SIGTERM)
		}
		return deaths
	}
	status := func() outbox.Entry {
		one, err := f.db.Entries(t.Context(), outbox.Filter{Seqs: []int64{deadly.Seq}})
		require.NoError(t, err)
		return one[0]
	}
	behind := 0
	for _, e := range all[21:] {
		if e.Key == deadly.Key {
			behind++
		}
	}
	deaths := run(func() bool { return status().Status == outbox.Abandoned && f.open() == 1+behind })
	require.Equal(t, attempts, deaths)
	e := status()
	require.Equal(t, []any{attempts, "crashed", true}, []any{e.Attempts, e.LastError, e.Suspect})
	counts, err := f.db.StatusCounts(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 49-behind, counts[outbox.Published])
	require.EqualValues(t, 1, counts[outbox.Abandoned], "no other entry was abandoned")

	_, err = f.db.Requeue(t.Context(), outbox.Filter{Key: deadly.Key})
	require.NoError(t, err)
	require.Zero(t, status().Attempts, "the attempts are reset")
	require.Positive(t, run(func() bool { return status().Attempts >= 2 }))
	require.NotEqual(t, outbox.Abandoned, status().Status)
	f.unset("deadly-" + deadly.ID)
	run(func() bool { return f.open() == 0 })
	f.inOrder(next)
}
