package redis_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/provider"
)

// pair is Redis next to a store of events.
type pair struct {
	provider.Provider[pipe]
	eventstore.Store
	provider.Log
	space
}

// The kit for users' tests takes a read model in Redis.
func TestKitTestsAReadModelInRedis(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(nil, nil, func(ctx context.Context, s pair) (rows []string, err error) {
		all, err := s.client.HGetAll(ctx, s.prefix+"stars").Result()
		for product, stars := range all {
			rows = append(rows, fmt.Sprint(product, " ", stars))
		}
		slices.Sort(rows)
		return rows, err
	})
	kit.Projector = func(s pair) *projector.Projector[pipe] {
		return projector.Define("stars", types, marked, projector.On("posted", func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
			tx.HIncrBy(ctx, s.prefix+"stars", e.Data.Product, int64(e.Data.Stars))
			return nil
		}))
	}
	open := func(own bool) func(t testing.TB) pair {
		return func(t testing.TB) pair {
			s, db := sharedSpace(t), newMemory(t)
			units := s.units(t)
			if own {
				units = s.own(t)
			}
			return pair{provider.Combine(units, db), db, db, s}
		}
	}
	events := make([]projectortest.Event, 10)
	for i := range events {
		events[i] = projectortest.In(fmt.Sprint("review-", i%4), posted{Product: fmt.Sprint(i % 3), Stars: i%5 + 1})
	}
	kit.Fresh = open(true)
	kit.Given(t, events...).Then("0 12", "1 10", "2 8").Redeliver().Then("0 12", "1 10", "2 8")
	kit.ExactlyOnce(t, events...)
	kit.Commutes(t, events...)
	kit.Fresh = open(false)
	kit.Given(t, events...).Then("0 12", "1 10", "2 8")
}
