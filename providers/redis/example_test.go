package redis_test

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Stars by product are in Redis, parked messages in SQLite.
func Example() {
	onPosted := func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[posted]) error {
		tx.HIncrBy(ctx, "stars", e.Data.Product, int64(e.Data.Stars))
		return nil
	}
	stars := projector.Define("product-stars", types, projector.Options{}, projector.On("posted", onPosted))

	serve := func(ctx context.Context, client *goredis.Client, db *sqlite.DB, subscriber message.Subscriber) error {
		units, err := redis.New(client, nil)
		if err != nil {
			return err
		}
		runner, err := projector.NewRunner(provider.Combine(units, db), projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, stars)
		if err != nil {
			return err
		}
		return runner.Run(ctx)
	}
	_ = serve
}
