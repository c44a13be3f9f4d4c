package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Several processes create the tables of a new projector, which a runner then uses.
func TestCreateBeforeTheFirstRunner(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, made := newDB(t), 0
		p := projector.Define("p", types, projector.Options{Markers: true, Tables: []string{"notes"}},
			projector.OnCreate(func(ctx context.Context, tx txn) error {
				made++
				tx.Put(projector.Table(ctx, "notes"), "first", []int{1})
				return nil
			}),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		for range 2 {
			require.NoError(t, p.Create(t.Context(), db, nil))
			require.Equal(t, []int{1}, noted(db, "notes", "first"), "the view shows the tables")
		}
		write(t, db, "k-1", 1, 2)
		stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, 1, made)
		require.Equal(t, upTo(2), noted(db, "notes_g1", "k-1"))
		require.ErrorIs(t, define(marked, add).Create(t.Context(), db, nil), projector.ErrInput)
	})
}

// Tools apply parked messages to the generation that is for the version of their program.
// Promise: R5.1
func TestToolsUseTheGenerationOfTheirVersion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, opts := newDB(t), projector.Options{Markers: true}
		write(t, db, "k-1", 1, 2, 3)
		version := func(opts projector.Options, run onEvent) *projector.Projector[txn] {
			opts.Tables = []string{"notes"}
			return projector.Define("p", types, opts,
				projector.OnCreate(func(context.Context, txn) error { return nil }),
				projector.On("a", run))
		}
		write := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			return note(projector.Table(ctx, "notes"))(ctx, tx, e)
		}
		bad := version(opts, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Data.Stars == 2 {
				return projector.Permanent(errNever)
			}
			return write(ctx, tx, e)
		})
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, bad)
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
		require.NoError(t, stop())
		require.Equal(t, []int{1}, noted(db, "notes_g2", "k-1"))
		n, err := db.ParkedCount(t.Context(), "")
		require.NoError(t, err)
		require.EqualValues(t, 2, n, "without those of the generation that stands by")

		good := version(opts, write)
		result, err := good.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, 2, result.Messages, "those of the live generation")
		require.Len(t, result.Changes, 1)
		require.Equal(t, "notes", result.Changes[0].Table)

		opts.Version, opts.RebuildOnChange = 2, projector.BlueGreen
		newer := version(opts, write)
		_, err = newer.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.ErrorIs(t, err, projector.ErrGeneration)
		_, err = projector.Replay(t.Context(), db, projector.ParkedFilter{Projector: "p"}, person)
		require.NoError(t, err)
		require.ErrorIs(t, newer.ApplyParked(t.Context(), db, nil), projector.ErrGeneration)
		require.Equal(t, []int{1}, noted(db, "notes_g2", "k-1"))
		require.NoError(t, good.ApplyParked(t.Context(), db, nil))
		require.Equal(t, upTo(3), noted(db, "notes_g2", "k-1"))
		left, err := db.Parked(t.Context(), provider.ParkedFilter{Projector: "p", Generation: 2})
		require.NoError(t, err)
		require.Empty(t, left)
	})
}

// Promise: R4.2
func TestProgressCountsTheEventsOfTheRebuild(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		require.NoError(t, rebuild(t, r, request(projector.InPlace)))
		list, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		last := list[len(list)-1]
		require.EqualValues(t, 1000, last.Applied, "without those that the reader has applied to the first generation")
		require.NoError(t, stop())

		// Another process continues.
		slow := request(projector.BlueGreen)
		slow.Rate = 100
		n, err := projector.RequestRebuild(t.Context(), db, "p", slow)
		require.NoError(t, err)
		for range 2 {
			stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{Batch: 10}, built(projector.Options{Markers: true}, 1)))
			time.Sleep(7 * time.Second)
			if list, err = p.Generations(t.Context(), db); list[len(list)-1].State == "building" {
				require.NoError(t, err)
				last = list[len(list)-1]
				require.Equal(t, n, last.Number)
				require.EqualValues(t, 1000, last.Total)
				require.InDelta(t, 700, last.Applied, 150)
				require.InDelta(t, 1000-last.Applied, last.Behind, 150)
			}
			require.NoError(t, stop())
		}
		last = list[len(list)-1]
		require.Equal(t, "live", last.State)
		require.InDelta(t, 1000, last.Applied, 110, "at most the events of a second are not counted twice")
	})
}

// More events are appended than a rebuild applies that leaves half of the time to the live generation.
func TestRebuildReachesABusyLiveGeneration(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1000)...)
		p := projector.Define("p", types, projector.Options{Markers: true, Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				if projector.Replaying(ctx) {
					time.Sleep(3 * time.Millisecond)
				}
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		appended := make(chan int)
		go func() {
			n := 1000
			for ; ctx.Err() == nil; n += 5 {
				write(t, db, "k-1", n+1, n+2, n+3, n+4, n+5)
				time.Sleep(10 * time.Millisecond)
			}
			appended <- n
		}()
		time.Sleep(2 * time.Second)
		require.NoError(t, r.Rebuild(ctx, "p", request(projector.BlueGreen)))
		list, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		require.InDelta(t, list[1].Total, list[1].Applied, 500, "the total grows with the log")
		cancel()
		n := <-appended
		time.Sleep(20 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(n), noted(db, "notes", "k-1"))
	})
}
