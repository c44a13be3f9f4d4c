package postgrestest_test

import (
	"context"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

type posted struct{ Stars int }

var types = eventstore.NewTypes(eventstore.Type[posted]("review.posted"))

// A test with a database that no other test uses. Tables of the application are created once, in the template.
func ExampleOpen() {
	const tables = `create table ratings (product text primary key, stars int not null)`

	test := func(t *testing.T) {
		t.Parallel()
		ctx := context.Background()
		db := postgrestest.Open(t, &postgres.Config{}, tables)

		drafts, err := types.Encode(ctx, posted{Stars: 5})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.Append(ctx, "review-42", eventstore.NoStream, drafts); err != nil {
			t.Fatal(err)
		}
		var rows int
		if err := db.Pool().QueryRow(ctx, `select count(*) from ratings`).Scan(&rows); err != nil || rows != 0 {
			t.Fatal(rows, err)
		}
	}
	_ = test
}
