package redis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// If Redis fails over to a replica that does not have the last writes, the log brings these back.
// Promise: G5.4
func TestAFailoverToALaggingReplicaLosesNothing(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) (p *redistest.Pair, c *goredis.Client, failOver func()){
		"an address that moves": func(t *testing.T) (*redistest.Pair, *goredis.Client, func()) {
			p := redistest.NewPair(t)
			s := redistest.NewSwitch(t, p.Master)
			return p, redistest.Client(t, s.URL), func() {
				require.NoError(t, p.Master.End("KILL"))
				require.NoError(t, p.Promote())
				s.To(p.Replica)
			}
		},
		"an address that moves from a living master": func(t *testing.T) (*redistest.Pair, *goredis.Client, func()) {
			p := redistest.NewPair(t)
			s := redistest.NewSwitch(t, p.Master)
			return p, redistest.Client(t, s.URL), func() {
				require.NoError(t, p.Promote())
				s.To(p.Replica)
			}
		},
		"Sentinel": func(t *testing.T) (*redistest.Pair, *goredis.Client, func()) {
			s := redistest.NewSentinels(t)
			return &s.Pair, s.Client(t), func() {
				require.NoError(t, s.Master.End("KILL"))
				require.NoError(t, s.AwaitMaster(s.Replica))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pair, client, failOver := start(t)
			s, db := newSpace(client), newRouted(t)
			w, f := newWriter(t, db), make(subscription)
			var came atomic.Int64
			cfg := projector.RunnerConfig{Observer: again(&came), Grace: 100 * time.Millisecond, Lease: time.Second}
			u := provider.Combine(s.own(t), db)
			run(t, u, f, cfg, define(marked, s.list))
			deliver := func(n int) {
				from := len(w.published("review-0"))
				w.write(n, streams(4)...)
				for _, stream := range streams(4) {
					for _, m := range w.published(stream)[from:] {
						f <- m
						<-m.Acked()
					}
				}
			}
			applied := func(n int) func() bool {
				return func() bool {
					return !slices.ContainsFunc(streams(4), func(name string) bool {
						all, err := s.client.LLen(context.Background(), s.prefix+"list:"+name).Result()
						return err != nil || int(all) < n
					})
				}
			}
			deliver(10)
			eventually(t, "the first are applied", applied(10))
			require.NoError(t, pair.Cut())
			deliver(8)
			eventually(t, "the lost ones are applied", applied(18))
			failOver()
			deliver(5)
			eventually(t, "all are applied", applied(23))
			s.requireLists(t, w.n)
			require.GreaterOrEqual(t, came.Load(), int64(4*8), "events that came again")
		})
	}
}

// inCluster returns units and a space whose keys are in one slot of a cluster.
func inCluster(t *testing.T, c *redistest.Cluster) (space, *redis.Units) {
	s := newSpace(c.Client(t))
	u, err := redis.New(s.client, &redis.Config{OwnMarkers: true, HashTag: "shop"})
	require.NoError(t, err)
	s.prefix = u.Key("stars") + ":"
	return s, u
}

// In a cluster all keys of a unit are in one slot. It may be that of another server, and move.
// Promise: G5.8
func TestInACluster(t *testing.T) {
	t.Parallel()
	c := redistest.NewCluster(t)
	s, units := inCluster(t, c)
	db := newRouted(t)
	w, f := newWriter(t, db), make(subscription)
	cfg := projector.RunnerConfig{Lease: time.Second, Grace: 100 * time.Millisecond}
	run(t, provider.Combine(units, db), f, cfg, define(marked, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		err := redis.Watch(ctx, tx, func(ctx context.Context, c goredis.Cmdable) error {
			n, err := c.Get(ctx, s.prefix+"n").Int()
			if err != nil && !errors.Is(err, goredis.Nil) {
				return err
			}
			tx.Set(ctx, s.prefix+"n", n+1, 0)
			return nil
		}, s.prefix+"n")
		return errors.Join(err, s.list(ctx, tx, e))
	}))
	w.write(10, streams(4)...)
	for _, m := range w.published(streams(4)...) {
		f <- m
		<-m.Acked()
	}
	eventually(t, "all is applied", func() bool {
		return !slices.ContainsFunc(streams(4), func(name string) bool { return len(s.listed(t, name)) < 10 })
	})
	s.requireLists(t, w.n)
	require.Equal(t, "40", s.client.Get(t.Context(), s.prefix+"n").Val())

	// A key of another slot is an error before anything is written. That includes keys that are not at a
	// fixed place of the command.
	for name, queue := range map[string]func(ctx context.Context, tx pipe){
		"a key":          func(ctx context.Context, tx pipe) { tx.Set(ctx, "elsewhere", 1, 0) },
		"the second key": func(ctx context.Context, tx pipe) { tx.MSet(ctx, s.prefix+"a", 1, "elsewhere", 2) },
		"a key behind a number": func(ctx context.Context, tx pipe) {
			tx.ZUnionStore(ctx, s.prefix+"z", &goredis.ZStore{Keys: []string{"elsewhere"}})
		},
		"a watched key": func(ctx context.Context, tx pipe) {
			_ = redis.Watch(ctx, tx, func(context.Context, goredis.Cmdable) error { return nil }, "elsewhere")
		},
	} {
		_, err := units.DoCombined(t.Context(), markedMessages(2), func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
			for i := range 2 {
				found.Begin(i)
				tx.Incr(ctx, s.prefix+"written")
				if i == 1 {
					if name == "a watched key" {
						return provider.Closing{}, redis.Watch(ctx, tx, func(context.Context, goredis.Cmdable) error { return nil }, "elsewhere")
					}
					queue(ctx, tx)
				}
			}
			return provider.Closing{}, nil
		})
		requireClass(t, err, provider.ClassPermanent, "CROSSSLOT")
		require.ErrorContains(t, err, `"elsewhere"`, name)
		require.Zero(t, s.client.Exists(t.Context(), s.prefix+"written").Val(), name)
	}
}

// markedMessages returns a unit with n deliveries that have markers.
func markedMessages(n int) provider.Unit {
	u := messages(n)
	for i := range u.Messages {
		u.Messages[i].Mark = true
	}
	return u
}

// Promise: G5.8
func TestOwnMarkersRefuseWhatCannotKeepThem(t *testing.T) {
	t.Parallel()
	own := &redis.Config{OwnMarkers: true}
	cluster := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer cluster.Close()
	_, err := redis.New(cluster, own)
	require.ErrorContains(t, err, "HashTag")
	replicas := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, ReadOnly: true})
	defer replicas.Close()
	_, err = redis.New(replicas, &redis.Config{OwnMarkers: true, HashTag: "shop"})
	require.ErrorContains(t, err, "masters")
	_, err = redis.New(cluster, &redis.Config{HashTag: "a}b"})
	require.ErrorContains(t, err, "HashTag")

	for _, policy := range []string{"allkeys-lru", "allkeys-random", "noeviction", "volatile-ttl"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			server := redistest.Private(t, "--maxmemory-policy", policy)
			s := newSpace(redistest.Client(t, server.URL))
			u := provider.Combine(s.own(t), newMemory(t))
			err := u.(provider.ReadyChecker).ReadyFor(t.Context(), provider.RunnerService)
			if policy[:4] != "allk" {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, redis.ErrUnsafe)
			require.ErrorContains(t, err, policy)
			_, err = u.SetCheckpoint(t.Context(), provider.Build{Projector: "p", Generation: 1}, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeCatchUp})
			require.ErrorIs(t, err, redis.ErrUnsafe, "also if the server was replaced while the runner runs")
			require.NoError(t, provider.Combine(s.units(t), newMemory(t)).(provider.ReadyChecker).ReadyFor(t.Context(), provider.RunnerService), "without markers nothing can be lost")
		})
	}
	t.Run("a server that is away", func(t *testing.T) {
		t.Parallel()
		s := newSpace(redistest.Client(t, "redis://127.0.0.1:1/0", oneTry))
		require.NoError(t, s.own(t).ReadyFor(t.Context(), provider.RunnerService), "it is only unreachable")
	})
}

// A handler that reads and writes a key is run again if another client changes the key in between.
// Promise: G5.7
func TestWatchRunsTheHandlerAgain(t *testing.T) {
	t.Parallel()
	s, db, f := sharedSpace(t), newMemory(t), make(subscription)
	var runs, others atomic.Int64
	key := s.prefix + "balance"
	p := define(marked, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		return redis.Watch(ctx, tx, func(ctx context.Context, c goredis.Cmdable) error {
			n, err := c.Get(ctx, key).Int()
			if err != nil && !errors.Is(err, goredis.Nil) {
				return err
			}
			if runs.Add(1)%3 == 1 { // another client, between the read and the write
				others.Add(1)
				if err := s.client.Incr(ctx, key).Err(); err != nil {
					return err
				}
			}
			tx.Set(ctx, key, n+e.Data.Stars, 0)
			tx.HIncrBy(ctx, s.prefix+"stars", e.Data.Product, int64(e.Data.Stars))
			return nil
		}, key)
	})
	list, total := events(30, 4), 0
	run(t, provider.Combine(s.own(t), db), f, projector.RunnerConfig{}, p)
	done := make(chan struct{})
	for _, e := range list { // several in a unit: each sees the effects of those before it
		total += e.Posted.Stars
		m := e.message()
		f <- m
		go func() { <-m.Acked(); done <- struct{}{} }()
	}
	for range list {
		<-done
	}
	require.Equal(t, fmt.Sprint(total+int(others.Load())), s.client.Get(t.Context(), key).Val())
	require.Equal(t, stars(list...), s.counted(t))
	require.Greater(t, int(runs.Load()), len(list))
	require.Empty(t, parked(t, db, projector.ParkedFilter{}))
}

// What a script cannot do is refused before anything is written.
// Promise: G5.7
func TestLimitsOfAUnitWithMarkers(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	for name, c := range map[string]struct {
		queue func(ctx context.Context, tx pipe)
		code  string
	}{
		"too many commands": {func(ctx context.Context, tx pipe) {
			for range 10_001 {
				tx.Incr(ctx, s.prefix+"k")
			}
		}, "too_large"},
		"too many arguments": {func(ctx context.Context, tx pipe) { tx.SAdd(ctx, s.prefix+"k", make([]any, 7001)...) }, "too_large"},
		"too many bytes":     {func(ctx context.Context, tx pipe) { tx.Set(ctx, s.prefix+"k", make([]byte, 17<<20), 0) }, "too_large"},
		"a script":           {func(ctx context.Context, tx pipe) { tx.Eval(ctx, "return 1", nil) }, "no_script"},
		"multi":              {func(ctx context.Context, tx pipe) { tx.Do(ctx, "multi") }, "tx_ended"},
	} {
		_, err := s.own(t).DoCombined(t.Context(), markedMessages(2), func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
			found.Begin(0)
			tx.Incr(ctx, s.prefix+"first")
			found.Begin(1)
			c.queue(ctx, tx)
			return provider.Closing{}, nil
		})
		requireClass(t, err, provider.ClassPermanent, c.code)
		require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val(), name)
	}
	big := markedMessages(600) // more than one script
	_, err := s.own(t).DoCombined(t.Context(), big, func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
		for i := range big.Messages {
			found.Begin(i)
			for range 3 {
				tx.Incr(ctx, s.prefix+"many")
			}
		}
		return provider.Closing{}, nil
	})
	require.NoError(t, err)
	require.Equal(t, "1800", s.client.Get(t.Context(), s.prefix+"many").Val())
}
