// Command quickstart posts a review and reads it back from a read model, in one SQLite file.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Events are plain structs. The table of types gives each one its stored name.
type ReviewPosted struct {
	Product, Author string
	Stars           int
}

var types = eventstore.NewTypes(eventstore.Type[ReviewPosted]("review.posted"))

// A handler updates the read model in the transaction that it is given. The same transaction records
// how far the projector has read, so each event takes effect exactly once. The names are stored: keep them.
var ratings = projector.Define("product-ratings", types, projector.Options{},
	projector.On("posted", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[ReviewPosted]) error {
		_, err := tx.ExecContext(ctx, `
			insert into ratings (product, reviews, stars) values (?1, 1, ?2)
			on conflict (product) do update set reviews = reviews + 1, stars = stars + ?2`,
			e.Data.Product, e.Data.Stars)
		return err
	}))

// An aggregate rebuilds its state in Apply. Its methods decide by returning new events.
type Review struct{ posted bool }

func (r *Review) Apply(event any) {
	if _, ok := event.(ReviewPosted); ok {
		r.posted = true
	}
}

func (r *Review) Post(product, author string, stars int) ([]any, error) {
	if stars < 1 || stars > 5 {
		return nil, fmt.Errorf("stars must be 1 to 5, got %d", stars)
	}
	if r.posted {
		return nil, nil // no event: nothing is written
	}
	return []any{ReviewPosted{product, author, stars}}, nil
}

func run(ctx context.Context, path string) (err error) {
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }() // after the runner has stopped
	if err := db.Migrate(ctx); err != nil {
		return err
	}
	const table = `create table if not exists ratings (product text primary key, reviews int, stars int)`
	if _, err := db.SQL().ExecContext(ctx, table); err != nil {
		return err
	}

	reviews, err := eventstore.NewRepository(db, types, "review", func(string) *Review { return &Review{} }, nil)
	if err != nil {
		return err
	}
	// The runner reads all events from the log, and then each new one.
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, ratings)
	if err != nil {
		return err
	}
	app, err := kinora.Start(ctx, runner)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, app.Stop()) }()

	id := eventstore.JoinID("42", "ann")
	at, err := reviews.Update(ctx, id, func(r *Review) ([]any, error) { return r.Post("42", "ann", 5) })
	if err != nil {
		return err
	}
	if err := ratings.Wait(ctx, db, at); err != nil { // read your own write
		return err
	}
	var n, stars int
	if err := db.SQL().QueryRowContext(ctx, `select reviews, stars from ratings where product = '42'`).Scan(&n, &stars); err != nil {
		return err
	}
	fmt.Printf("product 42: %d review(s), %.1f stars\n", n, float64(stars)/float64(n))
	return nil
}

func main() {
	if err := run(context.Background(), "quickstart.db"); err != nil {
		log.Fatal(err)
	}
}
