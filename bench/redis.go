package main

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	goredis "github.com/redis/go-redis/v9"
)

// The read model in Redis counts messages for each of a thousand products, in a hash and in a sorted
// set. The limit has keys of its own, with the same content.
const (
	redisTotals = "totals"
	redisTop    = "top"

	redisBatch = 500

	// limitRedis is the limit's script for one message: its marker, then its commands.
	limitRedis = `
if redis.call('ZADD', KEYS[1], 'NX', ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
redis.call('ZINCRBY', KEYS[3], 1, ARGV[3])
return 1`

	// limitRedisLog is the same for an event of the log, which moves the checkpoint instead.
	limitRedisLog = `
if tonumber(redis.call('HGET', KEYS[1], 'position')) >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'position', ARGV[1], 'id', ARGV[2])
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
redis.call('ZINCRBY', KEYS[3], 1, ARGV[3])
return 1`
)

// redisBed has a private Redis that keeps nothing on disk. It is started before the first round.
type redisBed struct {
	*projectorBed
	start  sync.Once
	failed error // of start
	server *redistest.Server
	client *goredis.Client
	units  provider.Provider[goredis.Pipeliner]
}

// newRedisBed returns a bed. Call close.
func newRedisBed(p *projectorBed) *redisBed { return &redisBed{projectorBed: p} }

func (r *redisBed) started(ctx context.Context) error {
	r.start.Do(func() {
		if r.server, r.failed = redistest.Start("--appendonly", "no"); r.failed != nil {
			return
		}
		r.client = goredis.NewClient(&goredis.Options{Addr: r.server.Addr})
		var own *redis.Units
		if own, r.failed = redis.New(r.client, &redis.Config{OwnMarkers: true}); r.failed != nil {
			return
		}
		r.units = provider.Combine(own, r.db)
		r.redis, r.failed = strconv.Atoi(r.client.InfoMap(ctx, "server").Item("Server", "process_id"))
	})
	return r.failed
}

func (r *redisBed) close() {
	if r.client != nil {
		_ = r.client.Close()
	}
	if r.server != nil {
		r.server.Stop()
	}
}

func (r *redisBed) lines() []line {
	const name = "one MULTI/EXEC, without markers"
	counts := r.counted("counted", projector.Options{Markers: true})
	one := func(of, unit string, prepare func(context.Context) error, ours, peer, limit work) line {
		return line{"redis/" + of, unit, name, program{prepare, ours}, program{prepare, peer}, program{prepare, limit}}
	}
	return []line{
		one("message", "messages/s", r.live, r.subscribes(counts, 1), r.unmarked(1), r.limit(1)),
		one("batch", "messages/s", r.live, r.subscribes(counts, redisBatch), r.unmarked(redisBatch), r.limit(redisBatch)),
		one("batch-log", "events/s", r.behind, r.readsLog, r.unmarked(redisBatch), r.limitLog(redisBatch)),
	}
}

// counted defines a projector whose handler queues two commands.
func (r *redisBed) counted(name string, opts projector.Options) *projector.Projector[goredis.Pipeliner] {
	return projector.Define(name, ratings, opts,
		projector.On("rated", func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[rated]) error {
			tx.HIncrBy(ctx, redisTotals, e.Data.ProductID, 1)
			tx.ZIncrBy(ctx, redisTop, 1, e.Data.ProductID)
			return nil
		}))
}

// live empties both stores, and makes the projector live at the end of the log.
func (r *redisBed) live(ctx context.Context) error {
	if err := r.emptied(ctx, r.empty); err != nil {
		return err
	}
	head, err := r.db.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	to := provider.Checkpoint{Place: provider.LogPlace{Position: head}, Mode: provider.ModeLive}
	_, err = r.units.SetCheckpoint(ctx, provider.Build{Projector: "counted"}, provider.Checkpoint{}, to)
	return err
}

// behind empties both stores, and fills the log.
func (r *redisBed) behind(ctx context.Context) error { return r.emptied(ctx, r.begun) }

// emptied empties Redis, and PostgreSQL by a function.
func (r *redisBed) emptied(ctx context.Context, empty func(context.Context) error) error {
	if err := r.started(ctx); err != nil {
		return err
	}
	if err := empty(ctx); err != nil {
		return err
	}
	return r.client.FlushAll(ctx).Err()
}

// subscribes runs Kinora on a broker with so many messages in flight.
func (r *redisBed) subscribes(of *projector.Projector[goredis.Pipeliner], inFlight int) work {
	return func(ctx context.Context, b *bed) (int64, error) {
		done, err := projects(r.projectorBed, r.units, of)(inFlight, false)(ctx, b)
		return r.checked(ctx, done, err)
	}
}

// readsLog runs Kinora: a new projector reads the log.
func (r *redisBed) readsLog(ctx context.Context, _ *bed) (int64, error) {
	var done atomic.Int64
	cfg := projector.RunnerConfig{Batch: redisBatch, Logger: slog.New(slog.DiscardHandler), Observer: projector.RunnerObserver{
		Unit: func(_ string, n int, _ time.Duration, err error) {
			if err == nil {
				done.Add(int64(n))
			}
		},
	}}
	runner, err := projector.NewRunner(r.units, projector.FromLog(r.db), cfg, r.counted("read", projector.Options{}))
	if err != nil {
		return 0, err
	}
	err = runner.Run(ctx)
	return r.checked(ctx, done.Load(), err)
}

// checked returns an error if the read model has fewer messages than were done.
func (r *redisBed) checked(ctx context.Context, done int64, err error) (int64, error) {
	if err != nil {
		return done, err
	}
	all, err := r.client.HVals(context.WithoutCancel(ctx), redisTotals).Result()
	if err != nil {
		return done, err
	}
	var sum int64
	for _, text := range all {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return done, err
		}
		sum += n
	}
	if sum < done {
		return done, fmt.Errorf("%d messages are done, but the read model has %d", done, sum)
	}
	return done, nil
}

// limit sends a script for each message, so many at a time.
func (r *redisBed) limit(size int) work {
	script := goredis.NewScript(limitRedis)
	keys := []string{"limit:events", redisTotals, redisTop}
	return r.byHand(size, false, script, func(ctx context.Context, p goredis.Pipeliner, id, product string, position int64) {
		p.EvalSha(ctx, script.Hash(), keys, position, id, product)
	})
}

// limitLog is limit for events of the log.
func (r *redisBed) limitLog(size int) work {
	script := goredis.NewScript(limitRedisLog)
	keys := []string{"limit:checkpoint", redisTotals, redisTop}
	return r.byHand(size, false, script, func(ctx context.Context, p goredis.Pipeliner, id, product string, position int64) {
		p.EvalSha(ctx, script.Hash(), keys, position, id, product)
	})
}

// unmarked sends the commands of so many messages at a time in one MULTI/EXEC.
func (r *redisBed) unmarked(size int) work {
	return r.byHand(size, true, nil, func(ctx context.Context, p goredis.Pipeliner, _, product string, _ int64) {
		p.HIncrBy(ctx, redisTotals, product, 1)
		p.ZIncrBy(ctx, redisTop, 1, product)
	})
}

// byHand queues and sends messages, size at a time, as a transaction or not. They have the ids and
// positions of Kinora's.
func (r *redisBed) byHand(size int, tx bool, script *goredis.Script, queue func(ctx context.Context, p goredis.Pipeliner, id, product string, position int64)) work {
	return func(ctx context.Context, _ *bed) (done int64, err error) {
		hard := context.WithoutCancel(ctx)
		if script != nil {
			if err := script.Load(hard, r.client).Err(); err != nil {
				return 0, err
			}
		}
		if err := r.client.HSet(hard, "limit:checkpoint", "position", 0).Err(); err != nil {
			return 0, err
		}
		for ; ctx.Err() == nil; done += int64(size) {
			p := r.client.Pipeline()
			if tx {
				p = r.client.TxPipeline()
			}
			for range size {
				id, n := uuid.New(), r.n.Add(1)
				queue(hard, p, "u"+string(id[:]), "p"+strconv.FormatInt(n%products, 10), 1<<40+n)
			}
			if _, err := p.Exec(hard); err != nil {
				return done, err
			}
		}
		return r.checked(ctx, done, nil)
	}
}
