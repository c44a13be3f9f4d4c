package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

// rating is the sum of the reviews of one product.
type rating struct {
	Product string
	Reviews int `redis:"reviews"`
	Stars   int `redis:"stars"` // of all reviews
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
	// create creates the tables.
	create(ctx context.Context, tx Tx) error
	// add adds to the rating of a product. The values are differences, so that a duplicate would be
	// visible.
	add(ctx context.Context, tx Tx, product string, reviews, stars int) error
	// put inserts a review or replaces the one by the same author.
	put(ctx context.Context, tx Tx, s currentReview) error
	remove(ctx context.Context, tx Tx, product, author string) error
}

// The tables of the read model in a SQL database. Readers use views with these names.
const (
	tableRatings = "ratings"
	tableLatest  = "latest_reviews"
)

var sqlTables = []string{tableRatings, tableLatest}

// tables names the tables that a handler writes. The service's tables have no prefix, and those of
// the demo have two.
type tables struct{ prefix string }

func (t tables) ratings(ctx context.Context) string {
	return projector.Table(ctx, t.prefix+tableRatings)
}

func (t tables) latest(ctx context.Context) string {
	return projector.Table(ctx, t.prefix+tableLatest)
}

// The names of the service's projector. They must never change: every marker has one. The read model in
// Redis has a projector of its own, and so its own checkpoint and parked messages: a service may change
// from one to the other and back, and each catches up with the events.
const (
	reviewsProjector = "product-reviews"
	redisProjector   = "product-reviews-redis"
)

// reviewsVersion is the version of the handlers. Raise it when one of them writes other rows: the new
// program then fills new tables, and shows them to readers when they are complete.
const reviewsVersion = 1

// serviceReviews defines the service's projector.
func serviceReviews[Tx any](name string, tables []string, m readModel[Tx], more ...projector.Handler[Tx]) *projector.Projector[Tx] {
	return productReviews(name, projector.Options{
		Markers: true,
		Tables:  tables,
		Version: reviewsVersion, RebuildOnChange: projector.BlueGreen,
	}, m, append(more, projector.OnCreate(m.create))...)
}

// productReviews defines the projector of ratings and latest reviews. Both are written in one unit
// of work, so that no reader sees a review that the average lacks.
func productReviews[Tx any](
	name string, opts projector.Options, m readModel[Tx], more ...projector.Handler[Tx],
) *projector.Projector[Tx] {
	return projector.Define(name, review.Types, opts, append(more,
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
		// Withdrawn or Hidden comes before it, so the review is removed already, unless only the end of the
		// stream is left after an archive.
		projector.On("ended", func(ctx context.Context, tx Tx, e eventstore.Event[eventstore.Ended]) error {
			_, id, _ := strings.Cut(e.Stream, "-")
			parts, err := eventstore.SplitID(id)
			if err != nil || len(parts) != 2 {
				return nil // not a stream of a review
			}
			return m.remove(ctx, tx, parts[0], parts[1])
		}),
		projector.On("hidden", func(ctx context.Context, tx Tx, e eventstore.Event[review.Hidden]) error {
			d := e.Data
			if err := m.add(ctx, tx, d.Product, -1, -d.WasStars); err != nil {
				return err
			}
			return m.remove(ctx, tx, d.Product, d.Author)
		}),
	)...)
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
