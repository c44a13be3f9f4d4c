package review

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// Commands runs commands on reviews.
type Commands struct {
	store   eventstore.Store
	reviews *eventstore.Repository[*Review]
}

// retries is how often a command is retried after another command changed the same review first.
// It is larger than the number of people who write to one review at once, because a conflict
// error would not help any of them.
const retries = 50

// NewCommands returns commands on the reviews in store.
func NewCommands(store eventstore.Store) (*Commands, error) {
	reviews, err := eventstore.NewRepository(store, Types, Category, New, &eventstore.RepositoryConfig{Retries: retries})
	if err != nil {
		return nil, err
	}
	return &Commands{store, reviews}, nil
}

// Post posts the review of product by author, or edits it. See Review.Post. The id of a command that has posted other
// content is rejected.
func (c *Commands) Post(
	ctx context.Context, product, author string, content Content, at time.Time, command ...eventstore.CommandID,
) (eventstore.Appended, error) {
	done, err := c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.Post(content, at) }, command...)
	if err != nil || !done.Replayed {
		return done, err
	}
	for raw, err := range c.store.ReadStream(ctx, done.Stream, done.Version-1) { // its own event is the first
		if err != nil {
			return done, err
		}
		e, err := eventstore.Decode[any](Types, raw)
		if err != nil {
			return done, err
		}
		posted := New("")
		if posted.Apply(e.Data); posted.content != content {
			return done, rejected("the id of this command has posted other content: use a new id for each command")
		}
		break
	}
	return done, nil
}

// Withdraw withdraws the review of product by author. See Review.Withdraw.
func (c *Commands) Withdraw(
	ctx context.Context, product, author string, at time.Time, command ...eventstore.CommandID,
) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.Withdraw(at) }, command...)
}

// Erase withdraws the review of product by author for ever. After it every command on the review is
// eventstore.ErrStreamEnded. See Review.Erase.
func (c *Commands) Erase(
	ctx context.Context, product, author string, at time.Time, command ...eventstore.CommandID,
) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.Erase(at) }, command...)
}

// PostAsOf posts a historical record. See Review.PostAsOf.
func (c *Commands) PostAsOf(ctx context.Context, product, author string, content Content, at time.Time) (eventstore.Appended, error) {
	return c.update(ctx, product, author, func(r *Review) ([]any, error) { return r.PostAsOf(content, at) })
}

// HideTx hides the review of product by author, in the caller's transaction. See Review.Hide.
func (c *Commands) HideTx(
	ctx context.Context, tx eventstore.TxStore, product, author string, rejected Content, reason string, at time.Time,
) (eventstore.Appended, error) {
	id, err := ID(product, author)
	if err != nil {
		return eventstore.Appended{}, err
	}
	return c.reviews.UpdateTx(ctx, tx, id, func(r *Review) ([]any, error) { return r.Hide(rejected, reason, at) })
}

func (c *Commands) update(
	ctx context.Context, product, author string, decide func(*Review) ([]any, error), command ...eventstore.CommandID,
) (eventstore.Appended, error) {
	id, err := ID(product, author)
	if err != nil {
		return eventstore.Appended{}, err
	}
	return c.reviews.Update(ctx, id, decide, command...)
}
