package redis_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// countInMemory is count for a read model in memory.
func countInMemory(_ context.Context, tx *memory.Model, e eventstore.Event[posted]) error {
	n, _ := tx.Get("stars", e.Data.Product)
	sum, _ := n.(int)
	tx.Put("stars", e.Data.Product, sum+e.Data.Stars)
	return nil
}

func countedInMemory(db *memory.DB) map[string]int {
	sum := map[string]int{}
	db.View(func(m *memory.Model) {
		for product, n := range m.All("stars") {
			sum[product] = n.(int)
		}
	})
	return sum
}

// Promise: G5.2
func TestARunnerRequiresASecondStore(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	_, err := projector.NewRunner(s.units(t), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, s.count))
	require.ErrorContains(t, err, "provider.Combine(units, db)")
	_, err = projector.NewRunner(provider.Combine(s.units(t), newMemory(t)), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, s.count))
	require.NoError(t, err)
	emits := projector.Define("stars", types, marked, projector.OnEmit("posted",
		func(context.Context, pipe, eventstore.Event[posted]) ([]outbox.Message, error) { return nil, nil }))
	_, err = projector.NewRunner(provider.Combine(s.units(t), newMemory(t)), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, emits)
	require.ErrorContains(t, err, "outbox")
}

// Both runners get each event, every third one twice, every fifth one three times.
// Promise: G5.11
func TestRedeliveryTakesEffectAgain(t *testing.T) {
	t.Parallel()
	list := events(60, 7)
	var delivered []event
	for i, e := range list {
		delivered = append(delivered, e)
		if i%3 == 0 {
			delivered = append(delivered, e)
		}
		if i%5 == 0 {
			delivered = append(delivered, e, e)
		}
	}
	s, db, exact := sharedSpace(t), newMemory(t), newMemory(t)
	log, unmarked := &text{}, atomic.Int64{}
	f := make(subscription)
	stop := run(t, provider.Combine(s.units(t), db), f, projector.RunnerConfig{
		Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Observer: projector.RunnerObserver{Unmarked: func(handler string) {
			require.Equal(t, "stars/posted", handler)
			unmarked.Add(1)
		}},
	}, define(marked, s.count))
	inMemory := make(subscription)
	stopMemory := run(t, exact, inMemory, projector.RunnerConfig{}, projector.Define("stars", types, marked, projector.On("posted", countInMemory)))
	for _, e := range delivered {
		f.deliver(t, e)
		inMemory.deliver(t, e)
	}
	stop()
	stopMemory()
	require.Equal(t, stars(list...), countedInMemory(exact), "with markers each event counts once")
	require.Equal(t, stars(delivered...), s.counted(t), "on Redis each delivery counts")
	require.NotEqual(t, stars(list...), s.counted(t))
	require.EqualValues(t, len(delivered), unmarked.Load())
	require.Equal(t, 1, strings.Count(log.String(), "markers are a no-op"), log.String())
	require.Regexp(t, `level=DEBUG msg="markers are a no-op.*projector=stars`, log.String())
	require.NotRegexp(t, `level=(INFO|WARN|ERROR)`, log.String())
	t.Logf("%d events, %d deliveries: %d stars with markers, %d on Redis", len(list), len(delivered), sum(countedInMemory(exact)), sum(s.counted(t)))
}

func sum(of map[string]int) (n int) {
	for _, one := range of {
		n += one
	}
	return n
}

// appendID appends the id of an event to the list of its key.
func (s space) appendID(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
	tx.RPush(ctx, s.prefix+"of "+e.Stream, e.ID)
	return nil
}

func (s space) appended(t testing.TB, key string) []string {
	list, err := s.client.LRange(context.Background(), s.prefix+"of "+key, 0, -1).Result()
	require.NoError(t, err)
	return list
}

// idsOf returns the expected order: the ids of a key as they were sent.
func idsOf(list []event, key string) (ids []string) {
	for _, e := range list {
		if e.Key == key {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// Several messages are in flight, and some fail: they are parked with those behind them, and are
// applied in order.
// Promise: G5.10
func TestMessagesOfAKeyAreAppliedInOrder(t *testing.T) {
	t.Parallel()
	s, db, f := sharedSpace(t), newMemory(t), make(subscription)
	list := events(300, 11)
	var calls atomic.Int64
	flaky := func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if err := s.appendID(ctx, tx, e); err != nil {
			return err
		}
		if calls.Add(1)%7 == 0 {
			return errors.New("not yet")
		}
		return nil
	}
	var wasParked atomic.Int64
	cfg := projector.RunnerConfig{Concurrency: 4, Observer: projector.RunnerObserver{Parked: func(string, string, projector.Class, string) { wasParked.Add(1) }}}
	cfg.Retry.Attempts = 1000
	stop := run(t, provider.Combine(s.units(t), db), f, cfg, define(projector.Options{}, flaky))
	for _, e := range list {
		f <- e.message()
	}
	for _, key := range keysOf(list) {
		eventually(t, key, func() bool { return len(s.appended(t, key)) >= len(idsOf(list, key)) })
		require.Equal(t, idsOf(list, key), s.appended(t, key))
	}
	stop()
	require.Empty(t, parked(t, db, projector.ParkedFilter{}))
	require.Positive(t, wasParked.Load())
}

func keysOf(list []event) (keys []string) {
	for _, e := range list {
		if !slices.Contains(keys, e.Key) {
			keys = append(keys, e.Key)
		}
	}
	return keys
}

// A message that always fails holds its key in the second store until a person decides about it.
// Promise: G5.10, G5.12
func TestPoisonIsParkedInTheSecondStore(t *testing.T) {
	t.Parallel()
	s, db, f := sharedSpace(t), newMemory(t), make(subscription)
	list := events(20, 2)
	poison, behind := list[2], idsOf(list[3:], list[2].Key)
	wrong := s.prefix + "a string"
	require.NoError(t, s.client.Set(t.Context(), wrong, "s", 0).Err())
	var fixed atomic.Bool
	handler := func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if e.ID == poison.ID && !fixed.Load() {
			// a command of the same message, which EXEC applies
			tx.SAdd(ctx, s.prefix+"also", e.ID)
			tx.HIncrBy(ctx, s.prefix+"attempts", e.ID, 1)
			tx.LPush(ctx, wrong, e.ID)
			return nil
		}
		return s.appendID(ctx, tx, e)
	}
	cfg := projector.RunnerConfig{Version: "v1"}
	cfg.Retry.Attempts = 3
	stop := run(t, provider.Combine(s.units(t), db), f, cfg, define(marked, handler))
	for _, e := range list {
		f.deliver(t, e)
	}
	stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
	eventually(t, "the message is stuck", func() bool { return len(parked(t, db, stuck)) == 1 })
	row := parked(t, db, stuck)[0]
	require.Equal(t, []any{poison.ID, poison.Key, "stars/posted", projector.ClassPermanent, provider.CodePartly, 1, "v1"},
		[]any{row.MessageID, row.Key, row.Handler, row.Class, row.Code, row.Attempts, row.Version})
	require.JSONEq(t, string(poison.message().Payload), string(row.Payload))
	require.Equal(t, "1", s.client.HGet(t.Context(), s.prefix+"attempts", poison.ID).Val(), "it is not tried again")

	held := parked(t, db, projector.ParkedFilter{Key: poison.Key})[1:]
	for i, row := range held {
		require.Equal(t, behind[i], row.MessageID)
		require.Equal(t, provider.ClassHeld, row.Class)
	}
	require.Len(t, held, len(behind))
	require.Equal(t, idsOf(list[:2], poison.Key), append([]string{}, s.appended(t, poison.Key)...))
	for _, key := range keysOf(list) {
		if key != poison.Key {
			require.Equal(t, idsOf(list, key), s.appended(t, key), "no other key is held")
		}
	}

	fixed.Store(true)
	n, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "fixed"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	eventually(t, "no message is parked", func() bool { return len(parked(t, db, projector.ParkedFilter{})) == 0 })
	require.Equal(t, idsOf(list, poison.Key), s.appended(t, poison.Key), "in order")
	kept := parked(t, db, projector.ParkedFilter{States: []projector.ParkedState{projector.StateReplayed}})
	require.Len(t, kept, 1)
	require.Equal(t, "ann", kept[0].By)
	stop()
}

// Promise: G5.10
func TestASkippedMessageReleasesItsKey(t *testing.T) {
	t.Parallel()
	s, db, f := sharedSpace(t), newMemory(t), make(subscription)
	list := events(5, 1)
	handler := func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if e.ID == list[1].ID {
			return projector.Permanent(errors.New("poison"))
		}
		return s.appendID(ctx, tx, e)
	}
	stop := run(t, provider.Combine(s.units(t), db), f, projector.RunnerConfig{}, define(marked, handler))
	for _, e := range list {
		f.deliver(t, e)
	}
	require.Len(t, parked(t, db, projector.ParkedFilter{}), 4)
	_, err := projector.Skip(t.Context(), db, projector.ParkedFilter{Seqs: []int64{parked(t, db, projector.ParkedFilter{})[0].Seq}},
		projector.Decision{By: "ann", Reason: "the message cannot be applied"})
	require.NoError(t, err)
	eventually(t, "no message is parked", func() bool { return len(parked(t, db, projector.ParkedFilter{})) == 0 })
	require.Equal(t, idsOf(slices.Delete(slices.Clone(list), 1, 2), list[0].Key), s.appended(t, list[0].Key))
	stop()
}

// A message that was in flight when a runner's process ended is parked first, and then tried
// alone.
// Promise: G5.10
func TestASuspectIsFoundThroughTheSecondStore(t *testing.T) {
	t.Parallel()
	s, db, f := sharedSpace(t), newMemory(t), make(subscription)
	list := events(3, 5) // three keys
	_, err := db.Beat(t.Context(), "a runner that was killed", time.Hour, time.Hour)
	require.NoError(t, err)
	require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "stars"}, provider.Worker{Runner: "a runner that was killed"}, []string{list[1].ID}))
	codes := make(chan string, 10)
	stop := run(t, provider.Combine(s.units(t), db), f, projector.RunnerConfig{
		Careful:  true,
		Observer: projector.RunnerObserver{Parked: func(_, _ string, _ projector.Class, code string) { codes <- code }},
	}, define(marked, s.count))
	for _, e := range list {
		f.deliver(t, e)
	}
	require.Equal(t, "crashed", <-codes)
	eventually(t, "no message is parked", func() bool { return len(parked(t, db, projector.ParkedFilter{})) == 0 })
	stop()
	require.Empty(t, codes, "no other message was parked")
	require.Equal(t, stars(list...), s.counted(t))
}

// Promise: G5.1
func TestWaitReportsThatThereAreNoMarkers(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	p := define(marked, s.count)
	at, err := db.Append(t.Context(), "review-1", eventstore.NoStream, []eventstore.Draft{{
		ID: "0198a5b6-6f3c-7000-8000-000000000001", Type: "posted", Schema: 1, Data: []byte(`{"Product":"p","Stars":1}`)}})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Wait(ctx, db, at), context.DeadlineExceeded, "another process may run the projector in a store with markers")
	_, err = projector.NewRunner(provider.Combine(s.units(t), db), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, p)
	require.NoError(t, err)
	require.ErrorIs(t, p.Wait(patience.Context(t), db, at), projector.ErrNoMarkers)
}

// A unit of the store is open while the commands are sent, and is rolled back if they are not: no
// message is parked twice.
func TestTheSecondStoreCommitsAfterRedis(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	both := provider.Combine(s.units(t), db)
	u := provider.Unit{Projector: "p", Messages: []provider.Message{{ID: "1", Lane: provider.LaneOfKey("k"), Mark: true, Handlers: []provider.Handler{{Name: "p/h"}}}}}
	park := provider.Closing{Park: []provider.Aside{{Parked: provider.Parked{Projector: "p", MessageID: "1", Lane: provider.LaneOfKey("k")}}}}
	require.NoError(t, s.client.Set(t.Context(), s.prefix+"string", "s", 0).Err())
	err := both.Do(t.Context(), u, func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
		found.Begin(0)
		tx.LPush(ctx, s.prefix+"string", 1)
		return park, nil
	})
	requireClass(t, err, provider.ClassUnknown, "WRONGTYPE")
	require.ErrorAs(t, err, new(*provider.MessageError))
	require.Empty(t, parked(t, db, projector.ParkedFilter{}))

	// In this order the commit of the store can fail after EXEC.
	ctx, cancel := context.WithCancel(t.Context())
	ending := provider.Combine(after{s.units(t), cancel}, db)
	for _, ctx := range []context.Context{ctx, t.Context(), t.Context()} {
		err := ending.Do(ctx, u, func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
			require.Equal(t, [][]bool{{true}}, found.Fresh, "the store has no marker")
			tx.Incr(ctx, s.prefix+"k")
			return provider.Closing{}, nil
		})
		if ctx != t.Context() {
			requireClass(t, err, provider.ClassShutdown, "")
		} else {
			require.NoError(t, err)
		}
	}
	require.Equal(t, "3", s.client.Get(t.Context(), s.prefix+"k").Val())
}

// after calls a function after a unit was sent.
type after struct {
	provider.Units[pipe]
	fn func()
}

func (a after) Do(ctx context.Context, u provider.Unit, run func(context.Context, pipe, provider.Found) (provider.Closing, error)) error {
	err := a.Units.Do(ctx, u, run)
	a.fn()
	return err
}

// aborted makes the unit of the second store fail after a unit was sent, as if the process ended
// between the two commits. It does so once for each value of fails.
type aborted struct {
	provider.Units[pipe]
	fails chan struct{}
}

func (a aborted) Do(ctx context.Context, u provider.Unit, run func(context.Context, pipe, provider.Found) (provider.Closing, error)) error {
	if err := a.Units.Do(ctx, u, run); err != nil {
		return err
	}
	select {
	case <-a.fails:
		return &provider.Error{Class: provider.ClassTransient, Err: errors.New("the second store does not commit")}
	default:
		return nil
	}
}

// From the log, an event is applied at least once: again, with its whole unit, if the second store, which
// has the checkpoint, does not commit after EXEC.
// Promise: G5.11
func TestEventsOfTheLogAreAppliedAtLeastOnce(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	var at eventstore.Appended
	for range 20 {
		drafts, err := types.Encode(t.Context(), posted{"p", 1})
		require.NoError(t, err)
		at, err = db.Append(t.Context(), "review-1", eventstore.Any, drafts)
		require.NoError(t, err)
	}
	u, p := aborted{s.units(t), make(chan struct{}, 3)}, define(projector.Options{}, s.count)
	for range cap(u.fails) {
		u.fails <- struct{}{}
	}
	r, err := projector.NewRunner(provider.Combine(u, db), projector.FromLog(db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	require.NoError(t, p.Wait(t.Context(), db, at))
	cancel()
	require.NoError(t, <-done)
	require.Equal(t, map[string]int{"p": 20 + 10 + 5 + 20}, s.counted(t), "a unit that fails is halved")
	c, err := db.Checkpoint(t.Context(), provider.Build{Projector: p.Name()})
	require.NoError(t, err)
	require.EqualValues(t, 20, c.Place.Position)
}

func TestCombineRefusesWhatItDoesNotKeep(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	both := provider.Combine(s.units(t), db)
	require.Equal(t, provider.Keeps{}, both.Keeps())
	require.Equal(t, provider.Keeps{}, provider.Combine(newMemory(t), db).Keeps(), "two stores are never atomic")
	dry := provider.Unit{Projector: "p", DryRun: func([]provider.Change) { t.Error("DryRun was called") }}
	for _, c := range []struct {
		u provider.Unit
		c provider.Closing
	}{{dry, provider.Closing{}}, {provider.Unit{Projector: "p"}, provider.Closing{Output: []outbox.Message{{Topic: "t"}}}}} {
		err := both.Do(t.Context(), c.u, func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
			tx.Incr(ctx, s.prefix+"k")
			return c.c, nil
		})
		requireClass(t, err, provider.ClassPermanent, "not_kept")
	}
	require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val())
}

func TestGenerationsAreThoseOfTheSecondStore(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	both := provider.Combine(s.units(t), db)
	do := func(u provider.Unit, value int, fails error) error {
		return both.Do(t.Context(), u, func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
			tx.Set(ctx, s.prefix+"live", value, 0)
			return provider.Closing{}, fails
		})
	}
	build := provider.Build{Projector: "p", Generation: 2}
	u := provider.Unit{Projector: "p", Generation: 2, Once: true, Switch: &provider.Switch{Set: []provider.Generation{{Build: build, State: provider.GenerationLive}}}}
	failed := errors.New("failed")
	require.ErrorIs(t, do(u, 9, failed), failed)
	all, err := both.Generations(t.Context(), "p")
	require.NoError(t, err)
	require.Empty(t, all)
	require.NoError(t, do(u, 2, nil))
	all, err = db.Generations(t.Context(), "p")
	require.NoError(t, err)
	require.Equal(t, 2, provider.LiveGeneration(all))
	requireClass(t, do(provider.Unit{Projector: "p", Once: true, Switch: &provider.Switch{Snapshot: true}}, 9, nil), provider.ClassPermanent, "not_kept")

	set, err := both.SetGeneration(t.Context(), provider.Generation{Build: provider.Build{Projector: "p", Generation: 1}, State: provider.GenerationRetired})
	require.NoError(t, err)
	require.True(t, set)
	require.ErrorIs(t, do(provider.Unit{Projector: "p"}, 9, nil), provider.ErrEnded)
	require.NoError(t, do(provider.Unit{Projector: "p", Generation: 2}, 3, nil))
	require.Equal(t, "3", s.client.Get(t.Context(), s.prefix+"live").Val())
}

// notReady is a store that is not migrated.
type notReady struct{ *memory.DB }

func (notReady) ReadyFor(context.Context, provider.Service) error { return errors.New("not migrated") }

func TestARunnerChecksThatTheSecondStoreIsReady(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	r, err := projector.NewRunner(provider.Combine(s.units(t), notReady{newMemory(t)}), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, s.count))
	require.NoError(t, err)
	require.ErrorContains(t, r.Run(t.Context()), "not migrated")
}
