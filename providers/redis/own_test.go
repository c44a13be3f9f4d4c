package redis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/redis"
)

// own returns units with markers of their own.
func (s space) own(t testing.TB) *redis.Units {
	u, err := redis.New(s.client, &redis.Config{OwnMarkers: true, Prefix: strings.Trim(strings.ReplaceAll(s.prefix, ":", "_"), "_")})
	require.NoError(t, err)
	return u
}

// list appends the number of an event to the list of its stream, and adds it to the stream's sum.
func (s space) list(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
	tx.RPush(ctx, s.prefix+"list:"+e.Stream, e.Data.Stars)
	tx.HIncrBy(ctx, s.prefix+"sums", e.Stream, int64(e.Data.Stars))
	return nil
}

// listed returns the list of a stream.
func (s space) listed(t testing.TB, stream string) (list []int) {
	all, err := s.client.LRange(context.Background(), s.prefix+"list:"+stream, 0, -1).Result()
	require.NoError(t, err)
	for _, one := range all {
		n, err := strconv.Atoi(one)
		require.NoError(t, err)
		list = append(list, n)
	}
	return list
}

func upTo(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i + 1
	}
	return list
}

// requireLists checks that each stream has the numbers 1 to n, in order, and their sum.
func (s space) requireLists(t testing.TB, counts map[string]int) {
	t.Helper()
	for stream, n := range counts {
		require.Equal(t, upTo(n), s.listed(t, stream), stream)
		sum, err := s.client.HGet(context.Background(), s.prefix+"sums", stream).Int()
		require.NoError(t, err)
		require.Equal(t, n*(n+1)/2, sum, stream)
	}
}

// writer appends numbered events to streams.
type writer struct {
	t  testing.TB
	db *memory.DB
	mu sync.Mutex
	n  map[string]int // by stream
}

func newWriter(t testing.TB, db *memory.DB) *writer {
	return &writer{t: t, db: db, n: map[string]int{}}
}

func newRouted(t testing.TB) *memory.DB {
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	return db
}

// write appends so many events to each of some streams.
func (w *writer) write(each int, streams ...string) (at eventstore.Appended) {
	w.t.Helper()
	for range each {
		for _, stream := range streams {
			w.mu.Lock()
			w.n[stream]++
			drafts, err := types.Encode(context.Background(), posted{stream, w.n[stream]})
			require.NoError(w.t, err)
			at, err = w.db.Append(context.Background(), stream, eventstore.Any, drafts)
			w.mu.Unlock()
			require.NoError(w.t, err)
		}
	}
	return at
}

// published returns the events of streams as a relay publishes them.
func (w *writer) published(streams ...string) (all []*message.Message) {
	for _, stream := range streams {
		entries, err := w.db.Entries(context.Background(), provider.EntryFilter{Stream: stream, Limit: 100_000})
		require.NoError(w.t, err)
		for _, e := range entries {
			m := message.NewMessage(e.ID, e.Payload)
			for k, v := range e.Headers {
				m.Metadata[k] = v
			}
			m.Metadata[outbox.HeaderKey] = e.Key
			all = append(all, m)
		}
	}
	return all
}

func streams(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("review-%d", i))
	}
	return names
}

// start starts a runner from the log.
func fromLog(t testing.TB, u provider.Units[pipe], log provider.Log, cfg projector.RunnerConfig, ps ...*projector.Projector[pipe]) (stop func()) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := projector.NewRunner(u, projector.FromLog(log), cfg, ps...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); require.NoError(t, <-done) }) }
	t.Cleanup(stop)
	return stop
}

// With markers in Redis, a message takes effect once, however often and at whatever moments it is
// delivered.
// Promise: G5.3
func TestWithOwnMarkersAMessageTakesEffectOnce(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	log := &text{}
	cfg := projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), Batch: 7}
	var feeds []subscription
	for range 3 {
		f := make(subscription)
		feeds = append(feeds, f)
		run(t, provider.Combine(s.own(t), db), f, cfg, define(marked, s.count))
	}
	list := events(100, 9)
	for i := range list { // ids of both forms
		if i%2 == 0 {
			list[i].ID = uuid.NewString()
		}
	}
	var all sync.WaitGroup
	for _, f := range feeds {
		for range 4 {
			all.Go(func() {
				for _, e := range list {
					f.deliver(t, e)
				}
			})
		}
	}
	all.Wait()
	require.Equal(t, stars(list...), s.counted(t), log)
	require.NotContains(t, log.String(), "no-op")
	require.Empty(t, parked(t, db, projector.ParkedFilter{}))
}

// From the log, the checkpoint moves with each message. Wait works.
// Promise: G5.3
func TestFromTheLogRedisIsExact(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newMemory(t)
	w, p := newWriter(t, db), define(projector.Options{}, s.list)
	u := provider.Combine(s.own(t), db)
	w.write(100, streams(7)...)
	for range 4 {
		stop := fromLog(t, u, db, projector.RunnerConfig{}, p)
		at := w.write(30, streams(7)...)
		require.NoError(t, p.Wait(t.Context(), projector.StateOf(u, db), at))
		stop()
	}
	s.requireLists(t, w.n)
	c, err := u.Checkpoint(t.Context(), provider.Build{Projector: "stars"})
	require.NoError(t, err)
	require.EqualValues(t, 7*220, c.Place.Position)
	lag, err := p.Lag(t.Context(), projector.StateOf(u, db))
	require.NoError(t, err)
	require.Zero(t, lag.Events)
}

// A poison message holds its key, in order, and other keys go on. A replay applies it once.
// Promise: G5.3
func TestWithOwnMarkersPoisonHoldsItsKey(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"log", "broker"} {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			s, db := sharedSpace(t), newRouted(t)
			w := newWriter(t, db)
			var fixed atomic.Bool
			p := define(marked, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
				if e.Stream == "review-1" && e.Data.Stars == 5 && !fixed.Load() {
					tx.Incr(ctx, s.prefix+"never")
					return errors.New("poison")
				}
				return s.list(ctx, tx, e)
			})
			cfg := projector.RunnerConfig{}
			cfg.Retry.Attempts, cfg.Retry.Base, cfg.Retry.Max = 3, time.Millisecond, 10*time.Millisecond
			u := provider.Combine(s.own(t), db)
			w.write(10, streams(3)...)
			if source == "log" {
				fromLog(t, u, db, cfg, p)
			} else {
				f := make(subscription)
				run(t, u, f, cfg, p)
				for _, m := range w.published(streams(3)...) {
					for range 2 {
						again := m.Copy()
						f <- again
						<-again.Acked()
					}
				}
			}
			stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
			eventually(t, "the message is stuck", func() bool { return len(parked(t, db, stuck)) == 1 })
			require.Equal(t, upTo(4), s.listed(t, "review-1"))
			eventually(t, "other keys go on", func() bool { return len(s.listed(t, "review-0"))+len(s.listed(t, "review-2")) == 20 })
			require.Zero(t, s.client.Exists(t.Context(), s.prefix+"never").Val())
			fixed.Store(true)
			_, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "fixed"})
			require.NoError(t, err)
			eventually(t, "the rest follows", func() bool { return len(s.listed(t, "review-1")) == 10 })
			s.requireLists(t, w.n)
			lost, err := u.(provider.Restorer).Lost(t.Context(), provider.Build{Projector: "stars"})
			require.NoError(t, err)
			require.Empty(t, lost)
		})
	}
}

// The output of a handler is in the outbox once, and never without its effect in the end: also if the
// handler runs again because the process ended between the two stores.
// Promise: G5.6
func TestOutputIsCommittedOnce(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), &noCommit{DB: newMemory(t)}
	p := projector.Define("stars", types, marked, projector.OnEmit("posted",
		func(ctx context.Context, tx pipe, e eventstore.Event[posted]) ([]outbox.Message, error) {
			if err := s.list(ctx, tx, e); err != nil || e.Data.Stars%2 == 1 {
				return nil, err
			}
			return []outbox.Message{{Topic: "thanks", Payload: []byte(e.ID)}, {Topic: "thanks", Payload: []byte(e.ID + "!")}}, nil
		}))
	w := newWriter(t, db.DB)
	w.write(20, streams(3)...)
	db.left.Store(7)
	u := provider.Combine(s.own(t), db)
	cfg := projector.RunnerConfig{Batch: 5, Lease: time.Second}
	cfg.Retry.Base, cfg.Retry.Max = time.Millisecond, 5*time.Millisecond
	fromLog(t, u, db, cfg, p)
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-2")) == 20 })
	s.requireLists(t, w.n)
	require.Negative(t, db.left.Load(), "units of the second store were not committed")
	entries, err := db.Entries(t.Context(), provider.EntryFilter{Topic: "thanks", Limit: 1000})
	require.NoError(t, err)
	sent := map[string]int{}
	for _, e := range entries {
		sent[string(e.Payload)]++
	}
	require.Len(t, sent, 3*10*2)
	for payload, n := range sent {
		require.Equal(t, 1, n, payload)
	}
}

// noCommit is a second store that does not commit some units, every other one.
type noCommit struct {
	*memory.DB
	left  atomic.Int64
	calls atomic.Int64
}

func (n *noCommit) Do(ctx context.Context, u provider.Unit, run func(context.Context, *memory.Model, provider.Found) (provider.Closing, error)) error {
	return n.DB.Do(ctx, u, func(ctx context.Context, tx *memory.Model, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, tx, found)
		if err == nil && n.calls.Add(1)%2 == 0 && n.left.Add(-1) >= 0 {
			err = &provider.Error{Class: provider.ClassTransient, Err: errors.New("the second store does not commit")}
		}
		return c, err
	})
}

// Without an outbox in the second store, a handler with output is refused at the start.
func TestOutputRequiresAnOutbox(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	emits := projector.Define("stars", types, marked, projector.OnEmit("posted",
		func(context.Context, pipe, eventstore.Event[posted]) ([]outbox.Message, error) { return nil, nil }))
	_, err := projector.NewRunner(provider.Combine(s.own(t), newMemory(t)), projector.FromLog(newMemory(t)), projector.RunnerConfig{}, emits)
	require.NoError(t, err)
	_, err = projector.NewRunner(s.own(t), projector.FromLog(newMemory(t)), projector.RunnerConfig{}, emits)
	require.ErrorContains(t, err, "provider.Combine(units, db)", "Redis keeps no parked messages")
}

// A message that was partly applied is stuck at once, and stays so until a person decides. The others
// go on, and nothing of them is applied twice.
// Promise: G5.5
func TestAMessageThatWasPartlyAppliedIsStuck(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"log", "broker"} {
		t.Run(source, func(t *testing.T) {
			t.Parallel()
			s, db, f := sharedSpace(t), newRouted(t), make(subscription)
			wrong := s.prefix + "a string"
			require.NoError(t, s.client.Set(t.Context(), wrong, "s", 0).Err())
			p := define(marked, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
				if e.Stream == "review-1" && e.Data.Stars == 3 {
					tx.Incr(ctx, s.prefix+"part")
					tx.LPush(ctx, wrong, 1)
				}
				if e.Stream == "review-2" && e.Data.Stars == 4 {
					tx.LPush(ctx, wrong, 1) // alone it has no effect, and is tried again
				}
				return s.list(ctx, tx, e)
			})
			cfg := projector.RunnerConfig{}
			cfg.Retry.Attempts, cfg.Retry.Base, cfg.Retry.Max = 3, time.Millisecond, 5*time.Millisecond
			w, u := newWriter(t, db), provider.Combine(s.own(t), db)
			w.write(8, streams(3)...)
			if source == "log" {
				fromLog(t, u, db, cfg, p)
			} else {
				run(t, u, f, cfg, p)
				for _, m := range w.published(streams(3)...) {
					f <- m
					<-m.Acked()
				}
			}
			stuck := projector.ParkedFilter{Projector: "stars", States: []projector.ParkedState{projector.StateStuck}}
			eventually(t, "two are stuck", func() bool { return len(parked(t, db, stuck)) == 2 && len(s.listed(t, "review-0")) == 8 })
			codes := map[string]string{}
			for _, row := range parked(t, db, stuck) {
				codes[row.Key] = fmt.Sprintf("%s %s %d", row.Class, row.Code, row.Attempts)
			}
			require.Equal(t, map[string]string{"review-1": "permanent partly_applied 1", "review-2": "unknown WRONGTYPE 3"}, codes)
			require.Equal(t, "1", s.client.Get(t.Context(), s.prefix+"part").Val(), "it is not tried again by itself")
			require.Equal(t, upTo(2), s.listed(t, "review-1"))
			require.Equal(t, upTo(3), s.listed(t, "review-2"))
			require.NoError(t, s.client.Unlink(t.Context(), wrong).Err())
			_, err := projector.Replay(t.Context(), db, stuck, projector.Decision{By: "ann", Reason: "checked"})
			require.NoError(t, err)
			eventually(t, "the rest follows", func() bool { return len(s.listed(t, "review-1")) == 8 && len(s.listed(t, "review-2")) == 8 })
			s.requireLists(t, w.n)
			require.Equal(t, "2", s.client.Get(t.Context(), s.prefix+"part").Val(), "the person has decided that")
		})
	}
}
