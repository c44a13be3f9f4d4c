package pulse

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLate(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	after := func(d time.Duration) time.Time { return now.Add(d) }
	var l Loops
	require.Empty(t, l.Late(now))
	a, b := l.Add("x"), l.Add("x")
	a.Within(now, time.Minute)
	require.Equal(t, map[string]time.Duration{"x": 0}, l.Late(after(time.Minute)))
	b.Within(now, 0)
	require.Equal(t, map[string]time.Duration{"x": 90 * time.Second}, l.Late(after(90*time.Second)), "the latest of a name")
	b.Rest()
	require.Equal(t, map[string]time.Duration{"x": 30 * time.Second}, l.Late(after(90*time.Second)))

	var call Loop
	l.AddStuck(&call, "call", now, func() bool { return true })
	require.NotContains(t, l.Late(now), "call", "it has returned")
	l.AddStuck(&call, "call", now, func() bool { return false })
	require.Equal(t, time.Second, l.Late(after(time.Second))["call"])
	l.Remove(&call)
	l.Remove(&call)
	require.NotContains(t, l.Late(now), "call")

	l.End(now, "x", nil)
	require.Empty(t, l.Late(after(time.Hour)))
	l.End(now, "x", errors.New("no"))
	require.Equal(t, map[string]time.Duration{"x": time.Hour}, l.Late(after(time.Hour)))
	(*Loop)(nil).Within(now, 0)
	(*Loop)(nil).Rest()
}

func TestMovingAllocatesNothing(t *testing.T) {
	var l Loops
	o, now := l.Add("x"), time.Unix(1000, 0)
	require.Zero(t, testing.AllocsPerRun(100, func() { o.Within(now, time.Second); o.Rest() }))
}
