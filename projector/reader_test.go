package projector_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// openLog is a log in which appends are open, those of the hidden positions: nothing is settled.
type openLog struct {
	provider.Log

	mu     sync.Mutex
	hidden map[int64]bool
	after  func() // is called once, after the first page
}

func (l *openLog) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	page, err := l.Log.LogPage(ctx, q)
	l.mu.Lock()
	defer l.mu.Unlock()
	page.Waiting, page.More = []provider.OpenAppend{{Backend: "1"}}, true
	if page.End = (provider.LogPlace{Position: q.After}); !q.Unsettled {
		page.Events, page.Full = nil, false
		return page, err
	}
	page.Events = slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return l.hidden[e.Position] })
	if l.after != nil {
		l.after()
		l.after = nil
	}
	return page, err
}

func (l *openLog) LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	events, err := l.Log.LogStreams(ctx, versions, after)
	return slices.DeleteFunc(events, func(e eventstore.Raw) bool { return l.hidden[e.Position] }), err
}

// refused returns the error of a runner that must not start.
func refused(t *testing.T, r *projector.Runner) error {
	t.Helper()
	return r.Run(patience.Context(t))
}

// While an append is open, a projector goes live, and the events of each stream are in order also
// if one becomes visible behind the reader.
// Promise: G7b.2
func TestOpenAppendsDoNotStopANewProjector(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		l := &openLog{Log: db, hidden: map[int64]bool{1: true, 600: true}}
		for n := 1; n <= 1600; n++ {
			stream := fmt.Sprint("k-", n)
			if n == 600 {
				stream = "late-1"
			}
			write(t, db, stream, 1)
		}
		l.after = func() { delete(l.hidden, 600); write(t, db, "late-1", 2) }
		stop := run(t, db, f, projector.RunnerConfig{Log: l}, define(marked, note("a")))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, provider.ModeLive, checkpoint(t, db).Mode)
		require.Zero(t, checkpoint(t, db).Place.Position)
		require.Equal(t, upTo(2), noted(db, "a", "late-1"))
		require.Equal(t, upTo(1), noted(db, "a", "k-1600"))
	})
}

// Without its checkpoint a projector would apply events again whose markers were deleted.
// Promise: G7b.5
func TestBrokerOnlyIsRefusedWithACheckpoint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
		require.NoError(t, stop())
		err := refused(t, newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(delivered, note("a"))))
		require.ErrorContains(t, err, "it cannot be BrokerOnly")
	})
}

// A projector whose markers were deleted by age would apply their events again from the beginning.
// Promise: G7b.5
func TestTheFirstCheckpointIsRefusedAfterMarkersWereDeleted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, define(delivered, note("a")))
		write(t, db, "k-1", 1)
		f.deliver(t, published(t, db, "k-1")...)
		require.NoError(t, stop())
		time.Sleep(10 * 24 * time.Hour)
		stop = run(t, db, f, projector.RunnerConfig{}, define(delivered, note("a")))
		time.Sleep(2 * time.Minute)
		require.NoError(t, stop())
		err := refused(t, newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(marked, note("a"))))
		require.ErrorContains(t, err, "set Options.From")
		from := projector.Options{Markers: true, From: eventstore.From{Now: true}}
		stop = run(t, db, f, projector.RunnerConfig{}, define(from, note("a")))
		write(t, db, "k-1", 2)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
	})
}

// The reader does not read events of unregistered types. While the projector catches up, a
// delivered one is parked, and does not hold back its stream.
// Promise: G7b.2
func TestUnregisteredTypeIsParkedWhileTheProjectorCatchesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stopLog := fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))
		time.Sleep(time.Second)
		var units atomic.Int64
		cfg := projector.RunnerConfig{Observer: projector.RunnerObserver{Unit: func(string, int, time.Duration, error) { units.Add(1) }}}
		stop := run(t, db, f, cfg, define(marked, note("a")))
		_, err := db.Append(t.Context(), "k-1", eventstore.Any, []eventstore.Draft{{
			ID: "7f4b3a52-6e1d-4a8e-9c3f-000000000001", Type: "novel", Schema: 1, Data: []byte(`{}`),
		}})
		require.NoError(t, err)
		f.deliver(t, published(t, db, "k-1")...)
		write(t, db, "k-1", 1)
		f.deliver(t, keyed("foreign", 1))
		time.Sleep(time.Second)
		require.Equal(t, []string{"7f4b3a52-6e1d-4a8e-9c3f-000000000001 waiting unable unregistered 0"}, rows(parked(t, db)))
		require.Equal(t, upTo(1), noted(db, "a", "k-1"))
		require.Equal(t, upTo(1), noted(db, "a", "foreign"))
		require.Less(t, units.Load(), int64(20))
		require.NoError(t, stop())
		require.NoError(t, stopLog())
	})
}

// Promise: G7b.4
func TestEventsThatOrderedBringsAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, counts := newDB(t), make(subscription), map[string]int{}
		stop := run(t, db, f, completed(counts), define(projector.Options{Markers: true, Ordered: true}, note("a")))
		time.Sleep(time.Second)
		write(t, db, "k-1", 1, 2)
		f.deliver(t, published(t, db, "k-1")[1])
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
		require.Equal(t, map[string]int{"not_subscribed": 1}, counts)
	})
}

// A replayed event has the same fields as when it was read from the log.
func TestReplayHasThePositionOfTheEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		var got []int64
		write(t, db, "k-1", 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, func(_ context.Context, _ txn, e eventstore.Event[posted]) error {
			if got = append(got, e.Position); len(got) < 3 {
				return errNo
			}
			return nil
		}))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []int64{1, 1, 1}, got)
	})
}

// Categories add events of unregistered types, and take away none.
func TestCategoriesAddEventsOfUnregisteredTypes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		for i, stream := range []string{"k-1", "other-1"} {
			write(t, db, stream, 1)
			_, err := db.Append(t.Context(), stream, eventstore.Any, []eventstore.Draft{{
				ID: fmt.Sprint("7f4b3a52-6e1d-4a8e-9c3f-00000000000", i), Type: "novel", Schema: 1, Data: []byte(`{}`),
			}})
			require.NoError(t, err)
		}
		stop := start(t, newRunner(t, db, projector.FromLog(db, "k"), projector.RunnerConfig{}, define(projector.Options{}, note("a"))))
		time.Sleep(time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k-1"))
		require.Equal(t, upTo(1), noted(db, "a", "other-1"))
		require.Equal(t, []string{"7f4b3a52-6e1d-4a8e-9c3f-000000000000 waiting unable unregistered 0"}, rows(parked(t, db)))
	})
}

func TestAProjectorWithACheckpointNeedsMarkersOnABroker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		require.NoError(t, fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))())
		src := projector.Subscribe(make(subscription), "review")
		err := refused(t, newRunner(t, db, src, projector.RunnerConfig{}, define(projector.Options{}, note("a"))))
		require.ErrorContains(t, err, "it cannot be BrokerOnly or without Markers")
	})
}

// Promise: G7.4
func TestFromMustNotBeAfterTheEndOfTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", 1)
		for _, from := range []eventstore.From{{Position: 2}, {Time: time.Now().Add(time.Hour)}} {
			err := refused(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, define(projector.Options{From: from}, note("a"))))
			require.ErrorIs(t, err, eventstore.ErrInvalid)
		}
		_, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, define(projector.Options{From: eventstore.From{Now: true, Position: 1}}, note("a")))
		require.ErrorIs(t, err, eventstore.ErrInvalid)
	})
}

// The read model is in one store, and the events are in another.
func TestStateOfTwoStores(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		model, events := newDB(t), newDB(t)
		p := define(projector.Options{}, note("a"))
		stop := start(t, newRunner(t, model, projector.FromLog(events), projector.RunnerConfig{}, p))
		at := write(t, events, "k-1", 1)
		both := projector.StateOf(model, events)
		require.NoError(t, p.Wait(t.Context(), both, at))
		require.ErrorIs(t, p.Wait(t.Context(), model, at), projector.ErrOtherLog)
		require.NoError(t, stop())
		write(t, events, "k-1", 2)
		lag, err := p.Lag(t.Context(), both)
		require.NoError(t, err)
		require.EqualValues(t, 1, lag.Events)
		_, err = p.Lag(t.Context(), model)
		require.ErrorIs(t, err, projector.ErrOtherLog)
	})
}

// Wait never returns nil for an event that a handler does not get.
// Promise: G7b.7
func TestWaitForAnEventThatIsNotTaken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		before, after := define(projector.Options{}, note("a")), define(projector.Options{}, note("a"), note("b"))
		stop := fromLog(t, db, projector.RunnerConfig{}, before)
		at := write(t, db, "k-1", 1)
		require.NoError(t, before.Wait(t.Context(), db, at))
		require.ErrorIs(t, within(t, after, db, at), context.DeadlineExceeded, "the handler has not begun")
		rolledBack := at
		rolledBack.Position = 7
		require.ErrorIs(t, before.Wait(t.Context(), db, rolledBack), projector.ErrNoEvent)
		require.NoError(t, stop())
		stop = fromLog(t, db, projector.RunnerConfig{}, after)
		time.Sleep(time.Second)
		require.ErrorIs(t, after.Wait(t.Context(), db, at), projector.ErrNotTaken)
		require.NoError(t, after.Wait(t.Context(), db, write(t, db, "k-1", 2)))
		require.NoError(t, stop())
	})
}
