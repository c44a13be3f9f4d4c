package postgres_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/stretchr/testify/require"
)

var fleetEntries = flag.Int("fleet.entries", longtest.Or(3000, 8000), "how many entries four relays publish while they are killed and paused")

const fleetLease = 300 * time.Millisecond

// TestFourRelaysKeepOrder runs relays in separate processes. It kills them, and pauses them for
// longer than their leases. Their publisher sometimes fails. Each key's first publications are in
// order, all entries are published, and a key that is always refused blocks only itself.
// Promise: G3.1, G3.3
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
			time.Sleep(10 * time.Millisecond) // in which the relays publish
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
		time.Sleep(20 * time.Millisecond) // in which the others go on
	}
	for _, l := range f.published() {
		require.NotEqual(t, "refused", l.key)
	}
	f.unset("refuse-refused")
	patience.Until(t, func() bool { return f.open() == 0 }, "the refused key")
	repeats := f.inOrder(next)
	suspects := count(t, f.db, `select count(*) from kinora.outbox where suspect`)
	t.Logf("%d entries, %d kills, %d pauses past the lease: %d claims crashed, %d publications were repeats", *fleetEntries, kills, pauses, suspects, repeats)
	require.Positive(t, suspects, "kills and pauses hit claims")
}

// TestAKilledRelaysWorkMovesWithinItsLease checks that another relay takes over when the lease of a killed one has ended,
// and not earlier, because a live relay renews. After a clean stop it takes over at once, here an hour before the end.
// Promise: G2.5, G9.2
func TestAKilledRelaysWorkMovesWithinItsLease(t *testing.T) {
	t.Parallel()
	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		lease := 3 * time.Second
		for !takesOver(t, syscall.SIGKILL, lease) { // a busy machine may not renew a short lease in time
			lease *= 2
			require.Less(t, lease, time.Minute, "the first relay has renewed its claim")
		}
	})
	t.Run("stopped", func(t *testing.T) {
		t.Parallel()
		require.True(t, takesOver(t, syscall.SIGTERM, time.Hour))
	})
}

// takesOver ends a relay, and returns when others have published the rest of its entries. It reports whether none of them
// did before the end of the lease of a killed one.
func takesOver(t *testing.T, by syscall.Signal, lease time.Duration) bool {
	t.Helper()
	f := newFleet(t)
	first := f.start("first", "LEASE="+lease.String(), "SLOW=250ms")
	next := map[string]int{}
	f.enqueue(next, []string{"k"}, 200) // one entry a call, because they have one key
	patience.Until(t, func() bool { return len(f.published()) > 0 }, "the first relay to publish")
	for i := range 3 {
		f.start(fmt.Sprintf("other%d", i), "LEASE="+lease.String())
	}
	var end time.Time // of the renewed lease
	if by == syscall.SIGKILL {
		patience.Until(t, func() bool {
			err := f.db.Pool().QueryRow(t.Context(), `select next_attempt_at from kinora.outbox
				where status = 'claimed' and claimed_by = 'first' and next_attempt_at > last_attempt_at + $1::interval limit 1`, lease).Scan(&end)
			return err == nil || f.open() == 0
		}, "the first relay to renew its lease")
		if end.IsZero() { // the others have published all entries
			return false
		}
	}
	require.NoError(t, first.Process.Signal(by))
	_ = first.Wait()
	at := time.Now()
	require.Zero(t, count(t, f.db, fmt.Sprintf(`select count(*) from kinora.outbox where status = 'claimed' and claimed_by = 'first'
		and next_attempt_at > clock_timestamp() + interval '%d ms'`, lease.Milliseconds())))
	patience.Until(t, func() bool { return f.open() == 0 }, "the others to publish the remaining entries")
	f.inOrder(next)
	took := slices.IndexFunc(f.published(), func(l line) bool { return l.by != "first" })
	require.Positive(t, took)
	moved := f.published()[took].at
	t.Logf("another relay took over %s after the signal %s, with a lease of %s", moved.Sub(at).Round(time.Millisecond), by, lease)
	return !moved.Before(end)
}

// TestAMessageThatKillsItsRelay checks that the message is abandoned after exactly its attempts,
// the other 49 of its batch are published, and its key waits. After a requeue its attempts count
// from zero, and the key continues in order.
// Promise: G3.4
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
		for limit := time.Now().Add(patience.Limit()); !until(); {
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
