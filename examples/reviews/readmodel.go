package main

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

// rating is what the reviews of one product come to.
type rating struct {
	Product string
	Reviews int
	Stars   int // their sum
}

// standing is a review that stands, as readers see it.
type standing struct {
	Product    string    `json:"product"`
	Author     string    `json:"author"`
	Stars      int       `json:"stars"`
	Summary    string    `json:"summary"`
	Excerpt    string    `json:"excerpt"`
	ReviewedAt time.Time `json:"reviewed_at"`
}

// standingOnly leaves out the row that stands for no review.
func standingOnly(rows []standing) []standing {
	return slices.DeleteFunc(rows, func(s standing) bool { return s.Author == "" })
}

// average is what is shown: never stored, since it could not be taken back exactly.
func (r rating) average() float64 {
	if r.Reviews == 0 {
		return 0
	}
	return float64(r.Stars) / float64(r.Reviews)
}

// readModel writes the ratings and the latest reviews in a transaction of its database. What an event means to
// them stands below, once for all databases.
type readModel[Tx any] interface {
	// add adds to the ratings of a product. It is a difference, so that adding it twice would show.
	add(ctx context.Context, tx Tx, product string, reviews, stars int) error
	// put puts a review in the place of the one by the same author, if any.
	put(ctx context.Context, tx Tx, s standing) error
	remove(ctx context.Context, tx Tx, product, author string) error
}

// reviewsProjector is the name of the service's own, for ever: it is in every marker.
const reviewsProjector = "product-reviews"

// productReviews is the projector of both. They share a unit of work, so that nobody sees a review that is not
// in the average yet.
func productReviews[Tx any](name string, opts projector.Options, m readModel[Tx]) *projector.Projector[Tx] {
	return projector.Define(name, review.Types, opts,
		projector.On("posted", func(ctx context.Context, tx Tx, e eventstore.Event[review.Posted]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, 1, d.Stars); err != nil {
				return err
			}
			return m.put(ctx, tx, standing{d.Product, d.Author, d.Stars, d.Summary, excerpt(d.Text), d.ReviewedAt})
		}),
		projector.On("edited", func(ctx context.Context, tx Tx, e eventstore.Event[review.Edited]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, 0, d.Stars-d.WasStars); err != nil {
				return err
			}
			return m.put(ctx, tx, standing{d.Product, d.Author, d.Stars, d.Summary, excerpt(d.Text), d.ReviewedAt})
		}),
		projector.On("withdrawn", func(ctx context.Context, tx Tx, e eventstore.Event[review.Withdrawn]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, -1, -d.WasStars); err != nil {
				return err
			}
			return m.remove(ctx, tx, d.Product, d.Author)
		}),
	)
}

const excerptRunes = 280 // how much of a text the read model keeps; the event has all of it

func excerpt(text string) string {
	n := 0
	for i := range text {
		if n++; n > excerptRunes {
			return text[:i] + "…"
		}
	}
	return text
}
