package pauses_test

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/pauses"
)

func TestDoubling(t *testing.T) {
	t.Parallel()
	d := pauses.Doubling{First: 3, Longest: 20}
	for _, want := range []time.Duration{3, 6, 12, 20, 20} {
		require.Equal(t, want, d.Next())
	}
	d.Reset()
	require.Equal(t, time.Duration(3), d.Next())
	for range 100 { // the longest may be as long as a duration can be
		require.Positive(t, d.Next())
	}
	require.Equal(t, time.Duration(math.MaxInt64), pauses.Doubled(1, 63, math.MaxInt64))
	require.Equal(t, time.Duration(1)<<61, pauses.Doubled(1, 61, math.MaxInt64))
	require.Equal(t, time.Duration(2), pauses.Doubled(5, 0, 2), "a first pause that is too long")
}

func TestWait(t *testing.T) {
	t.Parallel()
	require.False(t, pauses.Wait(t.Context(), 1, nil))
	woken := make(chan struct{})
	close(woken)
	require.True(t, pauses.Wait(t.Context(), time.Hour, woken))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.False(t, pauses.Wait(ctx, time.Hour, nil))
}
