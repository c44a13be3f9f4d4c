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

// While an append is open, a projector goes live, and the events of each stream are in order also
// if one becomes visible behind the reader.
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
func TestBrokerOnlyIsRefusedWithACheckpoint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
		require.NoError(t, stop())
		err := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(delivered, note("a"))).Run(t.Context())
		require.ErrorContains(t, err, "it cannot be BrokerOnly")
	})
}

// A projector whose markers were deleted by age would apply their events again from the beginning.
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
		err := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, define(marked, note("a"))).Run(t.Context())
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
		require.Equal(t, []string{"7f4b3a52-6e1d-4a8e-9c3f-000000000001 stuck permanent unregistered 1"}, rows(parked(t, db)))
		require.Equal(t, upTo(1), noted(db, "a", "k-1"))
		require.Equal(t, upTo(1), noted(db, "a", "foreign"))
		require.Less(t, units.Load(), int64(20))
		require.NoError(t, stop())
		require.NoError(t, stopLog())
	})
}

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
