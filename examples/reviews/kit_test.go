package main

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// kitEvents are those of five reviews of two products.
func kitEvents() []projectortest.Event {
	at := time.Date(2024, 5, 1, 12, 0, 0, 0, time.UTC)
	return []projectortest.Event{
		projectortest.In("review-42-ann", review.Posted{Product: "42", Author: "ann", Stars: 5, Summary: "Bright", ReviewedAt: at}),
		projectortest.In("review-42-bob", review.Posted{Product: "42", Author: "bob", Stars: 1, ReviewedAt: at.Add(time.Hour)}),
		projectortest.In("review-7-ann", review.Posted{Product: "7", Author: "ann", Stars: 2, ReviewedAt: at}),
		projectortest.In("review-42-ann", review.Edited{Product: "42", Author: "ann", Stars: 4, WasStars: 5, ReviewedAt: at.Add(2 * time.Hour)}),
		projectortest.In("review-42-cid", review.Posted{Product: "42", Author: "cid", Stars: 3, ReviewedAt: at}),
		projectortest.In("review-42-bob", review.Withdrawn{Product: "42", Author: "bob", WasStars: 1, WithdrawnAt: at.Add(3 * time.Hour)}),
		projectortest.In("review-7-dan", review.Posted{Product: "7", Author: "dan", Stars: 4, ReviewedAt: at}),
		projectortest.In("review-7-dan", review.Hidden{Product: "7", Author: "dan", WasStars: 4, Reason: "spam", HiddenAt: at.Add(4 * time.Hour)}),
		projectortest.In("review-42-bob", review.Posted{Product: "42", Author: "bob", Stars: 2, ReviewedAt: at.Add(5 * time.Hour)}),
		projectortest.In("review-7-ann", review.Edited{Product: "7", Author: "ann", Stars: 3, WasStars: 2, ReviewedAt: at.Add(5 * time.Hour)}),
	}
}

const kitRows = `
select product, '', reviews, stars, '' from ratings
union all select product, author, 0, stars, summary from latest_reviews order by 1, 2`

var kitWant = []string{"42 |  | 3 | 9 | ", "42 | ann | 0 | 4 | ", "42 | bob | 0 | 2 | ", "42 | cid | 0 | 3 | ", "7 |  | 1 | 3 | ", "7 | ann | 0 | 3 | "}

func TestReadModelSQLite(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(func(t testing.TB) *sqlite.DB {
		db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "test.db"), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		require.NoError(t, db.Migrate(t.Context()))
		return db
	}, sqliteReviews, func(ctx context.Context, db *sqlite.DB) ([]string, error) {
		return projectortest.Rows(ctx, db.SQL().QueryContext, kitRows)
	})
	kit.Given(t, kitEvents()...).Then(kitWant...).Redeliver().Then(kitWant...)
	kit.ExactlyOnce(t, kitEvents()...)
	kit.Commutes(t, kitEvents()...)
}

func TestReadModelPostgres(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(func(t testing.TB) *postgres.DB { return postgrestest.Open(t, nil) }, postgresReviews,
		func(ctx context.Context, db *postgres.DB) ([]string, error) {
			return projectortest.Rows(ctx, db.Pool().Query, kitRows)
		})
	kit.Given(t, kitEvents()...).Then(kitWant...).Redeliver().Then(kitWant...)
	kit.ExactlyOnce(t, kitEvents()...)
	kit.Commutes(t, kitEvents()...)
}
