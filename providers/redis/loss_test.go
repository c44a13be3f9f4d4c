package redis_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// again counts the events that were applied again after a loss.
func again(n *atomic.Int64) projector.RunnerObserver {
	return projector.RunnerObserver{Completed: func(_, reason string) {
		if reason == "lost" {
			n.Add(1)
		}
	}}
}

// If Redis is killed without an append-only file, it restarts empty, or from an old snapshot. Without
// anybody's help the read model is exact again, in order, and each event that came again is counted.
// Without the log, what Redis has lost is missing.
// Promise: G5.4
func TestTheLogBringsBackWhatRedisHasLost(t *testing.T) {
	t.Parallel()
	const before, lost, after = 20, 15, 10
	for name, c := range map[string]struct {
		opts        projector.Options
		snapshot    bool
		fromLog     bool
		comes       int64 // events that come again
		isMissing   int   // events of each stream that are missing in the end
		batch       int
		concurrency int
	}{
		"empty, broker":              {opts: marked, comes: 5 * (before + lost)},
		"old snapshot, broker":       {opts: marked, snapshot: true, comes: 5 * lost, batch: 3, concurrency: 3},
		"empty, log":                 {fromLog: true, comes: 5 * (before + lost)},
		"old snapshot, log":          {fromLog: true, snapshot: true, comes: 5 * lost},
		"empty, broker alone":        {opts: projector.Options{Markers: true, BrokerOnly: true}, isMissing: before + lost},
		"old snapshot, broker alone": {opts: projector.Options{Markers: true, BrokerOnly: true}, snapshot: true, isMissing: lost},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Private(t)
			s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
			w, p := newWriter(t, db), define(c.opts, s.list)
			var came atomic.Int64
			cfg := projector.RunnerConfig{Observer: again(&came), Grace: 100 * time.Millisecond, Lease: time.Second, Batch: c.batch, Concurrency: c.concurrency}
			u, f := provider.Combine(s.own(t), db), make(subscription)
			if c.fromLog {
				fromLog(t, u, db, cfg, p)
			} else {
				run(t, u, f, cfg, p)
			}
			var at eventstore.Appended
			deliver := func(n int) {
				from := len(w.published("review-0"))
				at = w.write(n, streams(5)...)
				for _, stream := range streams(5) {
					for _, m := range w.published(stream)[from:] {
						if !c.fromLog {
							f <- m
							<-m.Acked()
						}
					}
				}
				if !c.opts.BrokerOnly {
					require.NoError(t, p.Wait(t.Context(), projector.StateOf(u, db), at))
				}
			}
			deliver(before)
			if !c.opts.BrokerOnly {
				eventually(t, "the checkpoint has moved", func() bool {
					c, err := projector.StateOf(u, db).Checkpoint(t.Context(), provider.Build{Projector: "stars"})
					return err == nil && c.Place.Position >= at.Position
				})
			}
			if c.snapshot {
				require.NoError(t, s.client.Save(t.Context()).Err())
			}
			deliver(lost)
			require.NoError(t, server.End("KILL"))
			require.NoError(t, server.Begin())
			has := before + lost + after - c.isMissing
			isBack := func(n int) func() bool {
				return func() bool {
					return !slices.ContainsFunc(streams(5), func(name string) bool { return len(s.listed(t, name)) < n })
				}
			}
			if c.fromLog { // by itself, also if nothing happens
				eventually(t, "what was lost is there again", isBack(before+lost))
				eventually(t, "it is counted", func() bool { return came.Load() >= c.comes })
				require.Equal(t, c.comes, came.Load(), "events that came again")
			}
			deliver(after)
			eventually(t, "all is applied", isBack(has))
			if c.isMissing > 0 {
				for _, name := range streams(5) {
					require.Len(t, s.listed(t, name), has, "the limit that is stated")
				}
				return
			}
			s.requireLists(t, w.n)
			require.GreaterOrEqual(t, came.Load(), c.comes, "events that came again")
			require.LessOrEqual(t, came.Load(), c.comes+5*after, "some may be newer")
		})
	}
}

// A message that was parked when a snapshot was written, and applied later, is applied again after a
// return to that snapshot, and those behind it too, in order. One that an operator has skipped is not.
// Promise: G5.4
func TestWhatWasParkedComesBackAfterALoss(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w := newWriter(t, db)
	var fixed atomic.Bool
	p := define(projector.Options{}, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if (e.Stream == "review-1" && e.Data.Stars == 5 || e.Stream == "review-2" && e.Data.Stars == 3) && !fixed.Load() {
			return projector.Permanent(errors.New("poison"))
		}
		return s.list(ctx, tx, e)
	})
	var came atomic.Int64
	cfg := projector.RunnerConfig{Observer: again(&came), Lease: time.Second}
	u := provider.Combine(s.own(t), db)
	fromLog(t, u, db, cfg, p)
	w.write(10, streams(3)...)
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	eventually(t, "two messages are stuck", func() bool {
		return len(parked(t, db, stuck)) == 2 && len(s.listed(t, "review-0")) == 10 && len(parked(t, db, projector.ParkedFilter{})) == 14
	})
	require.NoError(t, s.client.Save(t.Context()).Err())
	decision := projector.Decision{By: "ann", Reason: "fixed"}
	fixed.Store(true)
	for _, row := range parked(t, db, stuck) {
		decide := projector.Replay
		if row.Key == "review-2" {
			decide = projector.Skip
		}
		_, err := decide(t.Context(), db, projector.ParkedFilter{Seqs: []int64{row.Seq}}, decision)
		require.NoError(t, err)
	}
	skipped := []int{1, 2, 4, 5, 6, 7, 8, 9, 10}
	eventually(t, "the rest follows", func() bool { return len(s.listed(t, "review-1")) == 10 && len(s.listed(t, "review-2")) == 9 })
	require.Equal(t, skipped, s.listed(t, "review-2"))

	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	require.Len(t, s.listed(t, "review-1"), 4, "the snapshot is old")
	w.write(3, streams(3)...)
	eventually(t, "what was lost is there again", func() bool { return len(s.listed(t, "review-1")) == 13 && len(s.listed(t, "review-2")) == 12 })
	require.Equal(t, upTo(13), s.listed(t, "review-1"))
	require.Equal(t, append(skipped, 11, 12, 13), s.listed(t, "review-2"))
	require.Equal(t, upTo(13), s.listed(t, "review-0"))
	require.GreaterOrEqual(t, came.Load(), int64(6+7), "events that came again")
	require.LessOrEqual(t, came.Load(), int64(6+7+3*3), "some may be newer")
}

// A message that is stuck when Redis loses everything keeps its place: the events before it in its stream
// are applied again, and those behind it wait.
// Promise: G5.4
func TestAStuckMessageKeepsItsPlaceAfterALoss(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w := newWriter(t, db)
	var fixed atomic.Bool
	p := define(projector.Options{}, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if e.Stream == "review-1" && e.Data.Stars == 5 && !fixed.Load() {
			return projector.Permanent(errors.New("poison"))
		}
		return s.list(ctx, tx, e)
	})
	fromLog(t, provider.Combine(s.own(t), db), db, projector.RunnerConfig{Lease: time.Second}, p)
	w.write(10, streams(3)...)
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	eventually(t, "one is stuck", func() bool {
		return len(parked(t, db, projector.ParkedFilter{})) == 6 && len(s.listed(t, "review-2")) == 10
	})
	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	w.write(2, streams(3)...)
	eventually(t, "the others are applied", func() bool { return len(s.listed(t, "review-0")) == 12 && len(s.listed(t, "review-2")) == 12 })
	require.Equal(t, upTo(4), s.listed(t, "review-1"))
	require.Len(t, parked(t, db, stuck), 1)
	fixed.Store(true)
	_, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "fixed"})
	require.NoError(t, err)
	eventually(t, "the rest follows", func() bool { return len(s.listed(t, "review-1")) == 12 })
	s.requireLists(t, w.n)
}

// Messages that were parked behind others when these were applied come behind them after a loss too. The
// first ones are not parked any more: they are applied again before the stuck one that was behind them.
// Promise: G5.4
func TestWhatIsLostComesBeforeWhatIsParked(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w := newWriter(t, db)
	var good atomic.Int64 // stars above it are poison, if they are 3 or 7
	p := define(projector.Options{}, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if n := e.Data.Stars; (n == 3 || n == 7) && int64(n) > good.Load() {
			return projector.Permanent(errors.New("poison"))
		}
		return s.list(ctx, tx, e)
	})
	fromLog(t, provider.Combine(s.own(t), db), db, projector.RunnerConfig{Lease: time.Second}, p)
	w.write(10, "review-0")
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	isStuckAt := func(n, rest int) func() bool {
		return func() bool {
			all, some := parked(t, db, projector.ParkedFilter{}), parked(t, db, stuck)
			return len(all) == rest && len(some) == 1 && all[0].Seq == some[0].Seq && len(s.listed(t, "review-0")) == n
		}
	}
	replay := func(upTo int64) {
		good.Store(upTo)
		_, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "fixed"})
		require.NoError(t, err)
	}
	eventually(t, "3 is stuck", isStuckAt(2, 8))
	require.NoError(t, s.client.Save(t.Context()).Err())
	replay(3)
	eventually(t, "7 is stuck", isStuckAt(6, 4))

	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	require.Len(t, s.listed(t, "review-0"), 2, "the snapshot is old")
	w.write(2, "review-0")
	eventually(t, "7 is stuck again", isStuckAt(6, 6))
	require.Equal(t, upTo(6), s.listed(t, "review-0"))
	replay(7)
	eventually(t, "the rest follows", func() bool { return len(s.listed(t, "review-0")) == 12 })
	s.requireLists(t, w.n)
}

// busyLanes is a store in which other units have the lanes of parked messages for the first few units.
type busyLanes struct {
	*memory.DB
	units atomic.Int64
}

func (b *busyLanes) Do(ctx context.Context, u provider.Unit, run func(context.Context, *memory.Model, provider.Found) (provider.Closing, error)) error {
	return b.DB.Do(ctx, u, func(ctx context.Context, tx *memory.Model, found provider.Found) (provider.Closing, error) {
		if u.IsReplay() && b.units.Add(-1) >= 0 {
			clear(found.Live)
		}
		return run(ctx, tx, found)
	})
}

// A parked message that must come again in its place is deleted, also while another unit tries it.
// Promise: G5.4
func TestWhatIsParkedIsDroppedWhileAnotherUnitTriesIt(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), &busyLanes{DB: newRouted(t)}
	u, id := provider.Combine(s.own(t), db), provider.Build{Projector: "stars"}
	park := func(message, log string) {
		aside := provider.Parked{
			Projector: id.Projector, MessageID: message, Lane: provider.LaneOfKey(message), Class: provider.ClassUnknown,
			Headers: map[string]string{provider.HeaderPosition: "7", provider.HeaderLog: log},
		}
		require.NoError(t, db.Do(t.Context(), provider.Unit{Projector: id.Projector, Messages: []provider.Message{{ID: message, Lane: aside.Lane}}},
			func(context.Context, *memory.Model, provider.Found) (provider.Closing, error) {
				return provider.Closing{Park: []provider.Aside{{Parked: aside}}}, nil
			}))
	}
	park("m-1", "")
	park("of-another-log", "OTHER/")
	db.units.Store(3)
	require.NoError(t, u.(provider.Restorer).DropAhead(t.Context(), id, 6, nil))
	left := parked(t, db, provider.ParkedFilter{})
	require.Len(t, left, 1, "this log does not bring it again")
	require.Equal(t, "of-another-log", left[0].MessageID)
	require.Negative(t, db.units.Load())
}
