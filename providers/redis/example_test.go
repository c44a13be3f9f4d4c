package redis_test

import (
	"context"
	"errors"

	goredis "github.com/redis/go-redis/v9"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Stars by product are in Redis, each event once. The events and parked messages are in SQLite.
func Example() {
	serve := func(ctx context.Context, client *goredis.Client, db *sqlite.DB, subscriber message.Subscriber) error {
		units, err := redis.New(client, &redis.Config{OwnMarkers: true})
		if err != nil {
			return err
		}
		onPosted := func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[posted]) error {
			tx.HIncrBy(ctx, units.Key("stars"), e.Data.Product, int64(e.Data.Stars))
			return nil
		}
		stars := projector.Define("product-stars", types, projector.Options{Markers: true}, projector.On("posted", onPosted))
		runner, err := projector.NewRunner(provider.Combine(units, db), projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, stars)
		if err != nil {
			return err
		}
		return runner.Run(ctx)
	}
	_ = serve
}

// A handler that reads a key and writes it runs again if another client has changed the key.
func ExampleWatch() {
	onPosted := func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[posted]) error {
		key := "best:" + e.Data.Product
		return redis.Watch(ctx, tx, func(ctx context.Context, c goredis.Cmdable) error {
			best, err := c.Get(ctx, key).Int()
			if err != nil && !errors.Is(err, goredis.Nil) {
				return err
			}
			tx.Set(ctx, key, max(best, e.Data.Stars), 0)
			return nil
		}, key)
	}
	_ = projector.Define("best-stars", types, projector.Options{Markers: true}, projector.On("posted", onPosted))
}
