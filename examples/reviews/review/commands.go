package review

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// Commands carries out commands on reviews.
type Commands struct {
	reviews *eventstore.Repository[*Review]
}

// retries is how often a command decides again when another one on the same review was faster: more often than
// people meet on one review, since none of them would know what to make of a conflict.
const retries = 50

// NewCommands makes commands on the reviews in store.
func NewCommands(store eventstore.Store) (*Commands, error) {
	reviews, err := eventstore.NewRepository(store, Types, Category, New, &eventstore.RepositoryConfig{Retries: retries})
	if err != nil {
		return nil, err
	}
	return &Commands{reviews}, nil
}

// Post posts the review of product by author, or edits it. See Review.Post.
func (c *Commands) Post(ctx context.Context, product, author string, content Content, at time.Time) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.Post(content, at) })
}

// Withdraw takes the review of product by author back. See Review.Withdraw.
func (c *Commands) Withdraw(ctx context.Context, product, author string, at time.Time) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.Withdraw(at) })
}

// PostAsOf posts a record of the past. See Review.PostAsOf.
func (c *Commands) PostAsOf(ctx context.Context, product, author string, content Content, at time.Time) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.PostAsOf(content, at) })
}

func (c *Commands) update(ctx context.Context, product, author string, decide func(*Review) ([]any, error)) (eventstore.Appended, error) {
	id, err := ID(product, author)
	if err != nil {
		return eventstore.Appended{}, err
	}
	return c.reviews.Update(ctx, id, decide)
}
