package projector_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// write appends events with these stars to a stream, one append each, and returns the last one.
func write(t *testing.T, db *memory.DB, stream string, stars ...int) (at eventstore.Appended) {
	t.Helper()
	for _, n := range stars {
		drafts, err := types.Encode(t.Context(), posted{n})
		require.NoError(t, err)
		at, err = db.Append(t.Context(), stream, eventstore.Any, drafts)
		require.NoError(t, err)
	}
	return at
}

// published returns the messages that a relay publishes for the events of a stream.
func published(t *testing.T, db *memory.DB, stream string) []*message.Message {
	t.Helper()
	return publishedAfter(t, db, stream, 0)
}

func publishedAfter(t *testing.T, db *memory.DB, stream string, version int64) (msgs []*message.Message) {
	t.Helper()
	id, err := db.LogID(t.Context())
	require.NoError(t, err)
	for e, err := range db.ReadStream(t.Context(), stream, version) {
		require.NoError(t, err)
		m := message.NewMessage(e.ID, e.Data)
		m.Metadata = provider.FromEvent(stream, e.Version, eventstore.Draft{ID: e.ID, Type: e.Type, Schema: e.Schema}, "").Headers
		m.Metadata[outbox.HeaderKey] = stream
		m.Metadata[provider.HeaderPosition] = strconv.FormatInt(e.Position, 10)
		m.Metadata[provider.HeaderLog] = id.String()
		msgs = append(msgs, recorded(m, e.RecordedAt))
	}
	return msgs
}

func fromLog(t *testing.T, db *memory.DB, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) (stop func() error) {
	t.Helper()
	return start(t, newRunner(t, db, projector.FromLog(db), cfg, ps...))
}

func checkpoint(t *testing.T, db *memory.DB) provider.Checkpoint {
	t.Helper()
	c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p"})
	require.NoError(t, err)
	return c
}

// Promise: G7.4
func TestFromLogAppliesThePastAndThenEachEventAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1100)...)
		stop := fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))
		time.Sleep(time.Second)
		require.Equal(t, upTo(1100), noted(db, "a", "k-1"))
		for n := 1101; n <= 1110; n++ {
			began := time.Now()
			at := write(t, db, "k-1", n)
			require.NoError(t, define(projector.Options{}, note("a")).Wait(t.Context(), db, at))
			require.Less(t, time.Since(began), 5*time.Millisecond)
			time.Sleep(time.Duration(n%3) * time.Second)
		}
		require.Equal(t, upTo(1110), noted(db, "a", "k-1"))
		require.NoError(t, stop())
		require.EqualValues(t, 1110, checkpoint(t, db).Place.Position)
		stop = fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))
		write(t, db, "k-1", 1111)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(1111), noted(db, "a", "k-1"), "it continues at the checkpoint")
	})
}

// Promise: G7.4
func TestFromLogBeginsWhereItIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", 1, 2, 3)
		time.Sleep(time.Hour)
		later := time.Now()
		write(t, db, "k-1", 4, 5)
		var ps []*projector.Projector[txn]
		for name, from := range map[string]eventstore.From{
			"beginning": {}, "position": {Position: 2}, "time": {Time: later}, "now": {Now: true},
		} {
			ps = append(ps, named(name, projector.Options{From: from}, note(name)))
		}
		stop := fromLog(t, db, projector.RunnerConfig{}, ps...)
		write(t, db, "k-1", 6)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		for name, want := range map[string][]int{
			"beginning": upTo(6), "position": {3, 4, 5, 6}, "time": {4, 5, 6}, "now": {6},
		} {
			require.Equal(t, want, noted(db, name, "k-1"), name)
		}
	})
}

// An event that cannot be applied is parked in the transaction that moves the checkpoint past it.
// Its stream waits for it, and other streams go on.
// Promise: G7.5
func TestFromLogParksAndContinues(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{})
		for n := range 40 {
			write(t, db, fmt.Sprint("k-", n%2), n/2+1)
		}
		id := published(t, db, "k-0")[6].UUID
		bad.set(id, errNever)
		stop := fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, bad.run))
		time.Sleep(time.Minute)
		require.Equal(t, upTo(20), noted(db, "a", "k-1"))
		require.Equal(t, upTo(6), noted(db, "a", "k-0"))
		list := parked(t, db)
		require.Len(t, list, 14)
		require.Equal(t, "posted", list[0].Type)
		require.EqualValues(t, 40, checkpoint(t, db).Place.Position)
		bad.fix()
		replayAll(t, db, projector.ParkedFilter{Projector: "p"})
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(20), noted(db, "a", "k-0"))
		require.Empty(t, parked(t, db))
	})
}

// Of the runners of a projector one reads, and another takes over two leases after it ended.
// Promise: G7.7
func TestOneReaderAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		var mu sync.Mutex
		by := map[int][]int{}
		runner := func(i int) (stop func() error) {
			return fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				mu.Lock()
				defer mu.Unlock()
				by[i] = append(by[i], e.Data.Stars)
				return note("a")(ctx, tx, e)
			}))
		}
		first := runner(1)
		time.Sleep(time.Second)
		second := runner(2)
		for n := range 10 {
			write(t, db, "k-1", n+1)
			time.Sleep(time.Second)
		}
		require.NoError(t, first())
		require.Equal(t, upTo(10), by[1])
		mu.Lock()
		require.Empty(t, by[2])
		mu.Unlock()
		write(t, db, "k-1", 11)
		time.Sleep(30 * time.Second)
		require.NoError(t, second())
		require.Equal(t, []int{11}, by[2])
		require.Equal(t, upTo(11), noted(db, "a", "k-1"))
	})
}

// completed counts the events that a runner completed, by reason.
func completed(counts map[string]int) projector.RunnerConfig {
	var mu sync.Mutex
	return projector.RunnerConfig{Observer: projector.RunnerObserver{Completed: func(_, reason string) {
		mu.Lock()
		defer mu.Unlock()
		counts[reason]++
	}}}
}

// What a broker does not deliver is read from the log after the grace.
// Promise: G4.7, G7b.1
func TestEventsThatAreNotDeliveredAreReadFromTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, counts := newDB(t), make(subscription), map[string]int{}
		stop := run(t, db, f, completed(counts), define(marked, note("a")))
		time.Sleep(time.Second)
		for n := range 30 {
			stream := fmt.Sprint("k-", n)
			write(t, db, stream, 1)
			if msgs := published(t, db, stream); n%3 != 0 {
				f.deliver(t, msgs...)
				f.deliver(t, msgs...)
			}
			time.Sleep(100 * time.Millisecond)
		}
		require.Empty(t, noted(db, "a", "k-27"))
		time.Sleep(10 * time.Second)
		for n := range 30 {
			require.Equal(t, upTo(1), noted(db, "a", fmt.Sprint("k-", n)), n)
		}
		require.Equal(t, map[string]int{"not_subscribed": 10}, counts)
		require.EqualValues(t, 30, checkpoint(t, db).Place.Position)
		time.Sleep(2 * time.Minute)
		handlers, err := db.MarkedHandlers(t.Context())
		require.NoError(t, err)
		require.Empty(t, handlers, "markers at or before the checkpoint are deleted")
		f.deliver(t, published(t, db, "k-1")...)
		f.deliver(t, published(t, db, "k-3")...)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k-1"), "a delivery before the checkpoint is a duplicate")
		require.Equal(t, upTo(1), noted(db, "a", "k-3"))
	})
}

// A new projector catches up. Meanwhile deliveries are acked and left to the reader.
// Promise: G7b.2
func TestNewProjectorGetsThePastInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, counts := newDB(t), make(subscription), map[string]int{}
		const streams, past = 50, 2000
		for n := range past {
			write(t, db, fmt.Sprint("k-", n%streams), n/streams+1)
		}
		slow := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(time.Millisecond)
			return note("a")(ctx, tx, e)
		}
		stop := run(t, db, f, completed(counts), define(marked, slow))
		f.deliver(t, keyed("foreign", 1)) // it is not in the log
		for n := past; n < past+1500; n++ {
			stream := fmt.Sprint("k-", n%streams)
			at := write(t, db, stream, n/streams+1)
			f.send(publishedAfter(t, db, stream, at.Version-1)...)
			time.Sleep(2 * time.Millisecond)
		}
		require.Equal(t, upTo(1), noted(db, "a", "foreign"))
		require.Equal(t, provider.ModeLive, checkpoint(t, db).Mode)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		for n := range streams {
			require.Equal(t, upTo(70), noted(db, "a", fmt.Sprint("k-", n)))
		}
		require.Empty(t, counts)
	})
}

// After a long time without deliveries the projector catches up before it applies new ones.
// Promise: G7b.2
func TestAProjectorFarBehindCatchesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := define(marked, note("a"))
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		write(t, db, "k-1", 1)
		f.deliver(t, published(t, db, "k-1")...)
		require.NoError(t, stop())
		write(t, db, "k-1", upTo(2000)[1:]...)
		time.Sleep(time.Hour)
		stop = run(t, db, f, projector.RunnerConfig{}, p)
		time.Sleep(20 * time.Second)
		write(t, db, "k-1", 2001)
		f.deliver(t, published(t, db, "k-1")...)
		time.Sleep(20 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(2001), noted(db, "a", "k-1"))
	})
}

// With Ordered, a delivery brings the events before it that the broker lost.
// Promise: G7b.4
func TestOrderedBringsWhatWasLost(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			db, f := newDB(t), make(subscription)
			stop := run(t, db, f, projector.RunnerConfig{}, define(projector.Options{Markers: true, Ordered: ordered}, note("a")))
			time.Sleep(time.Second)
			write(t, db, "k-1", upTo(10)...)
			msgs := published(t, db, "k-1")
			f.deliver(t, msgs[0], msgs[2], msgs[1], msgs[6])
			time.Sleep(time.Minute)
			require.NoError(t, stop())
			list := noted(db, "a", "k-1")
			require.Equal(t, ordered, slices.IsSorted(list), list)
			slices.Sort(list)
			require.Equal(t, upTo(10), list)
		})
	}
}

// A projector may be moved between a broker and the log, whatever state it is in.
// Promise: G7b.3
func TestMovingBetweenBrokerAndLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		ordered := projector.Options{Markers: true, Ordered: true}
		n := 0
		next := func(deliver bool) {
			n++
			write(t, db, "k-1", n)
			if deliver {
				msgs := published(t, db, "k-1")
				f.deliver(t, msgs[len(msgs)-1], msgs[0])
			}
		}
		for round := range 4 {
			stop := run(t, db, f, projector.RunnerConfig{}, define(ordered, note("a")))
			if round%2 == 0 {
				time.Sleep(time.Second)
			}
			next(true)
			time.Sleep(time.Duration(round) * 3 * time.Second)
			next(true)
			require.NoError(t, stop())
			next(false)
			stop = fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))
			next(false)
			time.Sleep(time.Duration(round) * time.Second)
			require.NoError(t, stop())
			next(false)
		}
		stop := run(t, db, f, projector.RunnerConfig{}, define(ordered, note("a")))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(n), noted(db, "a", "k-1"))
	})
}

// logs records log lines.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// A handler that is added begins at the checkpoint. The events that it misses are logged. A program without it leaves its
// events to one with it, for however long, unless it says that the handler was removed.
// Promise: G7.10
func TestAddedHandlerBeginsAtTheCheckpoint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, out := newDB(t), &logs{}
		cfg := projector.RunnerConfig{Logger: out.logger()}
		before, after := define(projector.Options{}, note("a")), define(projector.Options{}, note("a"), note("b"))
		write(t, db, "k-1", 1, 2)
		stop := fromLog(t, db, cfg, before)
		time.Sleep(time.Second)
		require.NoError(t, stop())
		stop = fromLog(t, db, cfg, after)
		time.Sleep(time.Second)
		require.Contains(t, out.String(), `msg="a new handler does not get earlier events: rebuild the projector to apply them" projector=p handler=p/b type=posted events=2`)
		require.NoError(t, stop())
		old := fromLog(t, db, cfg, before)
		write(t, db, "k-1", 3, 4)
		time.Sleep(time.Hour)
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
		list := parked(t, db)
		require.Len(t, list, 2)
		require.Equal(t, "event posted 1\nhandler p/b of posted", list[0].Needs)
		stop = fromLog(t, db, cfg, after)
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{3, 4}, noted(db, "b", "k-1"))
		require.Equal(t, upTo(4), noted(db, "a", "k-1"))
		write(t, db, "k-1", 5)
		time.Sleep(time.Minute)
		require.NoError(t, old())
		require.Len(t, parked(t, db), 1)

		stop = fromLog(t, db, cfg, define(projector.Options{Removed: []string{"b"}}, note("a")))
		time.Sleep(2 * time.Second)
		require.Empty(t, parked(t, db))
		write(t, db, "k-1", 6)
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(6), noted(db, "a", "k-1"))
		require.Equal(t, []int{3, 4}, noted(db, "b", "k-1"))
		old = fromLog(t, db, cfg, before) // it need not say so again
		write(t, db, "k-1", 7)
		time.Sleep(time.Second)
		require.NoError(t, old())
		require.Equal(t, upTo(7), noted(db, "a", "k-1"))
	})
}

// changed is a log that was restored from a backup.
type changed struct {
	provider.Log
	id    provider.LogID
	place map[string]provider.LogPlace
}

func (c *changed) LogID(ctx context.Context) (provider.LogID, error) {
	if c.id.Lineage == "" {
		return c.Log.LogID(ctx)
	}
	return c.id, nil
}

func (c *changed) LogPlaces(ctx context.Context, ids []string) (map[string]provider.LogPlace, error) {
	if c.place != nil {
		return c.place, nil
	}
	return c.Log.LogPlaces(ctx, ids)
}

// Promise: G7.11
func TestALogThatWentBackStopsTheRunner(t *testing.T) {
	t.Parallel()
	for name, to := range map[string]changed{
		"another log": {id: provider.LogID{Lineage: "other"}},
		"no event":    {place: map[string]provider.LogPlace{}},
	} {
		synctest.Test(t, func(t *testing.T) {
			db, p := newDB(t), define(projector.Options{}, note("a"))
			write(t, db, "k-1", upTo(5)...)
			l := &changed{Log: db}
			r := newRunner(t, db, projector.FromLog(l), projector.RunnerConfig{}, p)
			stop := start(t, r)
			time.Sleep(time.Second)
			require.NoError(t, stop())
			l.id, l.place = to.id, to.place
			err := newRunner(t, db, projector.FromLog(l), projector.RunnerConfig{}, p).Run(t.Context())
			require.ErrorIs(t, err, projector.ErrLogChanged, name)
			t.Log(err)
		})
	}
}

// A message of an event that this log had before it was restored is not applied.
// Promise: G7.11
func TestAnEventThatTheLogLostIsStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
		time.Sleep(time.Second)
		write(t, db, "k-1", 1)
		m := published(t, db, "k-1")[0]
		lineage, _, _ := strings.Cut(m.Metadata[provider.HeaderLog], "/")
		m.Metadata[provider.HeaderLog] = lineage + "/before"
		f.deliver(t, m)
		require.Equal(t, upTo(1), noted(db, "a", "k-1"), "the restored log has it")
		lost := keyed("k-2", 1)
		lost.Metadata[provider.HeaderPosition], lost.Metadata[provider.HeaderLog] = "7", lineage+"/before"
		other := keyed("k-3", 1)
		other.Metadata[provider.HeaderPosition], other.Metadata[provider.HeaderLog] = "1", "another/"
		f.deliver(t, lost, other)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-2-1 stuck permanent no_event 1"}, rows(parked(t, db)))
		require.Equal(t, upTo(1), noted(db, "a", "k-3"), "an event of another log")
	})
}

// Promise: G7b.6
func TestLagIsExact(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := define(marked, note("a"))
		_, err := p.Lag(t.Context(), db)
		require.ErrorIs(t, err, projector.ErrNoCheckpoint)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		write(t, db, "k-1", 1, 2)
		began := time.Now()
		time.Sleep(time.Second)
		write(t, db, "k-1", 3)
		f.deliver(t, published(t, db, "k-1")[2])
		lag, err := p.Lag(t.Context(), db)
		require.NoError(t, err)
		require.Equal(t, projector.Lag{Events: 2, Oldest: began.UTC(), Live: true}, lag)
		time.Sleep(time.Minute)
		lag, err = p.Lag(t.Context(), db)
		require.NoError(t, err)
		require.Equal(t, projector.Lag{Position: 3, Live: true}, lag)
		require.NoError(t, stop())
	})
}

// Promise: G7b.7
func TestWaitWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		p := define(projector.Options{}, note("a"))
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		at := write(t, db, "k-1", 1)
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.ErrorIs(t, p.Wait(t.Context(), db, eventstore.Appended{}), projector.ErrInput)
		require.ErrorIs(t, p.Wait(t.Context(), db, write(t, newDB(t), "k-1", 1)), projector.ErrOtherLog)
		gone := at
		gone.Version, gone.Position = 2, 1
		require.ErrorIs(t, p.Wait(t.Context(), db, gone), projector.ErrNoEvent)
		require.NoError(t, stop())
	})
}

// lateLease is a store that acquires a lease only after 200 ms, also if the caller has given up.
type lateLease struct{ unit }

func (l lateLease) AcquireLease(ctx context.Context, name string, t claim.Terms) (has bool, err error) {
	acquired := make(chan struct{})
	go func() {
		defer close(acquired)
		time.Sleep(200 * time.Millisecond) // on the clock of a bubble
		has, err = l.unit.AcquireLease(context.WithoutCancel(ctx), name, t)
	}()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-acquired:
		return has, err
	}
}

// A program that ends while it acquires the lease of a reader releases it: the next one reads at once.
// Promise: R4.1
func TestAReaderThatEndsWhileItAcquiresTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", 1)
		stop := start(t, newRunner(t, lateLease{db}, projector.FromLog(db), projector.RunnerConfig{}, define(projector.Options{}, note("a"))))
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, stop())
		require.Empty(t, noted(db, "a", "k-1"))
		time.Sleep(time.Second)
		stop = fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{}, note("a")))
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, []int{1}, noted(db, "a", "k-1"))
		require.NoError(t, stop())
	})
}

// What a program of n handlers of a type does at its start, in all, grows with n: with its cube, these would take
// half an hour.
func TestThousandsOfHandlersOfAType(t *testing.T) {
	t.Parallel()
	db, ran := newDB(t), 0
	var handlers []projector.Handler[txn]
	for i := range 6000 {
		handlers = append(handlers, projector.On(fmt.Sprint("h", i), func(context.Context, txn, eventstore.Event[posted]) error { ran++; return nil }))
	}
	for n := 1; n <= 2; n++ {
		p := projector.Define("p", types, projector.Options{}, handlers...)
		at := write(t, db, "a-1", n)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.NoError(t, stop())
	}
	require.Equal(t, 2*len(handlers), ran)
}
