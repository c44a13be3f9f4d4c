package main

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

// rating is the sum of the reviews of one product.
type rating struct {
	Product string
	Reviews int
	Stars   int // of all reviews
}

// currentReview is a posted review, as readers see it.
type currentReview struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	Summary    string    `json:"summary"`
	Excerpt    string    `json:"excerpt"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// withoutEmptyRow removes the row that the left join returns for a product without reviews.
func withoutEmptyRow(rows []currentReview) []currentReview {
	return slices.DeleteFunc(rows, func(s currentReview) bool { return s.Author == "" })
}

// average returns the average number of stars. It is not stored, because a stored average cannot be
// updated exactly.
func (r rating) average() float64 {
	if r.Reviews == 0 {
		return 0
	}
	return float64(r.Stars) / float64(r.Reviews)
}

// readModel writes the ratings and the latest reviews in a transaction of its database.
// productReviews applies events to it, in the same way for all databases.
type readModel[Tx any] interface {
	// add adds to the rating of a product. The values are differences, so that a duplicate would be
	// visible.
	add(ctx context.Context, tx Tx, product string, reviews, stars int) error
	// put inserts a review or replaces the one by the same author.
	put(ctx context.Context, tx Tx, s currentReview) error
	remove(ctx context.Context, tx Tx, product, author string) error
}

// reviewsProjector is the name of the service's projector. It must never change: every marker has
// it.
const reviewsProjector = "product-reviews"

// productReviews defines the projector of ratings and latest reviews. Both are written in one unit
// of work, so that no reader sees a review that the average lacks.
func productReviews[Tx any](name string, opts projector.Options, m readModel[Tx]) *projector.Projector[Tx] {
	return projector.Define(name, review.Types, opts,
		projector.On("posted", func(ctx context.Context, tx Tx, e eventstore.Event[review.Posted]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, 1, d.Stars); err != nil {
				return err
			}
			return m.put(ctx, tx, currentReview{d.Product, d.Author, d.Stars, d.Summary, excerpt(d.Text), d.ReviewedAt})
		}),
		projector.On("edited", func(ctx context.Context, tx Tx, e eventstore.Event[review.Edited]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, 0, d.Stars-d.WasStars); err != nil {
				return err
			}
			return m.put(ctx, tx, currentReview{d.Product, d.Author, d.Stars, d.Summary, excerpt(d.Text), d.ReviewedAt})
		}),
		projector.On("withdrawn", func(ctx context.Context, tx Tx, e eventstore.Event[review.Withdrawn]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, -1, -d.WasStars); err != nil {
				return err
			}
			return m.remove(ctx, tx, d.Product, d.Author)
		}),
		projector.On("hidden", func(ctx context.Context, tx Tx, e eventstore.Event[review.Hidden]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, -1, -d.WasStars); err != nil {
				return err
			}
			return m.remove(ctx, tx, d.Product, d.Author)
		}),
	)
}

const excerptRunes = 280 // the read model has an excerpt; the event has the whole text

func excerpt(text string) string {
	n := 0
	for i := range text {
		if n++; n > excerptRunes {
			return text[:i] + "…"
		}
	}
	return text
}
