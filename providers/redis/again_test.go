package redis_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// A read model is lost twice. Each time the log brings it back.
// Promise: G5.4
func TestASecondLossIsNoticedToo(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w, u := newWriter(t, db), provider.Combine(s.own(t), db)
	w.write(20, streams(2)...)
	fromLog(t, u, db, projector.RunnerConfig{Lease: time.Second}, define(projector.Options{}, s.list))
	isBack := func() bool {
		c, err := u.Checkpoint(t.Context(), provider.Build{Projector: "stars"})
		return err == nil && !c.Restored && c.Place.Position == 40 && len(s.listed(t, "review-1")) == 20
	}
	eventually(t, "all is applied", isBack)
	for range 2 {
		require.NoError(t, server.End("KILL"))
		require.NoError(t, server.Begin())
		eventually(t, "all is there again", isBack)
	}
	require.NoError(t, s.client.FlushAll(t.Context()).Err())
	eventually(t, "all is there again", isBack)
	s.requireLists(t, w.n)
}

// A replay that is decided while Redis is empty comes after the events before it.
// Promise: G5.4
func TestAReplayWaitsForWhatWasLost(t *testing.T) {
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
	fromLog(t, provider.Combine(s.own(t), db), db, projector.RunnerConfig{Lease: 3 * time.Second}, p)
	w.write(10, streams(2)...)
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	eventually(t, "parked", func() bool {
		return len(parked(t, db, projector.ParkedFilter{})) == 6 && len(s.listed(t, "review-0")) == 10
	})
	fixed.Store(true)
	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	_, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "fixed"})
	require.NoError(t, err)
	eventually(t, "all", func() bool { return len(s.listed(t, "review-1")) >= 10 })
	require.Equal(t, upTo(10), s.listed(t, "review-1"))
}

// An event that an operator has skipped is not applied when everything is applied again.
// Promise: G5.4
func TestASkippedMessageStaysSkippedAfterALoss(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w := newWriter(t, db)
	var fixed atomic.Bool
	p := define(projector.Options{}, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if e.Stream == "review-1" && e.Data.Stars == 3 && !fixed.Load() {
			return projector.Permanent(errors.New("poison"))
		}
		return s.list(ctx, tx, e)
	})
	fromLog(t, provider.Combine(s.own(t), db), db, projector.RunnerConfig{Lease: time.Second}, p)
	w.write(5, streams(2)...)
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	eventually(t, "parked", func() bool { return len(parked(t, db, projector.ParkedFilter{})) == 3 })
	_, err := projector.Skip(t.Context(), db, stuck, because)
	require.NoError(t, err)
	eventually(t, "rest", func() bool { return len(s.listed(t, "review-1")) == 4 })
	fixed.Store(true)
	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	eventually(t, "again", func() bool { return len(s.listed(t, "review-1")) >= 4 && len(s.listed(t, "review-0")) == 5 })
	w.write(1, streams(2)...)
	eventually(t, "the next ones follow", func() bool { return len(s.listed(t, "review-1")) >= 5 && len(s.listed(t, "review-0")) == 6 })
	require.Equal(t, []int{1, 2, 4, 5, 6}, s.listed(t, "review-1"))
}

// A snapshot has the read model of before a rebuild in place: it is emptied before it is built again.
// Promise: G5.4
func TestASnapshotOlderThanARebuildInPlace(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newRouted(t)
	w, u := newWriter(t, db), provider.Combine(s.own(t), db)
	p := projector.Define("stars", types, projector.Options{},
		projector.OnReset(func(ctx context.Context, tx pipe) error {
			tx.Unlink(ctx, s.prefix+"list:review-0", s.prefix+"sums")
			return nil
		}),
		projector.On("posted", s.list))
	r, err := projector.NewRunner(u, projector.FromLog(db), projector.RunnerConfig{Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	defer func() { cancel(); <-done }()
	w.write(5, "review-0")
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-0")) == 5 })
	require.NoError(t, s.client.Save(t.Context()).Err())
	require.NoError(t, r.Rebuild(t.Context(), "stars", projector.Rebuild{How: projector.InPlace, Decision: because}))
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-0")) == 5 })
	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
	w.write(1, "review-0")
	eventually(t, "all is applied again", func() bool { return len(s.listed(t, "review-0")) >= 6 })
	s.requireLists(t, w.n)
}

// A process ends after it has shown a new table, and before the second store has switched to it. Nobody
// repeats that.
func TestTheLiveTableIsShownAgain(t *testing.T) {
	t.Parallel()
	b, db := newBuilt(t), &switchFails{DB: newRouted(t)}
	w, u := newWriter(t, db.DB), provider.Combine(b.units, db)
	w.write(10, streams(5)...)
	b.start(t, u, w, 1)
	before := b.shown(t)
	// what Redis has when the process is killed after finishSwitch, before the commit of the second store
	unit := provider.Unit{Projector: "lists", Generation: 2, Once: true, Switch: &provider.Switch{
		Show: []provider.TablePair{{Table: b.lists + "_g2", Other: b.lists}}, Set: []provider.Generation{{Build: provider.Build{Projector: "lists", Generation: 2}, State: provider.GenerationLive}}}}
	_, err := b.units.DoCombined(t.Context(), unit, func(context.Context, pipe, provider.Found) (provider.Closing, error) { return provider.Closing{}, nil })
	require.NoError(t, err)
	w.write(1, streams(5)...) // the live generation goes on; the rebuild is cancelled, and nothing repeats the switch
	require.NotEqual(t, before, b.shown(t))
	eventually(t, "the live table is shown", func() bool { return b.shown(t) == before })
}
