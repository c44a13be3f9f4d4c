package projector_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// Promise: G6.15
func TestUnsafeRetentionIsRefused(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	day := 24 * time.Hour
	for name, cfg := range map[string]projector.RunnerConfig{
		"shorter than the default horizon": {Markers: marker.Retention{Window: 7 * day}},
		"shorter than the horizon":         {Markers: marker.Retention{Horizon: 30 * day, Window: 30 * day}},
		"negative":                         {Markers: marker.Retention{Window: -day}},
		"negative horizon":                 {Markers: marker.Retention{Horizon: -day, Window: day}},
	} {
		_, err := projector.NewRunner(db, projector.Subscribe(make(subscription), "review"), cfg, define(marked, add))
		require.ErrorIs(t, err, marker.ErrUnsafe, name)
	}
}

// A runner deletes markers and resolved messages that are older than their window. A redelivery
// within the window is still skipped. Parked messages stay, and their replay needs no markers.
// Promise: G6.15
func TestRunnerPrunesOldMarkersAndMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var later atomic.Int64
		day := 24 * time.Hour
		advance := func(d time.Duration) {
			later.Store(int64(d))
			time.Sleep(2 * time.Minute) // it prunes once a minute
		}
		db, err := memory.New(&memory.Config{Clock: func() time.Time { return time.Now().Add(time.Duration(later.Load())) }})
		require.NoError(t, err)
		var pruned atomic.Int64
		f, cfg := make(subscription), projector.RunnerConfig{Observer: projector.RunnerObserver{Pruned: func(n int) { pruned.Add(int64(n)) }}}
		bad := newFaults(map[string]error{"k-1": errNever, "skipped-1": errNever})
		stop := run(t, db, f, cfg, define(marked, bad.run))
		f.deliver(t, keyed("k", 1), keyed("skipped", 1), keyed("old", 1))
		skip(t, db, projector.ParkedFilter{Key: "skipped"})
		advance(2 * day)
		f.deliver(t, keyed("young", 1))

		advance(8*day - time.Hour)
		require.Zero(t, pruned.Load(), "nothing is older than 8 days")
		f.deliver(t, keyed("old", 1))
		require.Equal(t, upTo(1), noted(db, "a", "old"))

		advance(8*day + time.Hour)
		require.EqualValues(t, 3+1, pruned.Load(), "the markers of the first three, and the row of the skipped message")
		require.Empty(t, resolved(t, db, projector.StateSkipped))
		f.deliver(t, keyed("young", 1))
		require.Equal(t, upTo(1), noted(db, "a", "young"))
		f.deliver(t, keyed("old", 1))
		require.Equal(t, []int{1, 1}, noted(db, "a", "old"), "the control: its marker's window has ended")

		require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)))
		bad.fix()
		replayAll(t, db, all)
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}

// A tool may prune without a runner.
func TestToolPrunesMarkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := define(marked, note("a"))
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, series("k", 1, 3)...)
		require.NoError(t, stop())
		time.Sleep(9 * 24 * time.Hour)
		n, err := marker.Prune(t.Context(), db, marker.Retention{}, p.Name(), p.Handlers()...)
		require.NoError(t, err)
		require.Equal(t, 3, n)
	})
}

// After each transaction that deletes, pruning pauses for four times as long as the transaction
// took.
func TestPruningPausesForUnits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, left := newDB(t), 5
		began := time.Now()
		var at []time.Duration
		store := &pruning{unit: db, prune: func() (int, error) {
			at = append(at, time.Since(began))
			time.Sleep(time.Second)
			if left--; left < 0 {
				return 0, nil
			}
			return 500, nil
		}}
		var pruned atomic.Int64
		cfg := projector.RunnerConfig{Observer: projector.RunnerObserver{Pruned: func(n int) { pruned.Add(int64(n)) }}}
		stop := run(t, store, make(subscription), cfg, define(marked, note("a")))
		time.Sleep(40 * time.Second)
		require.NoError(t, stop())
		s := time.Second
		require.Equal(t, []time.Duration{0, 5 * s, 10 * s, 15 * s, 20 * s, 25 * s}, at)
		require.EqualValues(t, 2500, pruned.Load())
	})
}

// pruning is a provider with a Prune that a test has replaced.
type pruning struct {
	unit
	prune func() (int, error)
}

func (p *pruning) Prune(context.Context, string, []string, time.Duration, int) (int, error) {
	return p.prune()
}

// dying is the store of a runner whose process dies: its lease is not released.
type dying struct{ pruning }

func (*dying) ReleaseLease(context.Context, string, claim.Token) error { return nil }

// Each runner looks for old markers, and one of them deletes the rest. After the runner has died,
// another takes over.
// Promise: G6.16
func TestOneRunnerDeletesOldMarkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, began, calls, mu := newDB(t), time.Now(), map[string]int{}, sync.Mutex{}
		count := func(runner string, left int) func() (int, error) {
			return func() (int, error) {
				mu.Lock()
				calls[fmt.Sprintf("minute %d, runner %s", int(time.Since(began).Minutes()), runner)]++
				mu.Unlock()
				time.Sleep(200 * time.Millisecond) // and a pause of 800 ms
				left = (left + 19) % 20
				return left, nil
			}
		}
		first := &dying{pruning{unit: db, prune: count("a", 0)}}
		stop := run(t, first, make(subscription), projector.RunnerConfig{}, define(marked, note("a")))
		for _, runner := range []string{"b", "c"} {
			time.Sleep(100 * time.Millisecond)
			stop := run(t, &pruning{unit: db, prune: count(runner, 0)}, make(subscription), projector.RunnerConfig{}, define(marked, note("a")))
			defer func() { require.NoError(t, stop()) }()
		}
		time.Sleep(8*time.Second + time.Millisecond - time.Since(began))
		require.NoError(t, stop())
		time.Sleep(2*time.Minute - time.Since(began) - time.Second)
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]int{
			"minute 0, runner a": 9, "minute 0, runner b": 1, "minute 0, runner c": 1,
			"minute 1, runner b": 19, "minute 1, runner c": 1,
		}, calls)
	})
}
