package main

import (
	"context"
	"fmt"
	"testing"

	"github.com/kinora-go/kinora/providers/redis"
	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// between is a hook that runs a function once, before the first pipeline.
type between struct{ run func() }

func (b *between) DialHook(next goredis.DialHook) goredis.DialHook { return next }

func (b *between) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook { return next }

func (b *between) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []goredis.Cmder) error {
		if run := b.run; run != nil {
			b.run = nil
			run()
		}
		return next(ctx, cmds)
	}
}

// A table that is not shown any more may have later events than the one that is. A reader that shows them goes back with its next
// request.
func TestRedisReadersReadAgainAfterASwitch(t *testing.T) {
	t.Parallel()
	s := startRedis(t)
	options, err := goredis.ParseURL(s.url())
	require.NoError(t, err)
	writer := goredis.NewClient(options)
	defer func() { require.NoError(t, writer.Close()) }()
	ctx := t.Context()
	rate := func(table redisTable, reviews int) {
		require.NoError(t, writer.HSet(ctx, table.rating("tea"), "reviews", reviews, "stars", 4*reviews).Err())
		require.NoError(t, writer.ZAdd(ctx, table.products(), goredis.Z{Member: "tea"}).Err())
		require.NoError(t, writer.ZAdd(ctx, table.best(), goredis.Z{Member: "tea", Score: -4}).Err())
		require.NoError(t, writer.ZAdd(ctx, table.latest(), goredis.Z{Member: "tea\x00ann"}).Err())
		require.NoError(t, writer.HSet(ctx, table.reviews("tea"), "ann", fmt.Sprintf(`{"Stars":%d}`, reviews)).Err())
	}
	for name, read := range map[string]func(r redisReader) (rating, error){
		"product": func(r redisReader) (rating, error) { of, _, err := r.product(ctx, "tea", 1); return of, err },
		"products": func(r redisReader) (rating, error) {
			all, err := r.products(ctx, "", 1)
			require.Len(t, all, 1)
			return all[0], err
		},
		"ratings": func(r redisReader) (rating, error) {
			all, err := r.ratings(ctx, "")
			require.Len(t, all, 1)
			return all[0], err
		},
		"newest": func(r redisReader) (rating, error) {
			all, err := r.newest(ctx, 1)
			require.Len(t, all, 1)
			return rating{"tea", all[0].Stars, 4 * all[0].Stars}, err
		},
		"best": func(r redisReader) (rating, error) {
			all, err := r.best(ctx, 1)
			require.Len(t, all, 1)
			return all[0], err
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := goredis.NewClient(options)
			units, err := redis.New(client, &redis.Config{OwnMarkers: true, HashTag: name})
			require.NoError(t, err)
			one, two := redisTable{units, tableReviews + "_g1"}, redisTable{units, tableReviews + "_g2"}
			show := func(table redisTable) {
				require.NoError(t, writer.HSet(ctx, "kinora:{"+name+"}shown", tableReviews, table.name).Err())
			}
			show(one)
			names, err := units.Shown(ctx, tableReviews)
			require.NoError(t, err)
			require.Equal(t, []string{one.name}, names)
			rate(one, 1)
			rate(two, 1)
			client.AddHook(&between{func() {
				show(two)
				rate(one, 2) // it is on standby
			}})
			of, err := read(redisReader{client, units})
			require.NoError(t, err)
			require.Equal(t, rating{Product: "tea", Reviews: 1, Stars: 4}, of)
			require.NoError(t, client.Close())
		})
	}
}
