package redis_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/redis"
)

// built is a read model that can be rebuilt: a list and a score for each stream.
type built struct {
	space
	units *redis.Units
	lists string // the name of its table
}

func newBuilt(t *testing.T) built {
	s := sharedSpace(t)
	return built{s, s.own(t), s.prefix + "lists"}
}

func (b built) define(opts projector.Options, times int) *projector.Projector[pipe] {
	opts.Tables = []string{b.lists}
	return projector.Define("lists", types, opts,
		projector.OnCreate(func(context.Context, pipe) error { return nil }),
		projector.OnReset(func(ctx context.Context, tx pipe) error {
			for _, name := range streams(5) {
				tx.Unlink(ctx, b.units.Key(projector.Table(ctx, b.lists), name))
			}
			tx.Unlink(ctx, b.units.Key(projector.Table(ctx, b.lists)))
			return nil
		}),
		projector.On("posted", func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
			table := projector.Table(ctx, b.lists)
			tx.RPush(ctx, b.units.Key(table, e.Stream), times*e.Data.Stars)
			tx.ZIncrBy(ctx, b.units.Key(table), float64(times*e.Data.Stars), e.Stream)
			return nil
		}))
}

// shown returns the table that readers see.
func (b built) shown(t testing.TB) string {
	names, err := b.units.Shown(context.Background(), b.lists)
	require.NoError(t, err)
	return names[0]
}

// read returns the lists that readers see. It reads them again if others were shown meanwhile: those that are
// not shown any more may already have later events.
func (b built) read(t testing.TB) map[string][]int {
	for {
		table := b.shown(t)
		if lists := b.listsOf(t, table); b.shown(t) == table {
			return lists
		}
	}
}

func (b built) listsOf(t testing.TB, table string) map[string][]int {
	lists := map[string][]int{}
	for _, name := range streams(5) {
		all, err := b.client.LRange(context.Background(), b.units.Key(table, name), 0, -1).Result()
		require.NoError(t, err)
		for _, one := range all {
			n, err := strconv.Atoi(one)
			require.NoError(t, err)
			lists[name] = append(lists[name], n)
		}
	}
	return lists
}

// requireBuilt checks that each list has the numbers 1 to n, times a factor.
func requireBuilt(t testing.TB, lists map[string][]int, w *writer, times int) {
	t.Helper()
	for name, n := range w.n {
		want := upTo(n)
		for i := range want {
			want[i] *= times
		}
		require.Equal(t, want, lists[name], name)
	}
}

// generation returns the number of the last generation with a state, or 0.
func (b built) generation(t testing.TB, u provider.Builds, state provider.GenerationState) (number int) {
	all, err := u.Generations(context.Background(), "lists")
	require.NoError(t, err)
	for _, g := range all {
		if g.State == state {
			number = g.Generation
		}
	}
	return number
}

// switchFails is a second store that does not commit units with Switch, some times. So the process ends, as
// it were, after the switch in Redis.
type switchFails struct {
	*memory.DB
	mu   sync.Mutex
	left int
}

func (s *switchFails) Do(ctx context.Context, u provider.Unit, run func(context.Context, *memory.Model, provider.Found) (provider.Closing, error)) error {
	return s.DB.Do(ctx, u, func(ctx context.Context, tx *memory.Model, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, tx, found)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err == nil && u.Switch != nil && s.left > 0 {
			s.left--
			err = &provider.Error{Class: provider.ClassTransient, Err: errors.New("the second store does not commit")}
		}
		return c, err
	})
}

var because = projector.Decision{By: "ann", Reason: "a bug"}

// pauseBefore is the pause before the next of many events. It grows, because on a busy machine a rebuild would never catch
// up with a writer that does not slow down.
func pauseBefore(n int) time.Duration {
	return 2*time.Millisecond + time.Duration(n)*50*time.Microsecond
}

// A rebuild next to the live read model, a switch, and a return to the old one, while events come all the
// time, with both sources, and from the log with segments. A reader never sees a half-built read model.
// Promise: G5.9
func TestRebuildsNextToTheLiveReadModel(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"log", "log in segments", "broker"} {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			b, db := newBuilt(t), &switchFails{DB: newRouted(t)}
			w, f := newWriter(t, db.DB), make(subscription)
			w.write(100, streams(5)...)
			u := provider.Combine(b.units, db)
			// Three times a lease, the live reader shows its own tables again if the switch is not committed.
			cfg := projector.RunnerConfig{Lease: 10 * time.Second, Grace: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
			src, opts := projector.FromLog(db), projector.Options{}
			switch source {
			case "broker":
				src, opts = projector.Subscribe(f, "review"), marked
			case "log in segments":
				opts.Segments = 3
			}
			r, err := projector.NewRunner(u, src, cfg, b.define(opts, 1))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			<-r.Running()
			var all sync.WaitGroup
			stop := make(chan struct{})
			all.Go(func() { // events
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					case <-time.After(pauseBefore(n)):
					}
					name := streams(5)[n%5]
					w.write(1, name)
					if source == "broker" {
						m := w.published(name)
						f <- m[len(m)-1]
						<-m[len(m)-1].Acked()
					}
				}
			})
			eventually(t, "the first events are applied", func() bool { return len(b.read(t)["review-4"]) >= 100 })
			all.Go(func() { // a reader
				most := map[string]int{}
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
					}
					for name, list := range b.read(t) {
						if !slices.Equal(list, upTo(len(list))) || len(list) < most[name] {
							t.Errorf("the list of %s is %v, and had %d", name, list, most[name])
							return
						}
						most[name] = len(list)
					}
				}
			})
			for range 2 {
				db.mu.Lock()
				db.left = 2
				db.mu.Unlock()
				require.NoError(t, r.Rebuild(t.Context(), "lists", projector.Rebuild{How: projector.BlueGreen, Decision: because}))
			}
			began := time.Now()
			require.NoError(t, projector.Control(t.Context(), u, "lists", b.generation(t, u, provider.GenerationStandby), projector.Promote, because))
			eventually(t, "the old one is live again", func() bool { return b.generation(t, u, provider.GenerationLive) == 2 })
			t.Logf("the rollback took %s", time.Since(began))
			close(stop)
			all.Wait()
			eventually(t, "all is applied", func() bool {
				return !slices.ContainsFunc(streams(5), func(name string) bool { return len(b.read(t)[name]) < w.n[name] })
			})
			requireBuilt(t, b.read(t), w, 1)
			cancel()
			require.NoError(t, <-done)
		})
	}
}

// start starts a runner, and returns when the events that exist are applied.
func (b built) start(t *testing.T, u provider.Units[pipe], w *writer, version int) (*projector.Runner, func()) {
	cfg := projector.RunnerConfig{Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}
	r, err := projector.NewRunner(u, projector.FromLog(w.db), cfg, b.define(projector.Options{Version: version}, version))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	stop := func() { once.Do(func() { cancel(); require.NoError(t, <-done) }) }
	t.Cleanup(stop)
	<-r.Running()
	eventually(t, "all is applied", func() bool {
		return !slices.ContainsFunc(streams(5), func(name string) bool { return len(b.read(t)[name]) < w.n[name] })
	})
	return r, stop
}

// A rebuild in place empties the read model and ends the old generation in one transaction of Redis. If
// the second store does not commit then, the read model is built again all the same.
// Promise: G5.9
func TestARebuildInPlace(t *testing.T) {
	t.Parallel()
	b, db := newBuilt(t), &switchFails{DB: newMemory(t)}
	w, u := newWriter(t, db.DB), provider.Combine(b.units, db)
	w.write(50, streams(5)...)
	r, stop := b.start(t, u, w, 1)
	table := b.shown(t)
	require.NoError(t, b.client.RPush(t.Context(), b.units.Key(table, "review-0"), 999).Err())
	db.mu.Lock()
	db.left = 3
	db.mu.Unlock()
	require.NoError(t, r.Rebuild(t.Context(), "lists", projector.Rebuild{How: projector.InPlace, Decision: because}))
	w.write(5, streams(5)...)
	eventually(t, "all is applied", func() bool { return len(b.read(t)["review-4"]) == 55 })
	requireBuilt(t, b.read(t), w, 1)

	// The process ends between the two commits, and the rebuild is not requested again.
	stop()
	live := b.generation(t, u, provider.GenerationLive)
	failed := errors.New("killed")
	gens, err := u.Generations(t.Context(), "lists")
	require.NoError(t, err)
	old := gens[slices.IndexFunc(gens, func(g provider.Generation) bool { return g.Generation == live })]
	next := old
	old.State, next.State, next.Generation, next.Revision = provider.GenerationRetired, provider.GenerationLive, live+1, 0
	unit := provider.Unit{Projector: "lists", Generation: live + 1, Once: true, Switch: &provider.Switch{Set: []provider.Generation{old, next}}}
	commit, err := b.units.DoCombined(t.Context(), unit, func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
		tx.Unlink(ctx, b.units.Key(table, "review-0"))
		return provider.Closing{}, nil
	})
	require.NoError(t, err)
	require.Nil(t, commit)
	err = u.Do(t.Context(), provider.Unit{Projector: "lists", Generation: live, Messages: markedMessages(1).Messages}, func(ctx context.Context, tx pipe, f provider.Found) (provider.Closing, error) {
		f.Begin(0)
		tx.Incr(ctx, b.prefix+"never")
		return provider.Closing{}, failed
	})
	require.Error(t, err)
	for _, name := range streams(5) { // all that OnReset would have deleted
		require.NoError(t, b.client.Unlink(t.Context(), b.units.Key(table, name)).Err())
	}
	b.start(t, u, w, 1)
	requireBuilt(t, b.read(t), w, 1)
}

// A verification finds nothing in a right read model, and exactly the keys that somebody has changed. A
// repair mends exactly these.
// Promise: G5.9
func TestVerifyAndRepair(t *testing.T) {
	t.Parallel()
	b, db := newBuilt(t), newMemory(t)
	w, u := newWriter(t, db), provider.Combine(b.units, db)
	w.write(40, streams(5)...)
	b.start(t, u, w, 1)
	stop := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(pauseBefore(n)):
				w.write(1, streams(3)[n%3])
			}
		}
	})
	verify := func(v projector.Verification) *projector.Verified {
		t.Helper()
		result, err := b.define(projector.Options{}, 1).Verify(t.Context(), u, v, &projector.RunnerConfig{Lease: time.Minute, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		return result
	}
	require.Empty(t, verify(projector.Verification{}).Differences)

	table := b.shown(t)
	require.NoError(t, b.client.LSet(t.Context(), b.units.Key(table, "review-4"), 1, 77).Err())
	require.NoError(t, b.client.Unlink(t.Context(), b.units.Key(table, "review-3")).Err())
	require.NoError(t, b.client.Set(t.Context(), b.units.Key(table, "review-9"), "extra", 0).Err())
	require.NoError(t, b.client.ZIncrBy(t.Context(), b.units.Key(table), 1, "review-3").Err())
	other := b.units.Key(table+"x", "1") // of another table
	require.NoError(t, b.client.Set(t.Context(), other, "kept", 0).Err())
	found := verify(projector.Verification{Repair: because})
	texts := []string{}
	for _, d := range found.Differences {
		require.Equal(t, b.lists, d.Table)
		texts = append(texts, string(d.Key)+" want "+string(d.Want)+" got "+string(d.Got))
	}
	require.Len(t, texts, 4, "%s", texts)
	require.Equal(t, `{"key":""} want {"type":"zset","value":{"review-3":"820"}} got {"type":"zset","value":{"review-3":"821"}}`, texts[0])
	require.Contains(t, texts[1], `{"key":":review-3"} want {"type":"list",`)
	require.Contains(t, texts[1], `got `)
	require.Equal(t, `{"key":":review-4"} want {"type":"list","value":{"000000001":"2"}} got {"type":"list","value":{"000000001":"77"}}`, texts[2])
	require.Equal(t, `{"key":":review-9"} want  got {"type":"string","value":"extra"}`, texts[3])
	require.Len(t, found.Repaired, 4)
	close(stop)
	all.Wait()
	eventually(t, "all is applied", func() bool {
		return len(b.read(t)["review-2"]) == w.n["review-2"] && len(b.read(t)["review-0"]) == w.n["review-0"]
	})
	require.Empty(t, verify(projector.Verification{}).Differences)
	requireBuilt(t, b.read(t), w, 1)
	require.Equal(t, "kept", b.client.Get(t.Context(), other).Val())
}

// A deployment of handlers of another version builds a new read model. The old one is deleted in small
// steps.
// Promise: G5.9
func TestANewVersionAndTheEndOfTheOldOne(t *testing.T) {
	t.Parallel()
	b, db := newBuilt(t), newMemory(t)
	w, u := newWriter(t, db), provider.Combine(b.units, db)
	w.write(20, streams(5)...)
	_, stop := b.start(t, u, w, 1)
	old := b.shown(t)
	for i := range 3000 { // many keys
		require.NoError(t, b.client.Set(t.Context(), b.units.Key(old, "more", strconv.Itoa(i)), i, 0).Err())
	}
	stop()
	cfg := projector.RunnerConfig{Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}
	r, err := projector.NewRunner(u, projector.FromLog(db), cfg, b.define(projector.Options{Version: 2, RebuildOnChange: projector.BlueGreen}, 2))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	eventually(t, "the new version is live", func() bool { return b.generation(t, u, provider.GenerationLive) == 2 })
	eventually(t, "all is applied", func() bool { return len(b.read(t)["review-4"]) == 20 })
	requireBuilt(t, b.read(t), w, 2)
	require.NoError(t, projector.Control(t.Context(), u, "lists", 1, projector.Drop, because))
	eventually(t, "it is retired", func() bool { return b.generation(t, u, provider.GenerationRetired) == 1 })
	steps := 0
	for n := 1; n > 0; steps++ {
		n, err = u.ClearGeneration(t.Context(), provider.Build{Projector: "lists", Generation: 1}, []string{"lists/posted"}, []provider.TablePair{{Table: old}}, 700)
		require.NoError(t, err)
		require.LessOrEqual(t, n, 700+1000, "a step has at most one page of a scan more")
	}
	require.Greater(t, steps, 2)
	keys, err := b.client.Keys(t.Context(), b.units.Key(old)+":*").Result()
	require.NoError(t, err)
	require.Empty(t, keys)
	cancel()
	require.NoError(t, <-done)
	requireBuilt(t, b.read(t), w, 2)
}

// After a loss, readers see the live table again. Until all is applied again, a verification is refused.
// Promise: G5.4
func TestReadersSeeTheLiveTableAfterALoss(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s, db := newSpace(redistest.Client(t, server.URL)), newMemory(t)
	b := built{s, s.own(t), s.prefix + "lists"}
	w, u := newWriter(t, db), provider.Combine(b.units, db)
	w.write(5, streams(5)...)
	r, stop := b.start(t, u, w, 1)
	require.NoError(t, s.client.Save(t.Context()).Err())
	require.NoError(t, r.Rebuild(t.Context(), "lists", projector.Rebuild{How: projector.BlueGreen, Decision: because}))
	require.Equal(t, b.lists+"_g2", b.shown(t))
	for range 2 { // the snapshot shows another table, and then nothing is left
		stop()
		require.NoError(t, server.End("KILL"))
		require.NoError(t, server.Begin())
		_, err := b.define(projector.Options{}, 1).Verify(t.Context(), u, projector.Verification{}, &projector.RunnerConfig{Lease: time.Second, Logger: slog.New(slog.DiscardHandler)})
		require.ErrorIs(t, err, projector.ErrGeneration)
		require.NotEqual(t, b.lists+"_g2", b.shown(t))
		w.write(1, streams(5)...)
		_, stop = b.start(t, u, w, 1)
		eventually(t, "the live table is shown", func() bool { return b.shown(t) == b.lists+"_g2" })
		eventually(t, "it has all", func() bool { return len(b.read(t)["review-4"]) == w.n["review-4"] })
		requireBuilt(t, b.read(t), w, 1)
		require.NoError(t, server.DeleteData())
	}
}
