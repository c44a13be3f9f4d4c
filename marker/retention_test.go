package marker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/marker"
)

const day = 24 * time.Hour

func TestRetention(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		given, want marker.Retention
		unsafe      bool
	}{
		"the default":                      {marker.Retention{}, marker.Retention{Horizon: 7 * day, Window: 8 * day}, false},
		"a longer horizon":                 {marker.Retention{Horizon: 30 * day}, marker.Retention{Horizon: 30 * day, Window: 31 * day}, false},
		"a shorter horizon":                {marker.Retention{Horizon: time.Hour}, marker.Retention{Horizon: time.Hour, Window: 25 * time.Hour}, false},
		"a longer window":                  {marker.Retention{Window: 90 * day}, marker.Retention{Horizon: 7 * day, Window: 90 * day}, false},
		"a window just long enough":        {marker.Retention{Horizon: day, Window: 2 * day}, marker.Retention{Horizon: day, Window: 2 * day}, false},
		"a window just too short":          {marker.Retention{Horizon: day, Window: 2*day - 1}, marker.Retention{}, true},
		"a window too short for a default": {marker.Retention{Window: 8*day - 1}, marker.Retention{}, true},
		"a negative window":                {marker.Retention{Window: -1}, marker.Retention{}, true},
		"a negative horizon":               {marker.Retention{Horizon: -1}, marker.Retention{}, true},
		"a negative horizon, made up for":  {marker.Retention{Horizon: -2 * day, Window: day}, marker.Retention{}, true},
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

// keeper has so many old markers of each handler, and fails when they are down to failAt.
type keeper struct {
	marker.Keeper
	old     map[string]int
	failAt  int
	others  bool // delete some, too
	windows []time.Duration
	asked   []string
}

var errKeeper = errors.New("keeper")

func (k *keeper) PruneMarkers(_ context.Context, handler string, window time.Duration, limit int) (int, error) {
	k.windows, k.asked = append(k.windows, window), append(k.asked, handler)
	if k.failAt > 0 && k.old[handler] <= k.failAt {
		return 0, errKeeper
	}
	n := min(limit, k.old[handler])
	if k.others {
		n = (n + 1) / 2 // the rest of them somebody else has just deleted
	}
	k.old[handler] -= n
	return n, nil
}

func TestPruneTakesHandlerByHandler(t *testing.T) {
	t.Parallel()
	k := &keeper{old: map[string]int{"p/a": 2500, "p/b": 1000, "p/c": 0, "q/a": 7}}
	n, err := marker.Prune(t.Context(), k, marker.Retention{Horizon: 2 * day}, "p/a", "p/b", "p/c")
	require.NoError(t, err)
	require.Equal(t, 3500, n)
	require.Equal(t, map[string]int{"p/a": 0, "p/b": 0, "p/c": 0, "q/a": 7}, k.old, "nobody asked for another's")
	require.Equal(t, []string{"p/a", "p/a", "p/a", "p/a", "p/b", "p/b", "p/c"}, k.asked, "until there are none, a thousand at a time")
	for _, window := range k.windows {
		require.Equal(t, 3*day, window)
	}
	n, err = marker.Prune(t.Context(), k, marker.Retention{})
	require.NoError(t, err)
	require.Zero(t, n, "of no handlers")
}

func TestPruneGoesOnWhereOthersTakeSome(t *testing.T) {
	t.Parallel()
	k := &keeper{old: map[string]int{"p/a": 2500}, others: true}
	n, err := marker.Prune(t.Context(), k, marker.Retention{}, "p/a")
	require.NoError(t, err)
	require.Equal(t, 2500, n)
}

func TestPruneTellsWhatItDidBeforeAnError(t *testing.T) {
	t.Parallel()
	k := &keeper{old: map[string]int{"p/a": 2500, "p/b": 1}, failAt: 500}
	n, err := marker.Prune(t.Context(), k, marker.Retention{}, "p/a", "p/b")
	require.ErrorIs(t, err, errKeeper)
	require.ErrorContains(t, err, "p/a")
	require.Equal(t, 2000, n)
	require.NotContains(t, k.asked, "p/b")
}

func TestPruneRefusesAWindowThatIsNotSafe(t *testing.T) {
	t.Parallel()
	k := &keeper{old: map[string]int{"p/a": 1}}
	n, err := marker.Prune(t.Context(), k, marker.Retention{Window: day}, "p/a")
	require.ErrorIs(t, err, marker.ErrUnsafe)
	require.Zero(t, n)
	require.Empty(t, k.asked, "nothing was asked of the store")
}

func FuzzRetention(f *testing.F) {
	f.Add(int64(0), int64(0))
	f.Add(int64(day), int64(2*day))
	f.Add(int64(1<<63-1), int64(0)) // a horizon and a day that are too long together
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
