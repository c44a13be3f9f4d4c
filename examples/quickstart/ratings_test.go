package main

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func openTest(t testing.TB) *sqlite.DB {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "test.db"), nil)
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	check(t, db.Migrate(t.Context()))
	_, err = db.SQL().ExecContext(t.Context(), `create table ratings (product text primary key, reviews int, stars int)`)
	check(t, err)
	return db
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRatings(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(openTest, ratings, func(ctx context.Context, db *sqlite.DB) ([]string, error) {
		return projectortest.Rows(ctx, db.SQL().QueryContext, `select * from ratings order by product`)
	})
	events := []projectortest.Event{
		projectortest.In("review-42-ann", ReviewPosted{"42", "ann", 5}),
		projectortest.In("review-42-bob", ReviewPosted{"42", "bob", 2}),
		projectortest.In("review-7-ann", ReviewPosted{"7", "ann", 3}),
	}
	kit.Given(t, events...).Then("42 | 2 | 7", "7 | 1 | 3")
	kit.ExactlyOnce(t, events...)
	kit.Commutes(t, events...)
}

func TestPost(t *testing.T) {
	t.Parallel()
	fresh := func(string) *Review { return &Review{} }
	five := func(r *Review) ([]any, error) { return r.Post("42", "ann", 5) }
	projectortest.Given(t, fresh).When(five).Then(ReviewPosted{"42", "ann", 5})
	projectortest.Given(t, fresh, ReviewPosted{"42", "ann", 5}).When(five).Then()
}
