package main

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// proving returns a run without a server.
func proving(t *testing.T, c *cell, short bool) *run {
	t.Helper()
	s := &suite{ctx: context.Background(), short: short, dir: t.TempDir()}
	r, err := newRun(s, c)
	require.NoError(t, err)
	t.Cleanup(r.end)
	require.Equal(t, filepath.Join(s.dir, c.name), r.dir)
	return r
}

func TestACellGoesOnUntilNothingIsMissing(t *testing.T) {
	t.Parallel()
	r := proving(t, &cell{name: "x", short: time.Second, requires: []string{"kill", "read"}}, true)
	calls := 0
	r.gauge("read", func() int { return calls })
	r.prove(func() {
		require.Equal(t, time.Second, r.span)
		if calls++; calls == 4 {
			r.inject("kill", 1)
		}
	})
	require.Equal(t, 4, calls)
	r.requireKinds()
	require.Empty(t, r.failures)
}

// A cell without luck does ten times its work, and at least as much as the patience allows: a slow machine does little in
// the planned time.
func TestACellWithoutLuckFails(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]int{2 * time.Minute: 10, 20 * time.Second: 30} {
		synctest.Test(t, func(t *testing.T) {
			r := proving(t, &cell{name: "x", short: time.Second, requires: []string{"kill"}, redelivers: true, byFault: true}, true)
			r.control = func() (wrong, byFault int) { return 3, 0 }
			calls := 0
			r.prove(func() { calls++; time.Sleep(took) })
			require.Equal(t, want, calls)
			r.requireKinds()
			require.Equal(t, []string{
				fmt.Sprintf("no kill in %d.0 times the planned work: the cell proves nothing", want),
				fmt.Sprintf("no control that is wrong without the broker's copies in %d.0 times the planned work: the cell proves nothing", want),
			}, r.failures)
		})
	}
}

func TestALongCellDoesSharesOfItsWorkAgain(t *testing.T) {
	t.Parallel()
	r := proving(t, &cell{name: "x", full: 5 * time.Minute, short: 3 * time.Second, requiresLong: []string{"kill"}}, false)
	var spans []time.Duration
	r.prove(func() {
		if spans = append(spans, r.span); len(spans) == 3 {
			r.inject("kill", 1)
		}
	})
	require.Equal(t, []time.Duration{5 * time.Minute, 30 * time.Second, 30 * time.Second}, spans)
	require.Equal(t, 20_000, r.part(200_000))
}

func TestACellThatHasFailedDoesNotGoOn(t *testing.T) {
	t.Parallel()
	r := proving(t, &cell{name: "x", short: time.Second, requires: []string{"kill"}}, true)
	calls := 0
	r.prove(func() { calls++; r.fail("lost 1") })
	require.Equal(t, 1, calls)
}

// A time that depends on the machine fails only a cell that has it for itself.
func TestOnlyACellAloneLimitsTimes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ short, alone bool }{{true, true}, {false, false}, {false, true}} {
		r := proving(t, &cell{name: "x", short: time.Second, full: time.Minute, alone: c.alone}, c.short)
		r.within("drained_ms", "drained", 3*time.Second, 2*time.Second)
		r.atMost("tries", 7, 5)
		require.Equal(t, c.alone && !c.short, len(r.failures) == 2)
		require.Equal(t, map[string]int{"drained_ms": 3000, "tries": 7}, r.result.Measured)
	}
}
