package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// stepped is a store that calls before for each change of the checkpoint.
type stepped struct {
	unit
	before func(to provider.Checkpoint)
}

func (s stepped) SetCheckpoint(ctx context.Context, projector provider.Build, from, to provider.Checkpoint) (bool, error) {
	s.before(to)
	return s.unit.SetCheckpoint(ctx, projector, from, to)
}

// paged is a log that calls before and after for the page of the last events before a projector goes
// live.
type paged struct {
	provider.Log
	before, after func()
}

func (p paged) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	if !q.Unsettled || !q.NoData {
		return p.Log.LogPage(ctx, q)
	}
	p.before()
	page, err := p.Log.LogPage(ctx, q)
	p.after()
	return page, err
}

// Events are appended, delivered and redelivered at each step of a projector that goes live.
// Promise: G7b.2
func TestGoingLiveLosesDoublesAndMisordersNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		last := 3
		write(t, db, "k-1", 1, 2, 3)
		next := func() int {
			last++
			write(t, db, "k-1", last)
			return last
		}
		deliver := func(n int) { f.deliver(t, publishedAfter(t, db, "k-1", int64(n)-1)[0]) }
		isClosing, waits := false, func() bool { return false }
		store := stepped{db, func(to provider.Checkpoint) {
			if to.Mode == provider.ModeClosing && !isClosing {
				isClosing = true
				deliver(next())
			}
		}}
		log := paged{db, func() {
			if isClosing {
				next()
			}
		}, func() {
			if !isClosing {
				return
			}
			m := f.send(publishedAfter(t, db, "k-1", int64(next())-1)[0])[0]
			time.Sleep(time.Second)
			waits = func() bool { return !isAcked(m) }
			require.True(t, waits(), "the reader has not applied the events before it")
		}}
		stop := run(t, store, f, projector.RunnerConfig{Log: log}, define(marked, note("a")))
		time.Sleep(3 * time.Second)
		require.Equal(t, provider.ModeLive, checkpoint(t, db).Mode)
		require.False(t, waits())
		for n := range next() - 3 {
			deliver(last - n)
		}
		require.Equal(t, upTo(last), noted(db, "a", "k-1"))
		next()
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(8), noted(db, "a", "k-1"))
	})
}

// The checkpoint does not pass an event that may still be delivered.
// Promise: G7b.2
func TestTheCheckpointStaysBehindTheGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{Grace: 10 * time.Second}, define(marked, note("a")))
		time.Sleep(time.Second)
		for n := range 20 {
			write(t, db, "k-1", n+1)
			time.Sleep(time.Second)
			if n >= 5 {
				f.deliver(t, publishedAfter(t, db, "k-1", int64(n)-5)[0])
			}
		}
		require.Equal(t, upTo(15), noted(db, "a", "k-1"))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(20), noted(db, "a", "k-1"))
	})
}

// Events that a killed reader may have had in flight run in small units: if they crash the next one
// as well, each of them runs alone.
// Promise: G6.11
func TestEventsOfACrashedReaderRunInSmallUnits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1000)...)
		for name, want := range map[string]int{"crashed": 100, "new": 500} {
			p := named(name, projector.Options{}, note(name))
			if name == "crashed" {
				_, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: name}, provider.Checkpoint{}, provider.Checkpoint{
					Mode: provider.ModeCatchUp, Token: [16]byte{1}, Handlers: []provider.Began{{Handler: name + "/a", Type: "posted"}},
				})
				require.NoError(t, err)
			}
			most := 0
			cfg := projector.RunnerConfig{Observer: projector.RunnerObserver{Unit: func(_ string, messages int, _ time.Duration, err error) {
				require.NoError(t, err)
				most = max(most, messages)
			}}}
			stop := fromLog(t, db, cfg, p)
			time.Sleep(10 * time.Second)
			require.NoError(t, stop())
			require.Equal(t, upTo(1000), noted(db, name, "k-1"))
			require.Equal(t, want, most, name)
		}
	})
}
