package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
)

// maxAhead is how many events the commands may be ahead of the worker. The limit makes the kills
// happen under load and not after the last command.
const maxAhead = 300

// tally holds the expected read models. It is computed from the accepted commands only, not from
// events, deliveries or aggregates.
type tally struct {
	accepted, rejected int
	stars              map[string]map[string]int // by product and author: the posted reviews
}

// commander issues commands and keeps the tally.
type commander struct {
	commands *review.Commands
	rnd      *rand.Rand
	products int
	count    int
	tally    tally
	issued   atomic.Int64
	events   atomic.Int64 // appended so far
}

func newCommander(store eventstore.Store, seed uint64, products, count int) (*commander, error) {
	commands, err := review.NewCommands(store)
	if err != nil {
		return nil, err
	}
	return &commander{
		commands: commands, rnd: rand.New(rand.NewPCG(seed, 0)), products: products, count: count,
		tally: tally{stars: map[string]map[string]int{}},
	}, nil
}

// run issues all commands. acked returns how many events have been applied so far.
func (c *commander) run(ctx context.Context, acked func() int) error {
	for range c.count {
		for int(c.events.Load())-acked() > maxAhead {
			if err := sleep(ctx, 5*time.Millisecond); err != nil {
				return err
			}
		}
		if err := c.issue(ctx); err != nil {
			return fmt.Errorf("command %d: %w", c.issued.Load()+1, err)
		}
		c.issued.Add(1)
	}
	return nil
}

// issue issues one command and adds it to the tally if it is accepted.
func (c *commander) issue(ctx context.Context) error {
	product := fmt.Sprintf("product-%03d", c.rnd.IntN(c.products)+1)
	author := fmt.Sprintf("author-%02d", c.rnd.IntN(40)+1)
	now := time.Now()
	stars := c.tally.stars[product]
	if stars == nil {
		stars = map[string]int{}
		c.tally.stars[product] = stars
	}
	var at eventstore.Appended
	var err error
	var accepted func()
	switch n := c.rnd.IntN(100); {
	case n < 15: // rejected if the review was never posted
		at, err = c.commands.Withdraw(ctx, product, author, now)
		accepted = func() { delete(stars, author) }
	case n < 20: // always rejected
		at, err = c.commands.Post(ctx, product, author, review.Content{Stars: 6 * c.rnd.IntN(2)}, now)
		accepted = func() { err = errors.New("a review with 0 or 6 stars was accepted") }
	default: // one edit in five changes nothing
		given := 1 + c.rnd.IntN(5)
		at, err = c.commands.Post(ctx, product, author, review.Content{Stars: given, Summary: "demo"}, now)
		accepted = func() { stars[author] = given }
	}
	switch {
	case errors.Is(err, review.ErrRejected):
		c.tally.rejected++
		return nil
	case err != nil:
		return err
	}
	c.tally.accepted++
	c.events.Add(int64(at.Count))
	accepted()
	return err
}

// expected returns the expected rating of each product. A product whose reviews are all withdrawn
// has a rating of 0 reviews.
func (t *tally) expected() map[string]rating {
	all := map[string]rating{}
	for product, stars := range t.stars {
		r := rating{Product: product, Reviews: len(stars)}
		for _, n := range stars {
			r.Stars += n
		}
		all[product] = r
	}
	return all
}

// estimate estimates the total number of events of all commands.
func (c *commander) estimate() int {
	issued, events := int(c.issued.Load()), int(c.events.Load())
	if issued == 0 {
		return c.count
	}
	return events * c.count / issued
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
