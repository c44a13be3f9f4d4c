package marker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/provider"
)

const day = 24 * time.Hour

func TestRetention(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		given, want marker.Retention
		unsafe      bool
	}{
		"default":                                 {marker.Retention{}, marker.Retention{Horizon: 7 * day, Window: 8 * day}, false},
		"a longer horizon":                        {marker.Retention{Horizon: 30 * day}, marker.Retention{Horizon: 30 * day, Window: 31 * day}, false},
		"a shorter horizon":                       {marker.Retention{Horizon: time.Hour}, marker.Retention{Horizon: time.Hour, Window: 25 * time.Hour}, false},
		"a longer window":                         {marker.Retention{Window: 90 * day}, marker.Retention{Horizon: 7 * day, Window: 90 * day}, false},
		"a window just long enough":               {marker.Retention{Horizon: day, Window: 2 * day}, marker.Retention{Horizon: day, Window: 2 * day}, false},
		"a window just too short":                 {marker.Retention{Horizon: day, Window: 2*day - 1}, marker.Retention{}, true},
		"a window too short for a default":        {marker.Retention{Window: 8*day - 1}, marker.Retention{}, true},
		"a negative window":                       {marker.Retention{Window: -1}, marker.Retention{}, true},
		"a negative horizon":                      {marker.Retention{Horizon: -1}, marker.Retention{}, true},
		"a negative horizon with a longer window": {marker.Retention{Horizon: -2 * day, Window: day}, marker.Retention{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := c.given.WithDefaults()
			if c.unsafe {
				require.ErrorIs(t, err, marker.ErrUnsafe)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
			again, err := got.WithDefaults()
			require.NoError(t, err)
			require.Equal(t, got, again)
		})
	}
}

// store has old rows of a projector. Prune fails when failAt of them are left.
type store struct {
	provider.Records
	old    int
	failAt int
	others bool // others delete some, too
	calls  int
	window time.Duration
	names  []string
}

var errStore = errors.New("store")

func (s *store) Prune(_ context.Context, projector string, handlers []string, window time.Duration, limit int) (int, error) {
	s.calls++
	s.window, s.names = window, append([]string{projector}, handlers...)
	if s.failAt > 0 && s.old <= s.failAt {
		return 0, errStore
	}
	n := min(limit, s.old)
	if s.others {
		n = (n + 1) / 2 // others have just deleted the rest
	}
	s.old -= n
	return n, nil
}

func TestPruneDeletesAThousandAtATimeUntilNothingIsLeft(t *testing.T) {
	t.Parallel()
	s := &store{old: 2500}
	n, err := marker.Prune(t.Context(), s, marker.Retention{Horizon: 2 * day}, "p", "p/a", "p/b")
	require.NoError(t, err)
	require.Equal(t, 2500, n)
	require.Equal(t, 4, s.calls, "the last call finds nothing")
	require.Equal(t, 3*day, s.window)
	require.Equal(t, []string{"p", "p/a", "p/b"}, s.names)
}

func TestPruneContinuesIfOthersDeleteSome(t *testing.T) {
	t.Parallel()
	n, err := marker.Prune(t.Context(), &store{old: 2500, others: true}, marker.Retention{}, "p", "p/a")
	require.NoError(t, err)
	require.Equal(t, 2500, n)
}

func TestPruneReturnsItsCountBeforeAnError(t *testing.T) {
	t.Parallel()
	n, err := marker.Prune(t.Context(), &store{old: 2500, failAt: 500}, marker.Retention{}, "p", "p/a")
	require.ErrorIs(t, err, errStore)
	require.ErrorContains(t, err, "prune markers of p")
	require.Equal(t, 2000, n)
}

func TestPruneRefusesAnUnsafeWindow(t *testing.T) {
	t.Parallel()
	s := &store{old: 1}
	n, err := marker.Prune(t.Context(), s, marker.Retention{Window: day}, "p", "p/a")
	require.ErrorIs(t, err, marker.ErrUnsafe)
	require.Zero(t, n)
	require.Zero(t, s.calls, "the store was not asked")
}

func FuzzRetention(f *testing.F) {
	f.Add(int64(0), int64(0))
	f.Add(int64(day), int64(2*day))
	f.Add(int64(1<<63-1), int64(0)) // a horizon whose sum with a day overflows
	f.Fuzz(func(t *testing.T, horizon, window int64) {
		r, err := marker.Retention{Horizon: time.Duration(horizon), Window: time.Duration(window)}.WithDefaults()
		if err != nil {
			require.ErrorIs(t, err, marker.ErrUnsafe)
			return
		}
		require.GreaterOrEqual(t, r.Horizon, time.Duration(0))
		require.GreaterOrEqual(t, r.Window, r.Horizon)
		require.GreaterOrEqual(t, r.Window-r.Horizon, day)
	})
}
