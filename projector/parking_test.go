package projector_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// note appends to the list of the event's stream, so that order shows.
func note(table string) onEvent {
	return func(_ context.Context, tx txn, e eventstore.Event[posted]) error {
		v, _ := tx.Get(table, e.Stream)
		list, _ := v.([]int)
		tx.Put(table, e.Stream, append(slices.Clone(list), e.Data.Stars))
		return nil
	}
}

func noted(db *memory.DB, table, key string) (list []int) {
	db.View(func(m *memory.Model) {
		v, _ := m.Get(table, key)
		list, _ = v.([]int)
	})
	return list
}

// unless is note, but for events that bad says so of.
func unless(table string, bad func(e eventstore.Event[posted]) error) onEvent {
	return func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		if err := bad(e); err != nil {
			return err
		}
		return note(table)(ctx, tx, e)
	}
}

// broken is a fault that can be mended.
type broken struct{ mended atomic.Bool }

// first fails the first event of stream "k".
func (b *broken) first(e eventstore.Event[posted]) error {
	if e.Stream == "k" && e.Data.Stars == 1 && !b.mended.Load() {
		return projector.Permanent(errors.New("broken"))
	}
	return nil
}

var person = projector.Decision{By: "ann", Reason: "mended"}

func operator(t *testing.T, db unit, ps ...*projector.Projector[txn]) *projector.Runner {
	t.Helper()
	r, err := projector.NewRunner(db, projector.Source{}, nil, ps...)
	require.NoError(t, err)
	return r
}

// of says what a parked message is, for people.
func of(list []projector.Parked) (text []string) {
	for _, p := range list {
		text = append(text, strings.TrimSuffix(fmt.Sprint(p.MessageID, " ", p.Handler, " ", p.Class, " ", p.Code), " "))
	}
	return text
}

func TestAParkedMessageHoldsItsKey(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, db *memory.DB, p *projector.Projector[txn], fault *broken) []int{
		"until it is replayed": func(t *testing.T, db *memory.DB, p *projector.Projector[txn], fault *broken) []int {
			fault.mended.Store(true)
			done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{Seqs: []int64{parked(t, db)[0].Seq}}, projector.ReplayConfig{Decision: person})
			require.NoError(t, err)
			require.Zero(t, done.Failed)
			time.Sleep(5 * time.Second) // where the runner was quicker with what waited, it may be at it
			return []int{1, 2, 3}
		},
		"until it is skipped": func(t *testing.T, db *memory.DB, _ *projector.Projector[txn], _ *broken) []int {
			n, err := db.SkipParked(t.Context(), projector.ParkedFilter{Seqs: []int64{parked(t, db)[0].Seq}}, person)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			time.Sleep(5 * time.Second) // of the bubble: the runner brings back what waited
			return []int{2, 3}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, fault := newDB(t), make(feed), &broken{}
				p := define(marked, unless("a", fault.first))
				stop := run(t, db, f, projector.RunnerConfig{}, p)
				for i := 1; i <= 3; i++ {
					f.deliver(t, keyed("k", i))
					f.deliver(t, keyed("other", i))
				}
				f.deliver(t, keyed("k", 1))
				f.deliver(t, keyed("k", 3))
				require.Equal(t, []string{"k-1 p/a permanent", "k-2 p/a held", "k-3 p/a held"}, of(parked(t, db)), "each once")
				time.Sleep(time.Minute)
				require.Empty(t, noted(db, "a", "k"))
				require.Equal(t, []int{1, 2, 3}, noted(db, "a", "other"))
				want := end(t, db, p, fault)
				require.Empty(t, parked(t, db))
				for _, again := range []int{1, 2, 3, 4} {
					f.deliver(t, keyed("k", again))
				}
				require.NoError(t, stop())
				require.Equal(t, append(want, 4), noted(db, "a", "k"))
			})
		})
	}
}

// Handlers that take the same type go on; those of which the parked message was part of the story wait.
func TestOnePoisonedHandlerDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	db, f, fault := newDB(t), make(feed), &broken{}
	other := projector.On("edited", func(ctx context.Context, tx txn, e eventstore.Event[unhandled]) error {
		tx.Put("edited", e.Stream, true)
		return nil
	})
	p := projector.Define("p", types, marked, projector.On("a", unless("a", fault.first)), projector.On("b", note("b")), other)
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	f.deliver(t, keyed("k", 1))
	f.deliver(t, keyed("k", 2))
	edited := keyed("k", 3)
	edited.Metadata[outbox.HeaderType] = "unhandled"
	f.deliver(t, edited)
	require.Equal(t, []string{"k-1 p/a permanent", "k-2 p/a held", "k-3 p/edited held"}, of(parked(t, db)))
	require.Equal(t, []int{1, 2}, noted(db, "b", "k"))
	require.NoError(t, stop())
	fault.mended.Store(true)
	done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{Projector: "p", Key: "k"}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Replayed: 3}, done)
	require.Equal(t, []int{1, 2}, noted(db, "a", "k"))
	require.Equal(t, []int{1, 2}, noted(db, "b", "k"))
}

func TestParkMessageHoldsNothing(t *testing.T) {
	t.Parallel()
	db, f, fault := newDB(t), make(feed), &broken{}
	stop := run(t, db, f, projector.RunnerConfig{}, define(projector.Options{Markers: true, Parking: projector.ParkMessage}, unless("a", fault.first)))
	for i := 1; i <= 3; i++ {
		f.deliver(t, keyed("k", i))
	}
	require.NoError(t, stop())
	require.Equal(t, []string{"k-1 p/a permanent"}, of(parked(t, db)))
	require.Equal(t, []int{2, 3}, noted(db, "a", "k"))
}

func TestHaltEndsTheRunnerUntilTheMessageIsResolved(t *testing.T) {
	t.Parallel()
	db, f, fault := newDB(t), make(feed), &broken{}
	p := define(projector.Options{Markers: true, Parking: projector.Halt}, unless("a", fault.first))
	r, err := projector.NewRunner(db, projector.Subscribe(f, "review"), nil, p)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- r.Run(t.Context()) }()
	m := keyed("k", 1)
	f <- m
	require.ErrorIs(t, <-done, projector.ErrHalted)
	select {
	case <-m.Acked():
		t.Fatal("it must come again")
	default:
	}
	require.Equal(t, []string{"k-1 p/a permanent"}, of(parked(t, db)))
	again, err := projector.NewRunner(db, projector.Subscribe(f, "review"), nil, p)
	require.NoError(t, err)
	require.ErrorIs(t, again.Run(t.Context()), projector.ErrHalted, "it does not start")
	fault.mended.Store(true)
	replays, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person})
	require.NoError(t, err)
	require.Equal(t, 1, replays.Replayed)
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	f.deliver(t, keyed("k", 1))
	f.deliver(t, keyed("k", 2))
	require.NoError(t, stop())
	require.Equal(t, []int{1, 2}, noted(db, "a", "k"))
}

// What did not get as far as a handler halts the runner once, and not again when it was skipped; without an id nobody could tell.
func TestHaltEndsWithWhatIsSkipped(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]*message.Message{
		"unregistered": msg("1", "who knows", "{}"), "malformed": msg("1", "", "{}"), "without an id": msg("", "posted", "{}"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, f := newDB(t), make(feed, 1)
			p := define(projector.Options{Markers: true, Parking: projector.Halt}, note("a"))
			first := m.Copy()
			f <- first
			for range 2 { // halted, and still so
				r, err := projector.NewRunner(db, projector.Subscribe(f, "review"), nil, p)
				require.NoError(t, err)
				require.ErrorIs(t, r.Run(t.Context()), projector.ErrHalted)
			}
			require.Equal(t, m.UUID == "", isAcked(first), "else it comes again")
			require.Len(t, parked(t, db), 1)
			n, err := db.SkipParked(t.Context(), projector.ParkedFilter{}, person)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			stop := run(t, db, f, projector.RunnerConfig{}, p)
			if m.UUID != "" {
				f.deliver(t, m)
			}
			f.deliver(t, keyed("k", 2))
			require.NoError(t, stop())
			require.Equal(t, []int{2}, noted(db, "a", "k"))
			require.Empty(t, parked(t, db))
		})
	}
}

func TestAttemptsOutliveARunner(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, tries := newDB(t), &atomic.Int32{}
		p := define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
			tries.Add(1)
			return errors.New("not today")
		})
		for range 2 { // each is stopped in its third pause
			f := make(feed)
			stop := run(t, db, f, projector.RunnerConfig{}, p)
			f <- keyed("k", 1)
			time.Sleep(350 * time.Millisecond)
			if tries.Load() < 5 {
				require.Empty(t, parked(t, db))
			}
			require.NoError(t, stop())
		}
		list := parked(t, db)
		require.Len(t, list, 1)
		require.EqualValues(t, 5, tries.Load())
		require.Equal(t, 5, list[0].Attempts)
		n, err := db.CountAttempt(t.Context(), "", projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "k-1"}, -1)
		require.NoError(t, err)
		require.Equal(t, 1, n, "they are forgotten with its parking")
	})
}

// A message that a runner had under way when it died runs with nothing beside it, and is parked once it has ended as many
// as its budget. What ran beside it suffers nothing.
func TestASuspectRunsAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		killer, bystander := keyed("k", 1), keyed("other", 1)
		var now, beside atomic.Int32
		p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if n := now.Add(1); n > 1 && (e.Stream == "k" || e.Stream == "other") {
				beside.Add(1)
			}
			defer now.Add(-1)
			return note("a")(ctx, tx, e)
		})
		name := func(m string) projector.Attempt {
			return projector.Attempt{Projector: "p", Handler: "p/a", MessageID: m}
		}
		for life := range 5 {
			runner := fmt.Sprint("life ", life)
			require.NoError(t, db.Alive(t.Context(), runner, 15*time.Second))
			attempts := []projector.Attempt{name(killer.UUID)}
			if life == 0 {
				attempts = append(attempts, name(bystander.UUID))
			}
			for _, a := range attempts {
				_, _, err := db.BeginAlone(t.Context(), runner, a, -1)
				require.NoError(t, err)
			}
		}
		begin := time.Now()
		stop := run(t, db, f, projector.RunnerConfig{Concurrency: 8}, p)
		f.deliver(t, bystander)
		require.Less(t, time.Since(begin), time.Second, "once is no reason to wait")
		f.deliver(t, killer)
		require.NoError(t, stop())
		require.GreaterOrEqual(t, time.Since(begin), 14*time.Second, "they might have lived")
		require.Zero(t, beside.Load())
		require.Equal(t, []int{1}, noted(db, "a", "other"))
		require.Empty(t, noted(db, "a", "k"))
		require.Equal(t, []string{"k-1 p/a unknown vanished"}, of(parked(t, db)))
		require.Equal(t, 5, parked(t, db)[0].Attempts)
	})
}

// A handler that never returns is left behind once, counted until its budget is spent, and parked.
func TestAHandlerThatNeverReturnsIsParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, calls := newDB(t), make(feed), &atomic.Int32{}
		release := make(chan struct{})
		p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Stream == "k" {
				calls.Add(1)
				<-release
			}
			return note("a")(ctx, tx, e)
		})
		stop := run(t, db, f, projector.RunnerConfig{Concurrency: 2, Timeout: 10 * time.Second}, p)
		m := keyed("k", 1)
		f <- m
		f.deliver(t, keyed("other", 1))
		<-m.Acked()
		list := parked(t, db)
		require.Equal(t, []string{"k-1 p/a unknown stuck"}, of(list))
		require.Equal(t, 5, list[0].Attempts)
		require.EqualValues(t, 1, calls.Load(), "nothing is gained by leaving five behind")
		close(release)
		require.NoError(t, stop())
		require.Empty(t, noted(db, "a", "k"), "what it does late has no effect")
		require.Equal(t, []int{1}, noted(db, "a", "other"))
	})
}

func TestUnregisteredTypesComeBackByThemselves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		older := projector.Define("p", eventstore.NewTypes(eventstore.Type[unhandled]("unhandled")), marked,
			projector.On("edited", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil }))
		stop := run(t, db, f, projector.RunnerConfig{}, older)
		for i := 1; i <= 3; i++ {
			f.deliver(t, keyed("k", i))
		}
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1  permanent unregistered", "k-2  permanent unregistered", "k-3  permanent unregistered"}, of(parked(t, db)))
		stop = run(t, db, f, projector.RunnerConfig{}, define(marked, note("a"), note("b")))
		time.Sleep(2 * time.Second)
		f.deliver(t, keyed("k", 4))
		require.NoError(t, stop())
		require.Empty(t, parked(t, db))
		require.Equal(t, []int{1, 2, 3, 4}, noted(db, "a", "k"))
		require.Equal(t, []int{1, 2, 3, 4}, noted(db, "b", "k"))
	})
}

func TestUnsafeRetentionIsRefused(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	day := 24 * time.Hour
	for name, cfg := range map[string]projector.RunnerConfig{
		"shorter than the default horizon": {Markers: marker.Retention{Window: 7 * day}},
		"shorter than the horizon":         {Markers: marker.Retention{Horizon: 30 * day, Window: 30 * day}},
		"negative":                         {Markers: marker.Retention{Window: -day}},
		"negative horizon":                 {Markers: marker.Retention{Horizon: -day, Window: day}},
		"resolved ones for less":           {Keep: 7 * day},
	} {
		_, err := projector.NewRunner(db, projector.Subscribe(make(feed), "review"), &cfg, define(marked, add))
		require.ErrorIs(t, err, marker.ErrUnsafe, name)
	}
	_, err := marker.Prune(t.Context(), db, marker.Retention{Window: time.Hour}, "p/a")
	require.ErrorIs(t, err, marker.ErrUnsafe)
}

// A runner prunes by itself; what comes again inside the window is still skipped, and what was parked before is not replayed.
func TestRunnersPruneMarkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var later, pruned atomic.Int64
		db, err := memory.New(&memory.Config{Clock: func() time.Time { return time.Now().Add(time.Duration(later.Load())) }})
		require.NoError(t, err)
		f, fault, day := make(feed), &broken{}, int64(24*time.Hour)
		cfg := projector.RunnerConfig{Observer: projector.Observer{Pruned: func(n int) { pruned.Add(int64(n)) }}}
		p := define(marked, unless("a", fault.first))
		stop := run(t, db, f, cfg, p)
		f.deliver(t, keyed("k", 1))
		f.deliver(t, keyed("old", 1))
		later.Store(2 * day)
		f.deliver(t, keyed("young", 1))
		later.Store(8*day + int64(time.Minute))
		time.Sleep(2 * time.Minute)
		require.EqualValues(t, 1, pruned.Load())
		f.deliver(t, keyed("young", 1))
		require.Equal(t, []int{1}, noted(db, "a", "young"))
		fault.mended.Store(true)
		done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person})
		require.NoError(t, err)
		require.Equal(t, projector.Replays{Failed: 1}, done)
		require.Equal(t, []string{"k-1 p/a permanent pruned"}, of(parked(t, db)))
		done, err = operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Force: true})
		require.NoError(t, err)
		require.Equal(t, projector.Replays{Replayed: 1}, done)
		require.NoError(t, stop())
	})
}
