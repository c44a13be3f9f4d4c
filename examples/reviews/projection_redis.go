package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// redisKeys are a Redis server, and the hash tag of all keys that are used there.
type redisKeys struct{ url, tag string }

// String returns the URL of the server without a password, for messages.
func (k redisKeys) String() string { return withoutPassword(k.url, "redis") }

// redisPatience is how long openRedis waits for an answer.
const redisPatience = 5 * time.Second

// openRedis returns the projection in Redis of the events in db. Parked messages, leases and the list of
// generations stay in db.
func openRedis[Outer any](ctx context.Context, at redisKeys, db interface {
	provider.Provider[Outer]
	projector.State
}) (projection, error) {
	o, err := goredis.ParseURL(at.url)
	if err != nil {
		return nil, errors.New("--redis is not a URL of Redis: use redis://HOST:PORT/NUMBER") // err may show a password
	}
	o.ContextTimeoutEnabled = true
	client := goredis.NewClient(o)
	units, err := redis.New(client, &redis.Config{OwnMarkers: true, HashTag: at.tag})
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, redisPatience)
		defer cancel()
		err = client.Ping(limited).Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", at, err), client.Close())
	}
	both := provider.Combine(units, db)
	model := redisModel{client: client, units: units}
	return &redisProjection{&projectionOf[goredis.Pipeliner]{
		reader:  redisReader{client, units},
		reviews: serviceReviews(redisProjector, []string{tableReviews}, model, projector.OnReset(model.reset)),
		db:      both, read: projector.StateOf(both, db),
		exact: model.with(exactPrefix), control: model.with(controlPrefix),
	}, client, at.tag}, nil
}

// redisProjection is the projection in Redis.
type redisProjection struct {
	*projectionOf[goredis.Pipeliner]
	client *goredis.Client
	tag    string
}

func (p *redisProjection) closeProjection() error { return p.client.Close() }

// createDemoTables deletes what the last demo has left in Redis: all keys with the hash tag.
func (p *redisProjection) createDemoTables(ctx context.Context) error {
	all := p.client.Scan(ctx, 0, "*{"+p.tag+"}*", 1000).Iterator()
	for all.Next(ctx) {
		if err := p.client.Unlink(ctx, all.Val()).Err(); err != nil {
			return err
		}
	}
	return all.Err()
}

// tableReviews is the only table of the read model, so that all keys that a reader reads are of one generation. Its
// keys are:
//
//	rating:PRODUCT   hash        reviews and stars
//	products         sorted set  every product that ever had a review, in alphabetical order
//	best             sorted set  the products with reviews; the score is the number of stars
//	reviews:PRODUCT  hash        by author, the review as JSON
//	latest:PRODUCT   sorted set  the authors; the score is the time of the review
//	latest           sorted set  PRODUCT NUL AUTHOR, in the same way
//
// Scores of stars and times are negative: the first member is the best or the newest one, and members
// with the same score are in alphabetical order, as in the other stores.
const tableReviews = "reviews"

// redisTable is the read model of one generation.
type redisTable struct {
	units *redis.Units
	name  string
}

func (t redisTable) rating(product string) string   { return t.units.Key(t.name, "rating", product) }
func (t redisTable) products() string               { return t.units.Key(t.name, "products") }
func (t redisTable) best() string                   { return t.units.Key(t.name, "best") }
func (t redisTable) reviews(product string) string  { return t.units.Key(t.name, "reviews", product) }
func (t redisTable) latestOf(product string) string { return t.units.Key(t.name, "latest", product) }
func (t redisTable) latest() string                 { return t.units.Key(t.name, "latest") }

// redisModel writes the read model. Redis runs the commands of a message together, after its handler has
// returned.
type redisModel struct {
	client *goredis.Client
	units  *redis.Units
	prefix string // of the table
}

func (m redisModel) with(prefix string) redisModel {
	m.prefix = prefix
	return m
}

func (m redisModel) table(ctx context.Context) redisTable {
	return redisTable{m.units, projector.Table(ctx, m.prefix+tableReviews)}
}

// create creates nothing: a key exists once it has a value.
func (m redisModel) create(context.Context, goredis.Pipeliner) error { return nil }

func (m redisModel) add(ctx context.Context, tx goredis.Pipeliner, product string, reviews, stars int) error {
	t := m.table(ctx)
	tx.HIncrBy(ctx, t.rating(product), "reviews", int64(reviews))
	tx.HIncrBy(ctx, t.rating(product), "stars", int64(stars))
	tx.ZAdd(ctx, t.products(), goredis.Z{Member: product})
	tx.ZIncrBy(ctx, t.best(), -float64(stars), product)
	tx.ZRemRangeByScore(ctx, t.best(), "0", "0") // no stars: the product has no reviews
	return nil
}

func (m redisModel) put(ctx context.Context, tx goredis.Pipeliner, s currentReview) error {
	t := m.table(ctx)
	s.ReviewedAt = s.ReviewedAt.Truncate(time.Millisecond).UTC()
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tx.HSet(ctx, t.reviews(s.Product), s.Author, text)
	at := -float64(s.ReviewedAt.UnixMilli())
	tx.ZAdd(ctx, t.latestOf(s.Product), goredis.Z{Score: at, Member: s.Author})
	tx.ZAdd(ctx, t.latest(), goredis.Z{Score: at, Member: s.Product + "\x00" + s.Author})
	return nil
}

func (m redisModel) remove(ctx context.Context, tx goredis.Pipeliner, product, author string) error {
	t := m.table(ctx)
	tx.HDel(ctx, t.reviews(product), author)
	tx.ZRem(ctx, t.latestOf(product), author)
	tx.ZRem(ctx, t.latest(), product+"\x00"+author)
	return nil
}

// reset deletes all keys of the table, for a rebuild in place. No other unit writes it meanwhile.
func (m redisModel) reset(ctx context.Context, tx goredis.Pipeliner) error {
	var keys []string
	all := m.client.Scan(ctx, 0, m.units.Key(m.table(ctx).name, "*"), 1000).Iterator()
	for all.Next(ctx) {
		keys = append(keys, all.Val())
	}
	for some := range slices.Chunk(keys, 1000) {
		tx.Unlink(ctx, some...)
	}
	return all.Err()
}

// redisReader reads the read model.
type redisReader struct {
	client *goredis.Client
	units  *redis.Units
}

// shown reads the generation that readers see of the table with a prefix. It reads again if that is another one by then: the one
// before may already have later events, which the next reader would miss.
func (r redisReader) shown(ctx context.Context, prefix string, read func(redisTable) error) error {
	names, err := r.units.Shown(ctx, prefix+tableReviews)
	for err == nil {
		was := names[0]
		if err = read(redisTable{r.units, was}); err != nil {
			break
		}
		if names, err = r.units.Shown(ctx, prefix+tableReviews); err == nil && names[0] == was {
			break
		}
	}
	return err
}

const redisPage = 1000 // products

func (r redisReader) ratings(ctx context.Context, prefix string) (all []rating, err error) {
	err = r.shown(ctx, prefix, func(t redisTable) error {
		all = nil
		for after := ""; ; after = all[len(all)-1].Product {
			some, err := r.page(ctx, t, after, redisPage)
			if all = append(all, some...); err != nil || len(some) < redisPage {
				return err
			}
		}
	})
	return all, err
}

func (r redisReader) products(ctx context.Context, after string, limit int) (found []rating, err error) {
	err = r.shown(ctx, "", func(t redisTable) error {
		found = nil
		for after := after; ; {
			some, err := r.page(ctx, t, after, limit)
			if err != nil {
				return err
			}
			for _, one := range some {
				if after = one.Product; one.Reviews > 0 && len(found) < limit {
					found = append(found, one)
				}
			}
			if len(found) == limit || len(some) < limit {
				return nil
			}
		}
	})
	return found, err
}

// page returns the ratings of at most limit products after the given one, also of those without reviews.
func (r redisReader) page(ctx context.Context, t redisTable, after string, limit int) ([]rating, error) {
	from := "-"
	if after != "" {
		from = "(" + after
	}
	products, err := r.client.ZRangeArgs(ctx, goredis.ZRangeArgs{
		Key: t.products(), ByLex: true, Start: from, Stop: "+", Count: int64(limit),
	}).Result()
	if err != nil {
		return nil, fmt.Errorf("read the products: %w", err)
	}
	return r.ratingsOf(ctx, t, products)
}

func (r redisReader) best(ctx context.Context, limit int) (all []rating, err error) {
	err = r.shown(ctx, "", func(t redisTable) error {
		products, err := r.client.ZRange(ctx, t.best(), 0, int64(limit)-1).Result()
		if err != nil {
			return fmt.Errorf("read the best products: %w", err)
		}
		all, err = r.ratingsOf(ctx, t, products)
		return err
	})
	return all, err
}

func (r redisReader) ratingsOf(ctx context.Context, t redisTable, products []string) ([]rating, error) {
	all := make([]rating, len(products))
	replies := make([]*goredis.SliceCmd, len(products))
	_, err := r.client.Pipelined(ctx, func(p goredis.Pipeliner) error {
		for i, product := range products {
			replies[i] = p.HMGet(ctx, t.rating(product), "reviews", "stars")
		}
		return nil
	})
	for i := range all {
		all[i].Product = products[i]
		err = errors.Join(err, replies[i].Scan(&all[i]))
	}
	if err != nil {
		return nil, fmt.Errorf("read the ratings: %w", err)
	}
	return all, nil
}

// readLatest returns the ARGV[1] newest reviews of a product.
var readLatest = goredis.NewScript(`
	local reviews = {}
	for i, author in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'LIMIT', 0, ARGV[1])) do
		reviews[i] = redis.call('HGET', KEYS[2], author)
	end
	return reviews`)

// product reads in MULTI/EXEC: Redis runs no other command meanwhile.
func (r redisReader) product(ctx context.Context, product string, limit int) (of rating, latest []currentReview, err error) {
	err = r.shown(ctx, "", func(t redisTable) error {
		of, latest = rating{Product: product}, nil
		var rated *goredis.SliceCmd
		var reviews *goredis.Cmd
		_, err := r.client.TxPipelined(ctx, func(p goredis.Pipeliner) error {
			rated = p.HMGet(ctx, t.rating(product), "reviews", "stars")
			reviews = readLatest.Eval(ctx, p, []string{t.latestOf(product), t.reviews(product)}, limit)
			return nil
		})
		if err == nil {
			err = rated.Scan(&of)
		}
		texts, _ := reviews.StringSlice() // its error is err
		for _, text := range texts {
			var one currentReview
			err = errors.Join(err, json.Unmarshal([]byte(text), &one))
			latest = append(latest, one)
		}
		if err != nil {
			return fmt.Errorf("read a product: %w", err)
		}
		return nil
	})
	return of, latest, err
}

// newest leaves out a review that is withdrawn meanwhile.
func (r redisReader) newest(ctx context.Context, limit int) (latest []currentReview, err error) {
	err = r.shown(ctx, "", func(t redisTable) (err error) {
		latest, err = r.newestOf(ctx, t, limit)
		return err
	})
	return latest, err
}

func (r redisReader) newestOf(ctx context.Context, t redisTable, limit int) (latest []currentReview, err error) {
	members, err := r.client.ZRange(ctx, t.latest(), 0, int64(limit)-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the newest reviews: %w", err)
	}
	reviews := make([]*goredis.StringCmd, len(members))
	_, err = r.client.Pipelined(ctx, func(p goredis.Pipeliner) error {
		for i, member := range members {
			product, author, _ := strings.Cut(member, "\x00")
			reviews[i] = p.HGet(ctx, t.reviews(product), author)
		}
		return nil
	})
	if err != nil && !errors.Is(err, goredis.Nil) {
		return nil, fmt.Errorf("read the newest reviews: %w", err)
	}
	for _, review := range reviews {
		var one currentReview
		if text, err := review.Bytes(); errors.Is(err, goredis.Nil) {
			continue
		} else if err := errors.Join(err, json.Unmarshal(text, &one)); err != nil {
			return nil, fmt.Errorf("read the newest reviews: %w", err)
		}
		latest = append(latest, one)
	}
	return latest, nil
}

// redisUnavailable reports whether Redis does not answer. Other errors of the network are those of
// postgresUnavailable.
func redisUnavailable(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, goredis.ErrPoolTimeout) || goredis.IsLoadingError(err)
}
